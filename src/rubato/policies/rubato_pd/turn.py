"""The decisions of one dispatch, collected while it is made."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.core.interfaces import SeqView
from rubato.core.plan import Recall, Role
from rubato.policies.rubato_pd.replica_model import FleetReplica


class RoutingRound:
    """Decisions so far; `fleet` are the replicas that requests may go to."""

    def __init__(self, held: Sequence[SeqView], fleet: Sequence[FleetReplica], now: float) -> None:
        self.held_ids = {seq.id for seq in held}
        self.fleet = fleet
        self.now = now
        self.place: dict[str, str] = {}
        self.reject: dict[str, str] = {}
        self.demote: list[str] = []
        self.recall: dict[str, Recall] = {}
        self.roles: dict[str, Role] = {}
        self.why: dict[str, str] = {}
        self._groups: dict[int | None, list[FleetReplica]] = {}

    def group(self, group: int | None) -> list[FleetReplica]:
        """Returns its replicas, the most loaded first; for the pool (None) the idlest first. Ties go by lowest
        index."""
        if (replicas := self._groups.get(group)) is None:
            replicas = self._groups[group] = [r for r in self.fleet if r.group == group]
            replicas.sort(
                key=(lambda r: (len(r.forecast), r.index)) if group is None else (lambda r: (-r.load, r.index))
            )
        return replicas

    def invalidate_groups(self, *groups: int | None) -> None:
        for group in groups:
            self._groups.pop(group, None)
