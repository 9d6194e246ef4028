"""CO-Chunk: chunked prefill co-located with decodes under a static token budget, decodes first.

For one load that stays as it is, once a sweep has found its budget: a baseline.

PolyServe sweeps the budget and reports the best for each load; a sweep over `budget` is what makes this its baseline
(`rubato capacity --policy co_chunk:budget=128 --policy co_chunk:budget=256 ...`). `sarathi` is the same plan with a
budget that follows the tightest TPOT of the requests at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import decode_first

SOURCE = "PolyServe, §5.1: baseline CO-Chunk"


@dataclass
class Scheduler:
    """budget: tokens per step."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 512

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget is {self.budget}: give at least 1 token per step")

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        builder = decode_first(view, self.budget)
        return builder.plan(repeat_steps=builder.repeat_steps())
