"""vLLM V0 with a draft model, as it was when AdaServe was measured (0.8.4), for the figures `adaserve-*`.

Whole prompts first and alone, without chunks; then a chain of n drafted tokens for every request that decodes. V0
allowed no chunked prefill with drafts. Nothing of it is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policies import prefill_first
from rubato.policy_kit.batch_builder import BatchBuilder, run_in_order

SOURCE = "vLLM V0 with num_speculative_tokens; the baseline vLLM-Spec(n) of AdaServe, literally"


@dataclass
class Scheduler(prefill_first.Scheduler):
    """n: num_speculative_tokens. The others are those of `prefill_first`."""

    needs: ClassVar[frozenset[str]] = prefill_first.Scheduler.needs | {"draft"}
    n: int = 4

    def plan(self, view: View) -> Plan:
        chain = (self.n, 1)
        prefills = BatchBuilder(view, self.budget)
        self._prefill(prefills, view)
        if prefills.work:
            plan, known = prefills.plan(), view.known
            sampling = [w._replace(draft=chain) if w.tokens == known[w.seq].pending else w for w in plan.work]
            return plan._replace(work=tuple(sampling))
        builder = BatchBuilder(view)
        run_in_order(
            builder, view.running, lambda s: range(len(s.draft.parents)) if s.draft is not None else (), chain
        )  # fmt: skip
        return builder.plan()
