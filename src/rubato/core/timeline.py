"""What became of one request, and the steps of a log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rubato.core.events import Event, Finished, Stepped
from rubato.core.plan import Sample
from rubato.core.request import Request


@dataclass(slots=True)
class Timeline:
    """One request from offer to end: tokens[i] output tokens were out by times[i] (the clock's seconds). demoted_at:
    since when it is best effort, without having asked for that."""

    request: Request
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None
    demoted_at: float | None = None


def steps(events: Iterable[Event]) -> list[Sample]:
    """The steps of a log, as a latency model is fitted on them."""
    return [Sample(e.shape, e.seconds) for e in events if isinstance(e, Stepped)]
