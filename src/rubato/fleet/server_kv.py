"""KV between servers: a prompt is prefilled at one, and the request goes on at another, which reads its KV.

The protocol is vLLM's `kv_transfer_params` (NIXL's connector). The first server runs the request for one token, which
no client sees, and its response says where the KV is. The body goes with these parameters to the second server, whose
engine reads the KV, runs the prompt's last token again and answers. So `reserve` only counts memory there, `transfer`
passes the parameters, and `receive` is the request itself.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

from rubato.core.clock import PLAN, Clock
from rubato.core.events import HandedOff, Started
from rubato.core.interfaces import Host, TransferError
from rubato.core.plan import KV
from rubato.core.request import Request
from rubato.fleet.disaggregation import KV_PARAMS_FIELD, kv_params_of
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Trip
from rubato.fleet.remote_view import RemoteReplica
from rubato.fleet.server_requests import ServerRequests
from rubato.wire.response_stream import usage_of

MAX_LEASE_SHARE = 2 / 3  # of its lease: a prefilled request that waits longer is prefilled again


class ServerKV:
    """Keeps KV of a server for other servers, and receives KV that the server reads from them.

    `lease` is the number of seconds for which the server's engine keeps KV for another engine; None: it has no KV
    connector.

    Args:
        requests: the open requests of the server.
        remote: returns the mirror of the server's replica.
        send: sends a trip with the KV of its prompt at another server.
        emit: gets the events, as every host's.
    """

    def __init__(
        self, replica: str, requests: ServerRequests, remote: Callable[[], RemoteReplica], clock: Clock, *,
        send: Callable[[Trip, Request, KV], None], emit: Listener,
    ) -> None:  # fmt: skip
        self.lease: float | None = None
        self._replica, self._requests, self._remote, self._clock = replica, requests, remote, clock
        self._send, self._emit = send, emit
        self._kv_by_id: dict[str, tuple[KV, Request]] = {}  # of handed-off requests, each with its request
        self._transferring: set[str] = set()  # ids of those whose transfer runs

    @property
    def is_empty(self) -> bool:
        """Whether no KV is kept for other servers."""
        return not self._kv_by_id

    def clear(self) -> None:
        self._kv_by_id.clear()

    # ----------------------------------------------------------------- where it is prefilled

    def hand_over(self, trip: Trip, body: bytes) -> None:
        """Hands a prefilled request off, so that it is placed where it decodes.

        Args:
            body: the response, which says where the KV is.
        """
        (id,) = trip.ids
        requests, remote, now = self._requests, self._remote(), self._clock.now()
        report = requests.prefill_reports.pop(id, None)
        if id not in requests.trips:
            trip.break_off(f"replica {self._replica} ended it otherwise")
            return
        if (params := kv_params_of(body)) is None:
            why = f"replica {self._replica} prefilled it, and does not say where its KV is: has its server a KV "
            requests.finish(id, "failed", f"{why}connector?")
            return
        if (prompt := usage_of(body)[0]) == 1:
            why = "a prompt of one token: a fleet that prefills and decodes apart serves longer ones"
            requests.finish(id, "refused", f"rejected-invalid: {why}")
            return
        if remote.is_waiting(id):  # without a report from the link
            if prompt:
                remote.set_prompt_tokens(id, prompt)
            requests.fold(Started(now, id))
        cached = max(1, prompt - 1) if report is None else report.cached
        handed_off = remote.handed_off_request(id, "prefilled", now, cached)
        assert handed_off is not None, "a request with a trip has a sequence"
        request = trip.client_progress(handed_off, now)  # without the token of the prefill, which no client sees
        self._kv_by_id[id] = KV(cached, KV_PARAMS_FIELD, (), json.dumps(params).encode(), 0), request
        if self.lease is not None:
            self._clock.call_at(now + MAX_LEASE_SHARE * self.lease, PLAN, lambda: self._drop_expired(id, request))
        requests.fold(HandedOff(now, id, request))

    def _has_kv(self, id: str) -> bool:
        """Returns whether the engine still has a request's KV; what it has freed is forgotten here."""
        if not self._remote().is_leaving(id):
            self._kv_by_id.pop(id, None)
        return id in self._kv_by_id

    def _drop_expired(self, id: str, request: Request) -> None:
        """Hands a request off again without its KV, which has waited for too long and will be freed by the engine. Does
        nothing where the engine has freed it already: the request may be at another replica, or have ended."""
        if id in self._transferring or not self._has_kv(id) or self._kv_by_id[id][1] is not request:
            return
        del self._kv_by_id[id]
        self._remote().forget(id)
        now, handoff = self._clock.now(), request.handoff
        assert handoff is not None
        again = replace(request, handoff=replace(handoff, reason="failed", at=now, cached=0))
        self._emit(HandedOff(now, id, again))

    async def transfer(self, id: str, to: Host) -> None:
        """Passes a request's KV on, as `interfaces.Host`: the target reads the KV itself."""
        remote = self._remote()
        if not self._has_kv(id):
            raise TransferError(f"replica {self._replica} has no KV of request {id!r} any more")
        self._transferring.add(id)
        try:
            await to.receive(id, self._kv_by_id[id][0])
        except TransferError:
            self._kv_by_id.pop(id, None)  # the engine may have freed it after a partial read
            remote.forget(id)
            raise
        finally:
            self._transferring.discard(id)

    # ----------------------------------------------------------------- where it goes on

    def reserve(self, request: Request, trip: Trip) -> bool:
        """Counts memory for the request; returns False if there is not enough."""
        remote = self._remote()
        view = remote.view(self._clock.now())
        max_running = view.limits.max_running
        assert request.handoff is not None
        if max_running is not None and len(view.running) >= max_running:
            return False
        if view.limits.blocks(request.handoff.cached + 1) > view.kv_free:
            return False
        remote.submit(request, self._clock.now())
        self._requests.trips[request.id] = trip
        return True

    async def receive(self, id: str, kv: KV) -> None:
        """Sends the request with the address of its KV, and waits until it has started, as `interfaces.Host`."""
        requests, seq = self._requests, self._remote().seq_of(id)
        trip = requests.trips.get(id)
        if seq is None or trip is None or id in requests.kv_arrivals or not self._remote().is_arriving(id):
            raise TransferError(f"replica {self._replica} expects no KV of request {id!r} any more")
        arrival = requests.kv_arrivals[id] = asyncio.get_running_loop().create_future()
        self._send(trip, seq.request, kv)
        try:
            await arrival
        finally:
            requests.kv_arrivals.pop(id, None)

    def release(self, id: str) -> Trip | None:
        """Forgets a request's KV, as `interfaces.Host`. The engine keeps the KV of a leaving request until it was read
        or its lease is over. Returns the trip of a request whose KV has not come, and will not."""
        self._kv_by_id.pop(id, None)
        remote = self._remote()
        if not remote.is_arriving(id):
            return None
        remote.forget(id)
        return self._requests.forget(id)
