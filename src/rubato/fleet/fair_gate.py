"""Fair shares as a cluster asks for them: an error of theirs ends no request and stops no placing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rubato.core.interfaces import View
from rubato.core.request import Outcome, Request
from rubato.fleet.event_bus import EventBus
from rubato.fleet.fair_share import FairShare

T = TypeVar("T")


class FairGate:
    """A FairShare whose errors are reported as those of a listener (`EventBus`) of the name of what failed, such as
    `FairShare.open`: live they are logged and counted, a simulation ends with the first. The cluster goes on without
    that decision: all that is held passes, in the order that it is held in, and what is beyond `max_in_flight` is
    refused, whatever its tenant."""

    def __init__(self, fair: FairShare, errors: EventBus) -> None:
        self._fair = fair
        self._errors = errors
        self.wake_at: float | None = None  # as FairShare's

    def enter(self, request: Request, now: float) -> None:
        self._safely("enter", now, lambda: self._fair.enter(request, now), None)

    def placed(self, id: str, now: float) -> None:
        self._safely("placed", now, lambda: self._fair.placed(id), None)

    def returned(self, id: str, now: float) -> None:
        self._safely("returned", now, lambda: self._fair.returned(id), None)

    def finished(self, id: str, outcome: Outcome, output: int, now: float) -> None:
        self._safely("finished", now, lambda: self._fair.finished(id, outcome, output, now), None)

    def open(self, held: Sequence[Request], fleet: Sequence[View], now: float) -> Sequence[Request]:
        self.wake_at = None
        through = self._safely("open", now, lambda: self._fair.open(held, fleet, now), None)
        if through is None:
            return held
        self.wake_at = self._fair.wake_at
        return through

    def beyond_share(self, request: Request, places: int, now: float) -> bool:
        return self._safely("beyond_share", now, lambda: self._fair.beyond_share(request, places, now), True)

    def _safely(self, name: str, now: float, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:  # whatever it is: no client is to pay for how others share
            what = f"FairShare.{name}"
            self._errors.report(what, now, f"{what} failed, and requests go on without it", error)
            return otherwise
