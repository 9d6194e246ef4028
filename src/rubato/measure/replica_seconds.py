"""What a fleet costs, in replica-seconds, and which tiers it was spent on: a fold over the cluster's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rubato.core.events import Event, Finished, HandedOff, Joined, Left, Lost, Offered, Placed


@dataclass(frozen=True, slots=True)
class ReplicaSeconds:
    """What a fleet cost, in replica-seconds. At any time a replica's time is divided equally among the requests that
    are there, waiting ones included, each charging the tier that it asked for: one rule for all policies, also for
    those whose replicas serve no one tier.

    Args:
        total: of all replicas, each from when its start began until it left.
        starting: of these, until replicas served.
        idle: of these, without a request.
        tiers: the rest, by tier.
    """

    total: float
    tiers: dict[str, float]
    idle: float
    starting: float


@dataclass(slots=True)
class _Replica:
    since: float  # all before it is charged
    there: Counter[str] = field(default_factory=Counter)  # requests by tier


class ReplicaSecondsMeter:
    """Listens to a cluster and measures its replica-seconds.

    Args:
        replicas: those that are there at time `start`.
    """

    hears_tokens = False

    def __init__(self, replicas: Iterable[str], start: float = 0.0) -> None:
        self._replicas = {id: _Replica(start) for id in replicas}
        self._tiers: dict[str, str] = {}  # of requests in flight
        self._where: dict[str, tuple[str, str]] = {}  # request -> its replica and tier
        self._charged: dict[str, float] = {}
        self._idle = self._starting = 0.0
        self._at_rest = ReplicaSeconds(0.0, {}, 0.0, 0.0)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Placed):
            self._leave(event.id, event.at)
            if (replica := self._replicas.get(event.replica)) is not None:
                self._charge(replica, event.at)
                tier = self._tiers.get(event.id, "")
                replica.there[tier] += 1
                self._where[event.id] = event.replica, tier
        elif isinstance(event, Finished):
            self._leave(event.id, event.at)
            if self._tiers.pop(event.id, None) is not None and not self._tiers:
                self._at_rest = self.until(event.at)
        elif isinstance(event, HandedOff | Lost):
            self._leave(event.id, event.at)
        elif isinstance(event, Offered):
            self._tiers[event.id] = event.request.tier
        elif isinstance(event, Joined):
            self._starting += event.seconds
            self._replicas[event.id] = _Replica(event.at)
        elif isinstance(event, Left) and (gone := self._replicas.pop(event.id, None)) is not None:
            self._charge(gone, event.at)

    def _leave(self, id: str, at: float) -> None:
        found = self._where.pop(id, None)
        if found is not None and (replica := self._replicas.get(found[0])) is not None:
            self._charge(replica, at)
            replica.there[found[1]] -= 1

    def _charge(self, replica: _Replica, until: float) -> None:
        seconds, replica.since = until - replica.since, max(until, replica.since)
        if seconds <= 0.0:
            return
        if not (count := replica.there.total()):
            self._idle += seconds
            return
        for tier, n in replica.there.items():
            if n:
                self._charged[tier] = self._charged.get(tier, 0.0) + seconds * n / count

    def until_last_end(self) -> ReplicaSeconds:
        """All up to when a request's end last left none in flight; a replica that starts then is not in it."""
        return self._at_rest

    def until(self, at: float) -> ReplicaSeconds:
        """All up to now, `at`; a replica that starts is counted once it serves."""
        for replica in self._replicas.values():
            self._charge(replica, at)
        total = self._idle + self._starting + sum(self._charged.values())
        return ReplicaSeconds(total, dict(sorted(self._charged.items())), self._idle, self._starting)
