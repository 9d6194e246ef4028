"""A policy that reads every running request in every step, for `simulator_speed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import decode_first

SOURCE = "ours, to measure the simulator by"


@dataclass
class Scheduler:
    """`sarathi` with a budget, which also asks when the most urgent token is due."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 2048
    _urgent: float = field(default=inf, init=False)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        self._urgent = float(view.dues.min(initial=inf))
        return decode_first(view, self.budget).plan()
