"""Reads a log: the timeline of one request, and the measured steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rubato.core.events import Event, Finished, Stepped
from rubato.core.plan import Sample
from rubato.core.request import Request


@dataclass(slots=True)
class Timeline:
    """One request from offer to end.

    Args:
        request: as offered.
        times: of the clock, in seconds.
        tokens: tokens[i] output tokens were out by times[i].
        end: its last event.
        demoted_at: when it became best effort, unless it asked for that.
    """

    request: Request
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    demoted_at: float | None = None


def steps(events: Iterable[Event]) -> list[Sample]:
    """Returns the steps of a log, as samples for a latency model."""
    return [Sample(e.shape, e.seconds) for e in events if isinstance(e, Stepped)]
