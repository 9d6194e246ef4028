"""A policy without sense: legal plans drawn at random, so that whatever a plan can say is said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder

SOURCE = "chance"


@dataclass
class Scheduler:
    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    seed: int = 0
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        rng, builder = self._rng, BatchBuilder(view)
        drop = {s.id: "chance" for s in view.waiting if s.request.on_decline == "refuse" and rng.random() < 0.1}
        for seq in view.running:
            if rng.random() < 0.1:
                builder.preempt(seq)
        order = [s for s in [*view.running, *view.waiting] if s not in builder.preempted and s.id not in drop]
        rng.shuffle(order)
        for seq in order:
            most = builder.tokens_that_fit(seq)
            if most and rng.random() < 0.8:
                builder.add(seq, most if rng.random() < 0.3 else rng.randint(1, most))
        here = [s for s in [*view.running, *view.waiting] if s.id not in drop]
        return builder.plan(
            demote=[s.id for s in here if not s.best_effort and rng.random() < 0.1],
            promote=[s.id for s in here if s.demoted and rng.random() < 0.3],
            drop=drop,
            wake_at=view.now + 1e-3,
        )
