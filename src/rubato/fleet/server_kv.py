"""KV between servers: a prompt is prefilled at one, and the request goes on at another, which reads its KV.

By vLLM's protocol for that (`kv_transfer_params`, NIXL's connector): the first server runs the request for one token,
which nobody sees, and says in its response where the KV is; with these words the body goes to the second one, whose
engine reads the KV, runs the prompt's last token again and answers. So `reserve` only counts memory there, `transfer`
hands over the words, and `receive` is the request itself.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from rubato.core.clock import PLAN, Clock
from rubato.core.events import Event, Finished, HandedOff, Started, Transferred
from rubato.core.interfaces import Host, TransferError
from rubato.core.plan import KV, Role
from rubato.core.request import Outcome, Request
from rubato.fleet.disaggregation import KV_PARAMS_FIELD, kv_params_of
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Trip
from rubato.fleet.remote_view import HandOffReport, RemoteReplica
from rubato.fleet.token_path import TokenCount
from rubato.wire.response_stream import usage_of

Trips = dict[str, Trip]  # by the id of each of its requests
MAX_LEASE_SHARE = 2 / 3  # of its lease: a prefilled request that waits longer is prefilled again


class KVBetweenServers:
    """Of a `ServerReplica`. kv_lease: seconds that its engine keeps KV for another."""

    id: str
    clock: Clock
    kv_lease: float | None
    _trips: Trips
    _mine: dict[str, Trip]
    _counted: dict[str, TokenCount]
    _role: Role | None
    _gone: bool
    _idle: asyncio.Event
    _emit_outside: Listener

    if TYPE_CHECKING:

        def _started(self) -> RemoteReplica: ...
        def _send(self, trip: Trip, request: Request, kv: KV | None = None) -> None: ...
        def _leave(self, trip: Trip) -> None: ...
        def _fold(self, *events: Event) -> None: ...
        def _finish(self, id: str, outcome: Outcome, reason: str) -> None: ...
        async def heard_of(self, trip: Trip) -> None: ...

    def _no_kv_moves(self) -> None:
        self._prefilled: dict[str, HandOffReport] = {}  # told by the link, of a response that is not here yet
        self._kv: dict[str, tuple[KV, Request]] = {}  # where the KV is of those handed off, as they were
        self._going: set[str] = set()  # of these, those that are on their way
        self._arrivals: dict[str, asyncio.Future[None]] = {}  # of those that come

    # ----------------------------------------------------------------- where it is prefilled

    @property
    def prefills(self) -> bool:
        """Whether what is sent there now is to go on elsewhere."""
        return self.kv_lease is not None and self._role is not None and self._role.phase == "prefill"

    async def hand_over(self, trip: Trip, body: bytes) -> None:
        """Its prompt is in KV there, as the response says: it is to be placed where it goes on."""
        await self.heard_of(trip)
        (id,) = trip.ids
        mirror, now = self._started(), self.clock.now()
        told = self._prefilled.pop(id, None)
        if id not in self._mine:
            trip.break_off(f"replica {self.id} ended it otherwise")
            return
        if (words := kv_params_of(body)) is None:
            why = f"replica {self.id} prefilled it, and does not say where its KV is: has its server a KV connector?"
            self._finish(id, "failed", why)
            return
        if (prompt := usage_of(body)[0]) == 1:
            why = "a prompt of one token: a fleet that prefills and decodes apart serves longer ones"
            self._finish(id, "refused", f"rejected-invalid: {why}")
            return
        if mirror.waits(id):  # the link has said nothing
            if prompt:
                mirror.correct(id, prompt)
            self._fold(Started(now, id))
        cached = max(1, prompt - 1) if told is None else told.cached
        moved = mirror.moved(id, "prefilled", now, cached)
        assert moved is not None, "what is served here is here"
        request = trip.progress_seen(moved, now)
        self._kv[id] = KV(cached, KV_PARAMS_FIELD, (), json.dumps(words).encode(), 0), request
        if self.kv_lease is not None:
            self.clock.call_at(now + MAX_LEASE_SHARE * self.kv_lease, PLAN, lambda: self._lapse(id, request))
        self._fold(HandedOff(now, id, request))

    def _lapse(self, id: str, request: Request) -> None:
        """Where its KV has waited for too long, it is to be prefilled again: the engine frees it before long."""
        if self._gone or id in self._going or self._kv.get(id, (None, None))[1] is not request:
            return
        del self._kv[id]
        self._started().forget(id)
        now, handoff = self.clock.now(), request.handoff
        assert handoff is not None
        again = replace(request, handoff=replace(handoff, reason="failed", at=now, cached=0))
        self._emit_outside(HandedOff(now, id, again))

    async def transfer(self, id: str, to: Host) -> None:
        """As `interfaces.Host`: the target reads the KV itself."""
        mirror = self._started()
        if id not in self._kv or not mirror.leaves(id):
            raise TransferError(f"replica {self.id} has no KV of request {id!r} any more")
        self._going.add(id)
        try:
            await to.receive(id, self._kv[id][0])
        except TransferError:
            self._kv.pop(id, None)  # it may have been read in part, and the engine told to free it
            mirror.forget(id)
            raise
        finally:
            self._going.discard(id)
        self.release(id)

    # ----------------------------------------------------------------- where it goes on

    def reserve(self, request: Request) -> bool:
        mirror = self._started()
        view = mirror.view(self.clock.now())
        most = view.limits.max_running
        assert request.handoff is not None
        if most is not None and len(view.running) >= most:
            return False
        if view.limits.blocks(request.handoff.cached + 1) > view.kv_free:
            return False
        mirror.submit(request, self.clock.now())
        self._mine[request.id] = self._trips[request.id]
        return True

    async def receive(self, id: str, kv: KV) -> None:
        seq = self._started().known(id)
        trip = self._mine.get(id)
        if seq is None or trip is None or id in self._arrivals or not self._started().arrives(id):
            raise TransferError(f"replica {self.id} expects no KV of request {id!r} any more")
        arrival = self._arrivals[id] = asyncio.get_running_loop().create_future()
        self._send(trip, seq.request, kv)
        try:
            await arrival
        finally:
            self._arrivals.pop(id, None)

    def release(self, id: str) -> None:
        """As `interfaces.Host`. KV of one that leaves stays until its engine says that it was read, or its lease is
        over."""
        self._kv.pop(id, None)
        mirror = self._started()
        if mirror.arrives(id):
            mirror.forget(id)
            self._counted.pop(id, None)
            if (trip := self._mine.pop(id, None)) is not None:
                self._leave(trip)
        self._idle.set()

    def _arrived(self, event: Event) -> None:
        """Of a request whose KV comes: it has, or the request has ended."""
        arrival = self._arrivals.get(event.id) if isinstance(event, Transferred | Finished | HandedOff) else None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _failed_to_arrive(self, trip: Trip, why: str) -> bool:
        """Whether a trip that failed was one whose KV has not come: it is placed again."""
        arrival = self._arrivals.get(trip.ids[0])
        if arrival is None:
            return False
        if not arrival.done():
            arrival.set_exception(TransferError(why))
        return True
