"""The decisions of one dispatch, with the groups of replicas as they are while it is made."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.core.interfaces import SeqView
from rubato.policies.rubato_pd.replica_model import FleetReplica
from rubato.policy_kit.tier_fleet import RoutingRound


class GroupedRound(RoutingRound):
    """Decisions so far; `fleet` are the replicas that requests may go to."""

    def __init__(self, held: Sequence[SeqView], fleet: Sequence[FleetReplica], now: float) -> None:
        super().__init__(now)
        self.held_ids = {seq.id for seq in held}
        self.fleet = fleet
        self._groups: dict[int | None, list[FleetReplica]] = {}

    def group(self, group: int | None) -> list[FleetReplica]:
        """Returns its replicas, the most loaded first; for the pool (None) the idlest first. Ties go by lowest
        index."""
        if (replicas := self._groups.get(group)) is None:
            replicas = self._groups[group] = [r for r in self.fleet if r.group == group]
            replicas.sort(key=(lambda r: (len(r.forecast), r.index)) if group is None else FleetReplica.rank)
        return replicas

    def invalidate_groups(self, *groups: int | None) -> None:
        for group in groups:
            self._groups.pop(group, None)
