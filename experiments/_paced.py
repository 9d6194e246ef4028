"""A policy behind AdaServe's admission, for `adaserve_parts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policies import load
from rubato.policies.vllm_spec import Scheduler as VllmSpec
from rubato.policy_kit.paced_admission import PacedScheduler

SOURCE = "ours, to see what admission alone brings"


@dataclass
class Scheduler:
    """inner: a policy that only plans work. budget, n: its settings; n 0 where it has none."""

    needs = VllmSpec.needs
    inner: str = "smart_spec"
    budget: int = 256
    n: int = 0
    _paced: PacedScheduler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        settings = {"budget": self.budget} | ({"n": self.n} if self.n else {})
        self._paced = PacedScheduler(load(self.inner, settings), self.budget)

    def observe(self, events: Sequence[Event]) -> None:
        self._paced.observe(events)

    def plan(self, view: View) -> Plan:
        return self._paced.plan(view)
