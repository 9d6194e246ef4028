"""KV between servers: a prompt is prefilled at one, and the request goes on at another, which reads its KV.

The protocol is vLLM's `kv_transfer_params` (NIXL's connector). The first server runs the request for one token, which
no client sees, and its response says where the KV is. The body goes with these parameters to the second server, whose
engine reads the KV, runs the prompt's last token again and answers. So `reserve` only counts memory there, `transfer`
passes the parameters, and `receive` is the request itself.
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
    """The part of a `ServerReplica` that moves KV. kv_lease: seconds that its engine keeps KV for another engine."""

    id: str
    clock: Clock
    kv_lease: float | None
    _trips: Trips
    _requests: dict[str, Trip]
    _token_counts: dict[str, TokenCount]
    _role: Role | None
    _is_gone: bool
    _idle: asyncio.Event
    _emit_outside: Listener

    if TYPE_CHECKING:

        def _started_remote(self) -> RemoteReplica: ...
        def _send(self, trip: Trip, request: Request, kv: KV | None = None) -> None: ...
        def _drop_response(self, trip: Trip) -> None: ...
        def _fold(self, *events: Event) -> None: ...
        def _finish(self, id: str, outcome: Outcome, reason: str) -> None: ...
        async def wait_for_end_report(self, trip: Trip) -> None: ...

    def _init_kv_moves(self) -> None:
        self._prefill_reports: dict[str, HandOffReport] = {}  # from the link, ahead of their responses
        self._kv_at_server: dict[str, tuple[KV, Request]] = {}  # of requests handed off
        self._transferring: set[str] = set()  # of these, requests whose transfer runs
        self._arrivals: dict[str, asyncio.Future[None]] = {}  # by request

    # ----------------------------------------------------------------- where it is prefilled

    @property
    def is_prefill_server(self) -> bool:
        """Whether requests that are sent there now go on elsewhere after their prefill."""
        return self.kv_lease is not None and self._role is not None and self._role.phase == "prefill"

    async def hand_over(self, trip: Trip, body: bytes) -> None:
        """Hands a prefilled request off, so that it is placed where it decodes. body: the response that says where the
        KV is."""
        await self.wait_for_end_report(trip)
        (id,) = trip.ids
        remote, now = self._started_remote(), self.clock.now()
        report = self._prefill_reports.pop(id, None)
        if id not in self._requests:
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
        if remote.is_waiting(id):  # without a report from the link
            if prompt:
                remote.set_prompt_tokens(id, prompt)
            self._fold(Started(now, id))
        cached = max(1, prompt - 1) if report is None else report.cached
        moved = remote.handed_off_request(id, "prefilled", now, cached)
        assert moved is not None, "a request with a trip has a sequence"
        request = trip.progress_seen(moved, now)
        self._kv_at_server[id] = KV(cached, KV_PARAMS_FIELD, (), json.dumps(words).encode(), 0), request
        if self.kv_lease is not None:
            self.clock.call_at(now + MAX_LEASE_SHARE * self.kv_lease, PLAN, lambda: self._drop_expired_kv(id, request))
        self._fold(HandedOff(now, id, request))

    def _drop_expired_kv(self, id: str, request: Request) -> None:
        """Hands a request off again without its KV, which has waited for too long and will be freed by the engine."""
        if self._is_gone or id in self._transferring or self._kv_at_server.get(id, (None, None))[1] is not request:
            return
        del self._kv_at_server[id]
        self._started_remote().forget(id)
        now, handoff = self.clock.now(), request.handoff
        assert handoff is not None
        again = replace(request, handoff=replace(handoff, reason="failed", at=now, cached=0))
        self._emit_outside(HandedOff(now, id, again))

    async def transfer(self, id: str, to: Host) -> None:
        """As `interfaces.Host`: the target reads the KV itself."""
        remote = self._started_remote()
        if id not in self._kv_at_server or not remote.is_leaving(id):
            raise TransferError(f"replica {self.id} has no KV of request {id!r} any more")
        self._transferring.add(id)
        try:
            await to.receive(id, self._kv_at_server[id][0])
        except TransferError:
            self._kv_at_server.pop(id, None)  # the engine may have freed it after a partial read
            remote.forget(id)
            raise
        finally:
            self._transferring.discard(id)
        self.release(id)

    # ----------------------------------------------------------------- where it goes on

    def reserve(self, request: Request) -> bool:
        remote = self._started_remote()
        view = remote.view(self.clock.now())
        most = view.limits.max_running
        assert request.handoff is not None
        if most is not None and len(view.running) >= most:
            return False
        if view.limits.blocks(request.handoff.cached + 1) > view.kv_free:
            return False
        remote.submit(request, self.clock.now())
        self._requests[request.id] = self._trips[request.id]
        return True

    async def receive(self, id: str, kv: KV) -> None:
        seq = self._started_remote().seq_of(id)
        trip = self._requests.get(id)
        if seq is None or trip is None or id in self._arrivals or not self._started_remote().is_arriving(id):
            raise TransferError(f"replica {self.id} expects no KV of request {id!r} any more")
        arrival = self._arrivals[id] = asyncio.get_running_loop().create_future()
        self._send(trip, seq.request, kv)
        try:
            await arrival
        finally:
            self._arrivals.pop(id, None)

    def release(self, id: str) -> None:
        """As `interfaces.Host`. The engine keeps the KV of a leaving request until it was read or its lease is over."""
        self._kv_at_server.pop(id, None)
        remote = self._started_remote()
        if remote.is_arriving(id):
            remote.forget(id)
            self._token_counts.pop(id, None)
            if (trip := self._requests.pop(id, None)) is not None:
                self._drop_response(trip)
        self._idle.set()

    def _end_arrival(self, event: Event) -> None:
        """Ends the wait for a request's KV: it has arrived, or the request has ended."""
        arrival = self._arrivals.get(event.id) if isinstance(event, Transferred | Finished | HandedOff) else None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _fail_arrival(self, trip: Trip, why: str) -> bool:
        """Whether a failed trip still waits for its KV; its transfer fails, and it is placed again."""
        arrival = self._arrivals.get(trip.ids[0])
        if arrival is None:
            return False
        if not arrival.done():
            arrival.set_exception(TransferError(why))
        return True
