"""The same, and drafts: legal plans that draft and verify as many tokens of each request as chance has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder
from tests.vllm import random_plans

SOURCE = "chance"


@dataclass
class Scheduler(random_plans.Scheduler):
    needs: ClassVar[frozenset[str]] = random_plans.Scheduler.needs | {"draft"}

    def plan(self, view: View) -> Plan:
        rng, builder = self._rng, BatchBuilder(view)
        for seq in view.running:
            if rng.random() < 0.03:
                builder.preempt(seq)
        order = [s for s in [*view.running, *view.waiting] if s not in builder.preempted]
        rng.shuffle(order)
        for seq in order:
            most = builder.tokens_that_fit(seq)
            if not most or rng.random() < 0.1:
                continue
            tokens = most if rng.random() < 0.5 else rng.randint(1, most)
            if tokens < seq.pending:
                builder.add(seq, tokens)
                continue
            there = len(seq.draft.parents) if seq.draft is not None else 0
            nodes = range(builder.verifiable(seq, rng.randint(0, there)))
            builder.add(seq, tokens, tuple(nodes), rng.choice((None, (1, 1), (2, 1), (4, 1))))
        return builder.plan(wake_at=view.now + 1e-3)
