"""SmartSpec: vLLM with chains of drafted tokens, of one length for all, which follows the load.

For an engine that drafts chains, under a load that rises and falls.

Reproduced (SmartSpec, section 4): goodput, the output tokens expected of a step over the time it takes, decides how
many tokens of each request a step verifies, and how many are drafted for the next: none where none pays. What is
expected comes from the acceptance seen so far (a moving average; ours: by application), the time from the latency
model. Not reproduced: lengths that differ between requests, which the paper leaves out, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.acceptance import AcceptanceRates
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, run_in_order, waiting_that_fit
from rubato.policy_kit.draft_value import drafting, with_nodes

SOURCE = "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput (2024)"


@dataclass
class Scheduler:
    """Plans steps of `vllm`, with chains of drafted tokens of the length that pays most.

    Args:
        budget: tokens of a step (vLLM's max_num_batched_tokens)
        most: drafted tokens of a chain, at most
        reserve_kv: start a request only when KV for all of it is left
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed", "draft"})
    budget: int = 2048
    most: int = 8
    reserve_kv: bool = False
    _acceptance: AcceptanceRates = field(default_factory=AcceptanceRates, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget < 1 or self.most < 1:
            raise ValueError(f"budget {self.budget}, most {self.most}: give at least 1 token per step, and 1 to draft")

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            self._acceptance.observe(event)

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget)
        decodes = [s for s in view.running if s.pending == 1]
        self._acceptance.follow(decodes)
        length = self._choose_length(view, decodes)
        chain = (length, 1) if length else None
        run_in_order(builder, view.running, lambda seq: _first_drafted(seq, length), chain)
        admit_in_order(builder, waiting_that_fit(view, self.reserve_kv), chain)
        return builder.plan()

    def _choose_length(self, view: View, decodes: Sequence[SeqView]) -> int:
        """Returns the chain length with the most tokens per second, drafts and verification included."""
        n, kv = max(1, len(decodes)), sum([s.cached for s in decodes])
        means = [self._acceptance.mean(s.request) for s in decodes] or [self._acceptance.prior]
        best, highest, tokens = 0, 0.0, 0.0
        for length in range(self.most + 1):
            tokens += sum([mean**length for mean in means])
            drafts = drafting((length, 1) if length else None, n)
            goodput = tokens / view.latency.step_time(with_nodes(drafts, n, kv, n * length))
            if goodput > highest:
                best, highest = length, goodput
        return best


def _first_drafted(seq: SeqView, length: int) -> Sequence[int]:
    """Returns the first drafted tokens, up to the chain length."""
    return range(min(length, len(seq.draft.parents))) if seq.draft is not None else ()
