"""Sarathi-Serve: chunked prefill under a token budget, the largest that keeps the tightest TPOT; decodes first.

For requests that share one TPOT, below capacity.

Without `budget` it tunes itself: each step takes as many tokens as the latency model says finish within the tightest
TPOT of the requests here. The paper profiles one static number for the deployment; deriving it from the batch at hand
never allows less where a static one would keep the TPOT, so this baseline is the stronger of the two. With `budget` it
is PolyServe's baseline CO-Chunk, once a sweep has found the best for a load
(`rubato capacity --policy sarathi:budget=128 --policy sarathi:budget=256 ...`).

`min_prefill_chunk_tokens` is that of vLLM's pull request 54145: beside decodes, prompts that would get fewer tokens in
all wait for more to come, up to `TTFT_HOLD_STEPS` steps. There each prompt has its own count of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, decode_first
from rubato.policy_kit.stateless import Stateless

SOURCE = "Sarathi-Serve (OSDI 2024), as SLOs-Serve, AdaServe and Ascendra run it as a baseline"
TTFT_HOLD_STEPS = 8  # ours: what the pull request sets was not found


@dataclass
class Scheduler(Stateless):
    """Plans all decodes, and chunks of prompts up to the budget.

    Args:
        budget: tokens of a step; 0: as many as keep the tightest TPOT, at least `min_chunk` of them prefill
        min_chunk: tokens of prefill in such a step, at least
        min_prefill_chunk_tokens: beside decodes prefill waits while it would get fewer tokens; 0: it never waits
        reserve_kv: start a request only when KV for all of it is left (`batch_builder.waiting_that_fit`)
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 0
    min_chunk: int = 32
    min_prefill_chunk_tokens: int = 0
    reserve_kv: bool = False
    _held_steps: int = field(default=0, init=False)  # in a row, in which prefill waited

    def __post_init__(self) -> None:
        if self.budget < 0 or self.min_chunk < 1 or self.min_prefill_chunk_tokens < 0:
            raise ValueError(
                f"budget {self.budget}, min_chunk {self.min_chunk}, min_prefill_chunk_tokens "
                f"{self.min_prefill_chunk_tokens}: give >= 0 (0 = tuned), >= 1 and >= 0 tokens"
            )

    def plan(self, view: View) -> Plan:
        builder = decode_first(view, self.budget or self._tune_budget(view), self.reserve_kv)
        prefill = sum([work.tokens for work in builder.work.values()])
        if builder.decode and 0 < prefill < self.min_prefill_chunk_tokens and self._held_steps < TTFT_HOLD_STEPS:
            self._held_steps += 1
            builder = BatchBuilder(view)
            builder.decode_all()
            return builder.plan()
        self._held_steps = 0
        is_fixed = self.budget > 0 or not (view.waiting or view.prefilling)  # a tuned one changes with each token of KV
        return builder.plan(repeat_steps=builder.repeat_steps() if is_fixed else 0)

    def _tune_budget(self, view: View) -> int:
        here = [*view.running, *view.waiting]
        tpots = [t for s in here if (t := s.slo.tpot) is not None]
        if not tpots:
            return view.limits.max_num_batched_tokens
        decodes = view.decodes
        first = next((s for s in here if s.pending > 1), None)
        cached = first.cached if first else 0
        chunk = view.latency.largest_chunk(min(tpots), decodes, cached, view.limits.max_num_batched_tokens)
        return decodes.tokens + max(self.min_chunk, chunk)
