"""vLLM with speculative decoding: the `vllm` policy, and a chain of n drafted tokens for every request that decodes.

For an engine that drafts chains, below capacity: a baseline.

Reproduced: n tokens are drafted for each sequence that samples, at any load; its next step verifies as many of them as
the budget leaves room for. They count in the budget and take KV, for which others are preempted, as pending tokens do.
Not reproduced: what `vllm` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policies import vllm
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order, waiting_that_fit
from rubato.policy_kit.stateless import Stateless

SOURCE = "vLLM V1 with num_speculative_tokens; the baseline vLLM-Spec(n) of AdaServe and vLLM (Spec) of SLOs-Serve"


@dataclass
class Scheduler(Stateless):
    """Plans steps of `vllm`, with a chain of drafted tokens for each decode.

    Args:
        budget: tokens of a step (vLLM's max_num_batched_tokens)
        n: tokens of a chain (vLLM's num_speculative_tokens; AdaServe's artifact has 4, 6 and 8)
        reserve_kv: start a request only when KV for all of it is left
    """

    needs = vllm.Scheduler.needs | {"draft"}
    budget: int = 2048
    n: int = 4
    reserve_kv: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1 or self.n < 1:
            raise ValueError(f"budget {self.budget}, n {self.n}: give at least 1 token per step, and 1 to draft")

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget)
        chain = (self.n, 1)
        run_in_order(builder, view.running, _drafted_nodes, chain)
        admit_in_order(builder, waiting_that_fit(view, self.reserve_kv), chain)
        return builder.plan()


def _drafted_nodes(seq: SeqView) -> Sequence[int]:
    return range(len(seq.draft.parents)) if seq.draft is not None else ()
