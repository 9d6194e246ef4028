"""Where each request of a cluster is: not placed yet, or at a replica; and which replica serves a group."""

from __future__ import annotations

from rubato.core.clock import Clock
from rubato.core.interfaces import LengthPredictor
from rubato.core.request import Request
from rubato.replica.sequence import Seq


class RequestTable:
    """Keeps the requests in flight, by id.

    `unplaced` has requests as a router sees them, in order of arrival, `placements` replica and request of all others;
    `with_kv` has ids of unplaced requests that have KV at a replica, and may wait for memory at another; `groups` has
    the replica of each group, and its requests there.
    """

    def __init__(self, clock: Clock, lengths: LengthPredictor | None) -> None:
        self.unplaced: dict[str, Seq] = {}
        self.placements: dict[str, tuple[str, Request]] = {}
        self.with_kv: set[str] = set()
        self.groups: dict[str, tuple[str, set[str]]] = {}
        self._clock = clock
        self._lengths = lengths
        self._order = 0

    def __len__(self) -> int:
        return len(self.unplaced) + len(self.placements)

    def __contains__(self, id: str) -> bool:
        return id in self.unplaced or id in self.placements

    @property
    def replicas(self) -> set[str]:
        """Ids of replicas with requests."""
        return {replica for replica, _ in self.placements.values()}

    def hold(self, request: Request) -> Seq:
        """Adds a request as unplaced, with its output so far and its KV elsewhere."""
        self._order += 1
        seq = Seq(request, self._order, self._clock.now(), lengths=self._lengths)
        self.with_kv.discard(request.id)
        if request.handoff is not None:
            seq.cached = request.handoff.cached
            if seq.cached:
                self.with_kv.add(request.id)
        self.unplaced[request.id] = seq
        return seq

    def place(self, request: Request, replica: str) -> None:
        """Places an unplaced request at this replica."""
        del self.unplaced[request.id]
        self.with_kv.discard(request.id)
        self.placements[request.id] = (replica, request)
        if request.group:
            self.groups.setdefault(request.group, (replica, set()))[1].add(request.id)

    def take_from_replica(self, id: str) -> Request | None:
        """Removes a request from its replica, and returns it; None if it was at none."""
        _, request = self.placements.pop(id, (None, None))
        if request is not None and request.group in self.groups:
            _, remaining = self.groups[request.group]
            remaining.discard(id)
            if not remaining:
                del self.groups[request.group]
        return request

    def take_back(self, request: Request) -> None:
        """Removes a request that its replica has handed off. The other requests of its group will follow it."""
        if request.group in self.groups and request.id in self.groups[request.group][1]:
            del self.groups[request.group]
        self.take_from_replica(request.id)

    def remove(self, id: str) -> Request | None:
        """Removes an ended request, and returns it; None if it was not in flight."""
        seq = self.unplaced.pop(id, None)
        self.with_kv.discard(id)
        return self.take_from_replica(id) if seq is None else seq.request
