"""vLLM today (V1): chunked prefill, running requests first, one large fixed token budget, first come first served.

For requests without SLOs, and loads below capacity; the baseline of all comparisons.

Reproduced: the step is filled with the running requests in order of start (a decode is one token, a prefill what is
left of the budget), then with waiting ones in order of the queue; Missing KV is taken from the request started last.
vLLM's limits of its queue refuse a request on arrival, here before the next step. Not reproduced: prefix caching, and
the reservation of a whole prompt's KV before its first chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rubato.core.interfaces import View, nothing_sent
from rubato.core.plan import Plan
from rubato.core.request import SATURATED
from rubato.policy_kit.batch_builder import BatchBuilder, admit_in_order, decode_first, run_in_order, waiting_that_fit
from rubato.policy_kit.stateless import Stateless

SOURCE = "vLLM V1 scheduler, defaults of its API server below 70 GiB of GPU memory (max_num_batched_tokens 2048)"


@dataclass
class Scheduler(Stateless):
    """Plans a step by vLLM's rule.

    Args:
        budget ([1, inf)): tokens of a step (vLLM's max_num_batched_tokens)
        max_num_queued_reqs ([0, inf)): requests here, running ones included, from which on new ones are refused; 0: no
            limit
        max_num_queued_tokens ([0, inf)): prompt tokens of requests without a first token, likewise
        reserve_kv (true, false): start a request only when KV for all of it is left
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 2048
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    reserve_kv: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget is {self.budget}: give at least 1 token per step")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a limit of 1 or more, or 0 for none")

    def plan(self, view: View) -> Plan:
        drop, begun = self._over_limit(view), view.prefilling
        in_order = not begun or (len(begun) == 1 and begun[0] is view.newest)  # of start: equals decodes first
        if in_order and not drop:
            builder = decode_first(view, self.budget, self.reserve_kv)
        else:
            builder = BatchBuilder(view, self.budget)
            run_in_order(builder, view.running)
            admit_in_order(builder, (s for s in waiting_that_fit(view, self.reserve_kv) if s.id not in drop))
        return builder.plan(drop=drop, repeat_steps=builder.repeat_steps())

    def _over_limit(self, view: View) -> dict[str, str]:
        """Returns new requests that arrived when the queue was full."""
        most, most_tokens = self.max_num_queued_reqs or inf, self.max_num_queued_tokens or inf
        if not view.waiting or most == most_tokens == inf:
            return {}
        drop = {}
        here, tokens = view.decodes.seqs, 0
        for seq in sorted([*view.prefilling, *view.waiting], key=lambda s: s.request.arrival):
            if (here >= most or tokens >= most_tokens) and seq.id not in view.running_ids and nothing_sent(seq):
                drop[seq.id] = SATURATED
            else:
                here += 1
                tokens += seq.request.prompt
        return drop
