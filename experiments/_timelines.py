"""Metrics as folds over events: one `Timeline` per finished request, from live events or a log read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rubato.core.events import Demoted, Event, Finished, Offered, Promoted, Tokens
from rubato.core.timeline import Timeline


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
        elif isinstance(event, Demoted):
            open_[event.id].demoted_at = event.at
        elif isinstance(event, Promoted):
            open_[event.id].demoted_at = None
        elif isinstance(event, Finished):
            line = open_.pop(event.id)
            line.end = event
            yield line
