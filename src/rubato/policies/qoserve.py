"""QoServe (Niyama): chunks as long as the slack of the tightest decode, prompts by deadline and length, relegation.

For tiers that differ by their TTFT, judged token by token: a baseline. docs/policies/qoserve.md has the rest.

The rules are those of the paper, their details and the defaults those of the authors' scheduler
(microsoft/sarathi-serve, branch `niyama_asplos2026`, `sarathi/core/scheduler/deadline_scheduler.py`).

Dynamic chunking: each step takes every decode, and as many tokens of prompts as are predicted, times `margin`, to end
before the first decode is due; `min_budget` tokens in all where that has no time left. A request that is ahead of its
deadlines lends what it has gained; one whose first token was late is due by its TPOT from that token on. Hybrid
prioritisation: prompts stand by deadline + `alpha` × tokens left to prefill, between earliest deadline first (0) and
shortest remaining prompt first. An e2e without a TTFT (the paper's TTLT, of non-interactive classes) has its deadline
where decoding has to begin. Eager relegation: one that comes to its turn, has not begun, and whose own prefill would
end after its deadline at the throughput of prefill of late, stands behind all others from then on.

Ours: step times are those of the replica's latency model, chunks any number of tokens (theirs of a list of sizes), and
lengths the predictor's (without one `max_tokens`; theirs: a constant). Relegated is best effort, and refused where the
client asked for that. The authors preempt none; here a decode that lacks KV takes it from those started after it.
`reserve_kv`, and turns for best effort (`policy_kit.turns`). Not here: relegating requests with a hint of low priority
first, which the paper describes and requests do not have; a pace for decodes without a TPOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import NO_BATCH, Plan
from rubato.policy_kit.batch_builder import (
    BatchBuilder,
    blocks_at_end,
    remaining_output,
    run_in_order,
    unreserved_blocks,
)
from rubato.policy_kit.prefill_jobs import tpot_of
from rubato.policy_kit.refusals import refusable, refusals, wants_refusal
from rubato.policy_kit.stateless import Stateless
from rubato.policy_kit.turns import Turns, add_decodes

SOURCE = "QoServe (ASPLOS 2026), before Niyama: Breaking the Silos of LLM Inference Serving (arXiv 2503.22562)"
THROUGHPUT_MEMORY = 0.995  # weight of the old prefill throughput at each step that prefills


@dataclass
class Scheduler(Stateless):
    """Plans chunks as long as the tightest decode's slack.

    Args:
        alpha ([0, inf)): seconds that a token left to prefill counts on top of the deadline
        margin ((0, inf)): a predicted step counts so many times as long
        min_budget ([1, 2552]): tokens of a batch, decodes included, where decodes have no time to spare
        max_budget ([128, inf)): tokens of a batch, decodes included, where they have
        reserve_kv (true, false): start a request only when KV for all of it, to its end, is left
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    alpha: float = 0.008
    margin: float = 1.2
    min_budget: int = 128
    max_budget: int = 2552
    reserve_kv: bool = False
    _throughput: float = field(default=0.0, init=False)  # tokens of prefill a second, of late
    _last_step: tuple[float, int] = field(default=(0.0, 0), init=False)  # when it began, and its tokens of prefill
    _turns: Turns = field(default_factory=Turns, init=False)

    def __post_init__(self) -> None:
        if self.alpha < 0.0 or self.margin <= 0.0:
            raise ValueError(f"alpha {self.alpha}, margin {self.margin}: give 0 or more, and a factor above 0")
        if not 1 <= self.min_budget <= self.max_budget:
            raise ValueError(
                f"min_budget {self.min_budget}, max_budget {self.max_budget}: give at least 1 token, and no less"
            )

    def plan(self, view: View) -> Plan:
        self._measure(view)
        decodes = [s for s in view.running if s.pending == 1]
        queue = self._by_priority(view)
        builder = BatchBuilder(view)
        self._turns.give(builder)
        chunk = self._size_chunk(view, decodes, queue) - sum(w.tokens for w in builder.work.values())
        builder.tokens_left = min(builder.tokens_left, len(decodes) + max(0, chunk))
        add_decodes(builder, sorted(decodes, key=lambda s: (s.best_effort, s.due)))
        late = self._add_prefills(builder, queue)
        drop = refusals(late, view)
        if not builder.work:
            run_in_order(builder, view.running)
        prefill = sum(w.tokens for w in builder.work.values() if w.tokens > 1)
        self._last_step = (view.now, prefill)
        builder.fold_decodes()
        has_only_decodes = not (view.waiting or view.prefilling)
        return builder.plan(
            demote=[s.id for s in late if s.id not in drop],
            drop=drop,
            repeat_steps=builder.repeat_steps() if has_only_decodes else 0,
        )

    def _measure(self, view: View) -> None:
        """Updates the throughput of prefill from the step that ended; the first value is that of the largest batch
        alone."""
        if not self._throughput:
            most = min(self.max_budget, view.limits.max_num_batched_tokens)
            self._throughput = most / view.latency.step_time(NO_BATCH.plus(most, 0))
        began, tokens = self._last_step
        if tokens and view.now > began:
            self._throughput = THROUGHPUT_MEMORY * self._throughput + (1.0 - THROUGHPUT_MEMORY) * tokens / (
                view.now - began
            )

    def _by_priority(self, view: View) -> list[SeqView]:
        """Sorts requests that prefill or wait, best effort last."""

        def key(seq: SeqView) -> tuple[bool, float, float, str]:
            place = _prefill_due(view, seq) + self.alpha * seq.pending
            return seq.best_effort, place, seq.request.arrival, seq.id

        return sorted([*view.prefilling, *view.waiting], key=key)

    def _size_chunk(self, view: View, decodes: Sequence[SeqView], queue: Sequence[SeqView]) -> int:
        """Returns the tokens of prefill that end before the first decode is due."""
        least = max(0, self.min_budget - len(decodes))
        most = max(least, self.max_budget - len(decodes))
        slack = min([_decode_due(s) for s in decodes], default=inf) - view.now
        if slack == inf or not queue:
            return most
        if slack <= 0.0:
            return least
        return max(least, view.latency.largest_chunk(slack / self.margin, view.decodes, queue[0].cached, most))

    def _add_prefills(self, builder: BatchBuilder, queue: list[SeqView]) -> list[SeqView]:
        """Fills the batch in this order. Returns the requests relegated now, which go to the end of the queue."""
        view, running, block = builder.view, builder.running, builder.view.limits.block_size
        relegated: dict[str, SeqView] = {}
        count, can_admit = len(running), not builder.preempted  # what waits would take the KV just freed
        unreserved = unreserved_blocks(view) if self.reserve_kv and can_admit else 0
        for seq in queue:  # which grows
            if not (builder.tokens_left and builder.seqs_left):
                break
            if seq.id in builder.work or seq in builder.preempted:
                continue
            if seq.id not in running:
                if seq.id not in relegated and self._is_late(view, seq):
                    relegated[seq.id] = seq
                    queue += [] if refusable(seq) else [seq]
                    continue
                unreserved -= blocks_at_end(seq, block) if self.reserve_kv else 0
                lacks_kv = builder.missing_blocks(seq, seq.pending + block * (count + 1)) > 0 or unreserved < 0
                if not can_admit or (lacks_kv and (count or view.moving)):  # alone, it starts whatever is predicted
                    can_admit = False
                    continue
                count += 1
            if tokens := builder.tokens_that_fit(seq):
                builder.add(seq, tokens)
        return [*relegated.values()]

    def _is_late(self, view: View, seq: SeqView) -> bool:
        """Returns whether its first token would be late if it were prefilled now; or, if it prefers a refusal, whether
        it could not meet its SLO even alone."""
        if seq.best_effort or seq.first_token_at is not None:
            return False
        if view.now + seq.pending / self._throughput > _prefill_due(view, seq):
            return True
        return wants_refusal(seq, view)


def _prefill_due(view: View, seq: SeqView) -> float:
    """Returns when its prefill must be done: for its next token, or, with only an e2e, for all output to follow."""
    slo = seq.slo
    if slo.e2e is None or slo.ttft is not None or seq.due == inf:
        return seq.due
    return seq.due - remaining_output(seq) * view.latency.step_time(view.decodes.plus(1, seq.length))


def _decode_due(seq: SeqView) -> float:
    """Returns when its next token is due, counted from its first token if that was late; inf without a TPOT."""
    tpot, first = tpot_of(seq), seq.first_token_at
    if tpot == inf:
        return inf
    bounded = seq.slo.max_pause is not None and not seq.missed
    return seq.due if first is None or bounded else max(seq.due, first + seq.output * tpot)
