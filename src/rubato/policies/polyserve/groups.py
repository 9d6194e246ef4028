"""PolyServe's replicas in groups: one for each tier, those that prefill, and a pool that serves best effort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import is_

from rubato.core.interfaces import SeqView, View
from rubato.policies.polyserve.replica_model import TierReplica, is_source
from rubato.policy_kit.tier_fleet import POOL_ROLE, PREFILL_GROUP, RoutingRound, TierRouter

# Seconds after which a prefill replica without a prompt goes back to the pool (paper, §4.3: periodically).
PREFILL_IDLE_S = 0.3


@dataclass
class GroupingRouter(TierRouter[TierReplica]):
    """A router with its replicas in groups, each sorted by load when it is asked for."""

    policy = "polyserve"
    replica_type = TierReplica
    _fleet: Sequence[View] = field(init=False, repr=False, default=())
    _groups: list[list[TierReplica]] = field(init=False, repr=False, default_factory=list)  # the most loaded first
    _unsorted: set[int] = field(init=False, repr=False, default_factory=set)
    _changed_replicas: dict[str, TierReplica] = field(init=False, repr=False, default_factory=dict)  # a request left

    def __post_init__(self) -> None:
        super().__post_init__()
        self._groups = [[] for _ in range(len(self.tiers) + 1)]  # the last one, `PREFILL_GROUP`, prefills

    def _changed(self, replica: TierReplica) -> None:
        self._changed_replicas[replica.id] = replica
        if replica.group is not None:
            self._unsorted.add(replica.group)

    def _update_replicas(self, fleet: Sequence[View]) -> None:
        """Updates the replicas of the fleet and their views."""
        replicas = self._replicas
        if len(fleet) == len(self._fleet) and all(map(is_, fleet, self._fleet)):  # views change in place
            return
        self._fleet = list(fleet)
        for index, view in enumerate(fleet):
            if view.id not in replicas:
                self._changed_replicas[view.id] = self._book(view, index)
            replicas[view.id].show(view)
        if len(replicas) > len(fleet):
            here = {view.id for view in fleet}
            for lost_replica in [replica for replica in replicas.values() if replica.id not in here]:
                self._move(lost_replica, None)
                self._changed_replicas.pop(lost_replica.id, None)
                self._forget_placements(lost_replica)
                del replicas[lost_replica.id]

    def _loaded(self, group: int, among: Sequence[TierReplica] | None) -> Sequence[TierReplica]:
        """Returns the replicas of a group that admit requests (within `among`, if given), the most loaded first; ties
        by index."""
        if among is not None and all(replica.group != group for replica in among):
            return ()
        replicas = self._groups[group]
        if group in self._unsorted:
            replicas.sort(key=TierReplica.rank)
            self._unsorted.discard(group)
        return [r for r in replicas if not r.draining and (among is None or r in among)]

    def _idlest(self, seq: SeqView, besides: TierReplica | None = None, enlist: bool = True) -> TierReplica | None:
        """Returns the idlest replica of the pool that can take a request's KV; ties by lowest index.

        Args:
            seq: the request
            besides: a replica that is left out
            enlist: whether the replica is to change its group, which it cannot while KV is on its way there
        """
        pool = [r for r in self._replicas.values() if r.group is None and r is not besides and not is_source(r, seq)]
        pool = [r for r in pool if not (enlist and r.receives_kv())]
        return min(pool, key=lambda r: (len(r.forecast), r.index), default=None)

    def _enlist(self, replica: TierReplica, group: int, routing: RoutingRound) -> None:
        """Moves a replica to a group, and recalls best effort from it."""
        if replica.group is None and not replica.empty:
            self._recall_best_effort(replica, routing)
        self._move(replica, group)
        routing.roles[replica.id] = self._role(group)

    def _give_back(self, replica: TierReplica, routing: RoutingRound) -> None:
        """Gives an empty replica back to the pool, and lets one drain on which only requests of looser tiers are left.

        A prefill replica goes back once it has been empty for `PREFILL_IDLE_S`: a tier would take it at once, and
        prompts would have to wait until a decode replica is empty.
        """
        group = replica.group
        if group is None:
            return
        if replica.empty:
            if group == PREFILL_GROUP:
                replica.idle_since = min(replica.idle_since, routing.now)
                if routing.now < replica.idle_since + PREFILL_IDLE_S:
                    return
            if not replica.receives_kv():
                self._move(replica, None)
                routing.roles[replica.id] = POOL_ROLE
        elif group != PREFILL_GROUP and not replica.residents[group] and not replica.draining:
            replica.draining = True
            routing.roles[replica.id] = replace(self._role(group), kind="pending")

    def _move(self, replica: TierReplica, group: int | None) -> None:
        if replica.group is not None:
            self._groups[replica.group].remove(replica)
        replica.group, replica.draining, replica.idle_since = group, False, inf
        if group is not None:
            self._groups[group].append(replica)
            self._unsorted.add(group)
