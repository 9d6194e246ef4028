"""AdaServe whose selection and plans are timed, for `adaserve_breakdown`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from rubato.core.clock import measure_cost
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policies import adaserve
from rubato.policy_kit.paced_admission import Draft

SOURCE = "ours, to measure selection by"


@dataclass
class Scheduler(adaserve.Scheduler):
    """spent: CPU seconds so far, of all schedulers of this class: of plans, and in them of selection (what requests
    need, how many nodes pay, and Algorithm 2)."""

    spent: ClassVar[dict[str, float]] = {"plan": 0.0, "selection": 0.0}

    def plan(self, view: View) -> Plan:
        plan, cost = measure_cost(partial(super().plan, view))
        self.spent["plan"] += cost.cpu
        return plan

    def _choose_nodes(
        self, view: View, decodes: Sequence[SeqView], prompts: Sequence[SeqView], draft: Draft | None
    ) -> Mapping[str, tuple[int, ...]]:
        chosen, cost = measure_cost(partial(super()._choose_nodes, view, decodes, prompts, draft))
        self.spent["selection"] += cost.cpu
        return chosen
