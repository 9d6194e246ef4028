"""vLLM v0: whole prefills before any decode, first come first served; decodes stall meanwhile.

For comparison with vLLM as it was.

A prompt longer than the engine's batch is run alone, in chunks as long as a batch (v0 refused such limits at start).
"""

from __future__ import annotations

from dataclasses import dataclass

from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, decodes_or_prefills, resume_prefills, waiting_that_fit
from rubato.policy_kit.stateless import Stateless

SOURCE = "vLLM before V1, default scheduler; SLOs-Serve's and Ascendra's baseline"


@dataclass
class Scheduler(Stateless):
    """Plans whole prefills before any decode.

    Args:
        budget: tokens of a prefill batch (vLLM's max_num_batched_tokens)
        watermark: share of KV kept free when admitting
        reserve_kv: start a request only when KV for all of it is left (`batch_builder.waiting_that_fit`)
    """

    needs = frozenset({"preempt"})
    budget: int = 2048
    watermark: float = 0.01
    reserve_kv: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1 or not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"budget {self.budget}, watermark {self.watermark}: give >= 1 token and a share in [0, 1)")

    def plan(self, view: View) -> Plan:
        prefills = BatchBuilder(view, self.budget)
        self._prefill(prefills, view)
        if prefills.work:
            return prefills.plan()
        decodes = decodes_or_prefills(view)
        return decodes.plan(repeat_steps=decodes.repeat_steps())

    def _prefill(self, builder: BatchBuilder, view: View) -> None:
        resumed = resume_prefills(builder)  # a prompt longer than a batch
        reserve = 0 if not view.running else int(self.watermark * view.kv_total)
        for seq in waiting_that_fit(view, self.reserve_kv):
            is_longer_than_batch = seq.pending > builder.tokens_left and not builder.work
            tokens = builder.tokens_left if is_longer_than_batch else seq.pending
            if resumed or tokens == 0 or builder.tokens_that_fit(seq) < tokens:
                return
            builder.add(seq, tokens)
            if builder.kv_left < reserve:
                builder.remove(seq)
                return
