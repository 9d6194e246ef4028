"""Metrics as folds over events: one `Record` per finished request, from live events or a log read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rubato.types import Event, Finished, Offered, Request


@dataclass(frozen=True, slots=True)
class Record:
    """One request from offer to end. Times in seconds; `at` is its arrival."""

    request: Request
    end: Finished

    @property
    def at(self) -> float:
        return self.request.arrival


def records(events: Iterable[Event]) -> Iterator[Record]:
    """Join offers and ends, in order of ending. What is still in flight at the end of the events is not among them."""
    offered: dict[str, Request] = {}
    for event in events:
        if isinstance(event, Offered):
            offered[event.id] = event.request
        elif isinstance(event, Finished):
            yield Record(offered.pop(event.id), event)
