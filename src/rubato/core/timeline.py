"""Metrics as folds over events: one `Timeline` per finished request, from live events or a log read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rubato.core.events import Event, Finished, Offered, Stepped, Tokens
from rubato.core.plan import Sample
from rubato.core.request import Request


@dataclass(slots=True)
class Timeline:
    """One request from offer to end: tokens[i] output tokens were out by times[i] (the clock's seconds)."""

    request: Request
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: Finished | None = None


def timelines(events: Iterable[Event]) -> Iterator[Timeline]:
    """Join what happened to each request, in order of ending; what is in flight when the events stop is left out."""
    open_: dict[str, Timeline] = {}
    for event in events:
        if isinstance(event, Offered):
            open_[event.id] = Timeline(event.request)
        elif isinstance(event, Tokens):
            line = open_[event.id]
            line.times.append(event.at)
            line.tokens.append(event.tokens + (line.tokens[-1] if line.tokens else 0))
        elif isinstance(event, Finished):
            line = open_.pop(event.id)
            line.end = event
            yield line


def steps(events: Iterable[Event]) -> list[Sample]:
    """The steps of a log, as a latency model is fitted on them."""
    return [Sample(e.shape, e.seconds) for e in events if isinstance(e, Stepped)]
