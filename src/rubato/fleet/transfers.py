"""Moves KV from the replica that handed a request off to the replica where it is placed: reserve, transfer, release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from rubato.core.clock import Clock, Handle
from rubato.core.interfaces import Host, TransferError
from rubato.core.request import Request
from rubato.fleet.request_table import RequestTable
from rubato.replica.sequence import Seq

log = logging.getLogger(__name__)


class KVTransfers:
    """Runs the transfers of a cluster.

    Args:
        fail: ends an unplaced request with a reason.
        on_kv_freed: called when KV memory may have come free.
    """

    def __init__(
        self, hosts: Mapping[str, Host], requests: RequestTable, clock: Clock, *, fail: Callable[[Seq, str], None],
        on_kv_freed: Callable[[], None],
    ) -> None:  # fmt: skip
        self._hosts = hosts
        self._requests = requests
        self._clock = clock
        self._fail = fail
        self._on_kv_freed = on_kv_freed
        self._tasks: dict[str, Handle] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._tasks

    def start(self, request: Request, source: str, target: str) -> None:
        """Starts the transfer of a request's KV. The target has reserved memory, and the request is placed there."""
        transfer = self._transfer(request.id, self._hosts[source], self._hosts[target])
        self._tasks[request.id] = self._clock.spawn(transfer, f"KV of {request.id}")

    async def _transfer(self, id: str, source: Host, target: Host) -> None:
        try:
            await source.transfer(id, target)
        except TransferError as error:  # one of the two began afresh
            log.warning("%s; it is placed again", error)
            self.take_back(id)
            self._on_kv_freed()
        except Exception as error:  # an engine that cannot take or give this KV: told to the client, never hidden
            log.exception("the KV of request %r could not be moved", id)
            self._fail(self.take_back(id), f"its KV could not be moved from {source.id} to {target.id}: {error}")
        else:
            self._on_kv_freed()

    def end_transfer(self, id: str) -> None:
        """Ends the transfer: the target has the KV, and carries out cancels from now on."""
        self._tasks.pop(id, None)

    def take_back(self, id: str) -> Seq:
        """Stops a transfer. The request is unplaced again, with its KV if that is still there."""
        self._stop(id)
        replica, request = self._requests.placements[id]
        self._requests.take_from_replica(id)
        if replica in self._hosts:
            self._hosts[replica].release(id)
        return self._requests.hold(self.without_lost_kv(request))

    def take_back_all(self) -> None:
        for id in list(self._tasks):
            self.take_back(id)

    def transfers_of(self, replica: str) -> list[str]:
        """Returns the requests whose KV comes from this replica or goes to it."""
        moving = []
        for id in self._tasks:
            target, request = self._requests.placements[id]
            if request.handoff is not None and replica in (target, request.handoff.source):
                moving.append(id)
        return moving

    def end(self, request: Request) -> None:
        """Ends the transfer of an ended request, and frees its KV at the replica that handed it off."""
        self._stop(request.id)
        if request.handoff is not None and request.handoff.source in self._hosts:
            self._hosts[request.handoff.source].release(request.id)

    def without_lost_kv(self, request: Request) -> Request:
        """Returns the request, with a hand-off without KV if the source no longer holds the KV."""
        handoff = request.handoff
        if handoff is None or not handoff.cached:
            return request
        source = self._hosts.get(handoff.source)
        if source is not None and any(seq.id == request.id for seq in source.view().moving):
            return request
        return replace(request, handoff=replace(handoff, cached=0))

    def _stop(self, id: str) -> None:
        task = self._tasks.pop(id, None)
        if task is not None and task is not self._clock.current_task():
            task.cancel()
