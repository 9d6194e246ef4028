"""The requests of one API request: offered to a cluster a few at a time, and settled as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rubato.core.events import Event, Finished, Placed
from rubato.core.request import Request
from rubato.frontdoor.admission import AdmittedRequest, FrontDoor

SLICE = 16  # requests that are offered in one turn of the event loop: each is placed and reported in it


class Cluster(Protocol):
    """Where requests are offered."""

    def offer(self, request: Request, listener: Callable[[Event], None] | None = None) -> None: ...
    def cancel(self, id: str, reason: str = "client disconnected") -> None: ...
    def retry_after(self) -> float: ...


class Offers:
    """The offers of one admitted API request. Each of its requests is settled once, also one that is never offered.

    Args:
        is_heard: whether tokens are heard of as they come. Of a response that a server without the link gives at once
            none is, and if its client leaves, all that was reserved is charged.
    """

    def __init__(
        self, door: FrontDoor, cluster: Cluster, admitted: AdmittedRequest, requests: tuple[Request, ...],
        is_heard: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.requests = requests
        self._is_heard = is_heard
        self._placed: set[str] = set()
        self._door, self._cluster, self._admitted = door, cluster, admitted
        self._by_id = {request.id: request for request in requests}
        self._open: set[str] = set()
        self._closed = False

    async def send(self, listener: Callable[[Event], None]) -> None:
        """Offer all of them, unless they are cancelled meanwhile; `listener` gets their events."""

        def hear(event: Event) -> None:
            if type(event) is Placed:
                self._placed.add(event.id)
            elif type(event) is Finished:
                self._open.discard(event.id)
                used = event.output or event.outcome != "cancelled" or event.id not in self._placed
                if used or self._is_heard():
                    self._door.settle_end(self._admitted, self._by_id[event.id], event)
                else:
                    self._door.settle_unknown(self._admitted)
            listener(event)

        hear.hears_tokens = getattr(listener, "hears_tokens", True)  # type: ignore[attr-defined]
        for at, request in enumerate(self.requests):
            if at and at % SLICE == 0:
                await asyncio.sleep(0)
            if self._closed:
                return
            self._open.add(request.id)
            self._cluster.offer(request, hear)

    def cancel(self, reason: str = "client disconnected") -> None:
        """End what has not ended, and offer no more."""
        self._closed = True
        for id in list(self._open):
            self._cluster.cancel(id, reason)
        left = self._admitted.open_choices - len(self._open)
        self._door.settle(self._admitted, left, 0, 0)

    def retry_after(self) -> float:
        """Seconds until room is expected."""
        return self._cluster.retry_after()
