"""AdaServe that counts what requests' needs change in its selection, for `adaserve_control`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rubato.core.interfaces import SeqView, View
from rubato.policies import adaserve
from rubato.policy_kit.paced_admission import Draft

SOURCE = "ours, to see what SLO-customised selection changes"


@dataclass
class Scheduler(adaserve.Scheduler):
    """counts, of all schedulers of this class so far: steps with nodes to verify, and those in which other nodes are
    verified than if all needs were 0; nodes, and those of them that are others; entries of decodes, and those
    that need more than the token that each gets."""

    counts: ClassVar[dict[str, int]] = {}
    _needless: bool = field(default=False, init=False, repr=False)

    def _choose_nodes(
        self, view: View, decodes: Sequence[SeqView], prompts: Sequence[SeqView], draft: Draft | None
    ) -> Mapping[str, tuple[int, ...]]:
        chosen = super()._choose_nodes(view, decodes, prompts, draft)
        self._needless = True
        without = super()._choose_nodes(view, decodes, prompts, draft)
        self._needless = False
        if any(chosen.values()):
            moved = sum(len(set(nodes) - set(without.get(id, ()))) for id, nodes in chosen.items())
            self._count(steps=1, changed=int(moved > 0), nodes=sum(map(len, chosen.values())), moved=moved)
        return chosen

    def _needed(self, decodes: Sequence[SeqView], end: float, now: float) -> list[float]:
        if self._needless:
            return [0.0] * len(decodes)
        needed = super()._needed(decodes, end, now)
        self._count(entries=len(needed), lacking=sum(need > 1.0 for need in needed))
        return needed

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self.counts[name] = self.counts.get(name, 0) + number
