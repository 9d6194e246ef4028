"""One dispatch of the router, in the making."""

from __future__ import annotations

from collections.abc import Sequence

from rubato.core.interfaces import SeqView
from rubato.core.plan import Recall, Role
from rubato.policies.rubato_pd.replica_model import Replica


class Turn:
    """fleet: what may be named in it."""

    def __init__(self, held: Sequence[SeqView], fleet: Sequence[Replica], now: float) -> None:
        self.held = {seq.id for seq in held}
        self.fleet = fleet
        self.now = now
        self.place: dict[str, str] = {}
        self.reject: dict[str, str] = {}
        self.demote: list[str] = []
        self.recall: dict[str, Recall] = {}
        self.roles: dict[str, Role] = {}
        self.why: dict[str, str] = {}
        self._groups: dict[int | None, list[Replica]] = {}

    def group(self, group: int | None) -> list[Replica]:
        """Its replicas, the most loaded first; of the pool the idlest first. Ties by lowest index."""
        if (found := self._groups.get(group)) is None:
            found = self._groups[group] = [r for r in self.fleet if r.group == group]
            found.sort(key=(lambda r: (len(r.forecast), r.index)) if group is None else (lambda r: (-r.load, r.index)))
        return found

    def changed(self, *groups: int | None) -> None:
        for group in groups:
            self._groups.pop(group, None)
