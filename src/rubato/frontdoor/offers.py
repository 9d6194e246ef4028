"""Offers the requests of one API request to a cluster, a few at a time, and settles each at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rubato.core.events import Event, Finished, Placed
from rubato.core.request import Request
from rubato.frontdoor.admission import AdmittedRequest, FrontDoor

OFFERS_PER_TURN = 16  # requests in one turn of the event loop, which places and reports each


class OfferTarget(Protocol):
    """Takes requests that are offered."""

    def offer(self, request: Request, listener: Callable[[Event], None] | None = None) -> None: ...
    def cancel(self, id: str, reason: str = "client disconnected") -> None: ...
    def retry_after(self) -> float: ...


class Offers:
    """Offers the requests of one admitted API request. Each is settled once, even if it is never offered.

    Args:
        is_heard: whether token events arrive. For a response that does not stream, from a server without the link, they
            do not; if its client leaves, all reserved tokens are charged.
    """

    def __init__(
        self, door: FrontDoor, cluster: OfferTarget, admitted: AdmittedRequest, requests: tuple[Request, ...],
        is_heard: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self.requests = requests
        self._is_heard = is_heard
        self._placed_ids: set[str] = set()
        self._door, self._cluster, self._admitted = door, cluster, admitted
        self._by_id = {request.id: request for request in requests}
        self._open_ids: set[str] = set()
        self._is_closed = False

    async def offer_all(self, listener: Callable[[Event], None]) -> None:
        """Offers all requests, unless they are cancelled meanwhile; `listener` gets their events."""

        def on_event(event: Event) -> None:
            if type(event) is Placed:
                self._placed_ids.add(event.id)
            elif type(event) is Finished:
                self._open_ids.discard(event.id)
                used = event.output or event.outcome != "cancelled" or event.id not in self._placed_ids
                if used or self._is_heard():
                    self._door.settle_end(self._admitted, self._by_id[event.id], event)
                else:
                    self._door.settle_unknown(self._admitted)
            listener(event)

        on_event.hears_tokens = getattr(listener, "hears_tokens", True)  # type: ignore[attr-defined]
        for at, request in enumerate(self.requests):
            if at and at % OFFERS_PER_TURN == 0:
                await asyncio.sleep(0)
            if self._is_closed:
                return
            self._open_ids.add(request.id)
            self._cluster.offer(request, on_event)

    def cancel(self, reason: str = "client disconnected") -> None:
        """Cancels the open requests and offers no more."""
        self._is_closed = True
        for id in list(self._open_ids):
            self._cluster.cancel(id, reason)
        left = self._admitted.open_choices - len(self._open_ids)
        self._door.settle(self._admitted, left, 0, 0)

    def retry_after(self) -> float:
        """Returns the seconds until room is expected."""
        return self._cluster.retry_after()
