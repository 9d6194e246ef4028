"""vLLM today (V1): chunked prefill, running requests first, one large fixed token budget, first come first served.

For requests without SLOs, and loads below capacity; the baseline of all comparisons.

Reproduced: the step is filled with the running requests in order of start (a decode is one token, a prefill what is
left of the budget), then with waiting ones in order of the queue; Missing KV is taken from the request started last.
Not reproduced: prefix caching, and the reservation of a whole prompt's KV before its first chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, decode_first, run_in_order, waiting_that_fit

SOURCE = "vLLM V1 scheduler, defaults of its API server below 70 GiB of GPU memory (max_num_batched_tokens 2048)"


@dataclass
class Scheduler:
    """budget: max_num_batched_tokens. reserve_kv: start a request only when KV for all of it is left
    (`batch_builder.waiting_that_fit`)."""

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 2048
    reserve_kv: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget is {self.budget}: give at least 1 token per step")

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def plan(self, view: View) -> Plan:
        begun = view.prefilling
        if not begun or (len(begun) == 1 and begun[0] is view.newest):  # order of start equals decodes first
            builder = decode_first(view, self.budget, self.reserve_kv)
        else:
            builder = BatchBuilder(view, self.budget)
            run_in_order(builder, view.running)
            admit_in_order(builder, waiting_that_fit(view, self.reserve_kv))
        return builder.plan(repeat_steps=builder.repeat_steps())
