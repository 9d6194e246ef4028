"""SCORPIO: prompts by deadline, late ones refused; admission by virtual batch size, loose decodes skip steps by credit.

For tiers whose TPOTs differ by far, where decodes dominate and requests may be refused: a baseline.
docs/policies/scorpio.md has the rest.

The rules are those of the paper's TTFT Guard and TPOT Guard, their details and the defaults those of the authors'
scheduler (MisterBrookT/Scorpio, `vllm/core/scheduler.py`, with `ldf_rej_gate1.3_credit` and 1,024 tokens a batch).

TTFT Guard: those that wait stand by deadline, the least first, and one is refused whose deadline comes before the
prefill of all that stand before it and its own is done, by `ttft_reserve`. TPOT Guard, admission: the virtual batch
size (VBS) is the sum over requests of (tightest TPOT / own TPOT); the first that waits starts only if a decode step of
that size, it included, times `inefficiency`, is shorter than the tightest TPOT; else none behind it starts either.
TPOT Guard, credits: in each decode step a request earns (tightest TPOT / own TPOT), and it runs when it has one, and
pays that. Prefill goes before decode, by whole prompts, as in the vLLM that the authors changed.

Ours: step times are those of the replica's latency model, and lengths its predictor's (without one `max_tokens`),
where the paper trains both (Predictor). Prefill in progress stands before all that wait. Who did not ask to be refused
becomes best effort and starts after all others. One without a TPOT counts as the loosest here, and the first starts
whatever is predicted where nothing runs. `mixed`, prompts beside decodes in chunks (which the authors' code can too),
`reserve_kv`, and turns for best effort (`policy_kit.turns`). Not here: swapping KV to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import ClassVar

from rubato.core.events import Event, Finished, HandedOff
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import NO_BATCH, Plan, Shape
from rubato.policy_kit.batch_builder import (
    BatchBuilder,
    blocks_at_end,
    remaining_output,
    run_in_order,
    unreserved_blocks,
)
from rubato.policy_kit.prefill_jobs import tpot_of
from rubato.policy_kit.refusals import refusals, wants_refusal
from rubato.policy_kit.turns import Turns, add_decodes

SOURCE = (
    "SCORPIO: Serving the Right Requests at the Right Time for Heterogeneous SLOs in LLM Inference (arXiv 2505.23022)"
)
CREDIT_ROUNDING = 1e-9  # of a credit: ten times a tenth is one


@dataclass
class Scheduler:
    """Plans steps under a guard of TTFTs and one of TPOTs.

    Args:
        budget ([1, inf)): tokens of a batch with prompts
        inefficiency ((0, inf)): a predicted decode step counts so many times as long in admission, for what prompts
            take
        ttft_reserve ([0, inf)): seconds by which a predicted first token must be before its deadline
        mixed (true, false): prompts in chunks beside decodes, in place of whole prompts before them
        reserve_kv (true, false): start a request only when KV for all of it, to its end, is left
    """

    needs: ClassVar[frozenset[str]] = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 1024
    inefficiency: float = 1.3
    ttft_reserve: float = 0.05
    mixed: bool = False
    reserve_kv: bool = False
    _credit: dict[str, float] = field(default_factory=dict, init=False)  # by id
    _turns: Turns = field(default_factory=Turns, init=False)

    def __post_init__(self) -> None:
        if self.budget < 1 or self.inefficiency <= 0.0 or self.ttft_reserve < 0.0:
            raise ValueError(
                f"budget {self.budget}, inefficiency {self.inefficiency}, ttft_reserve {self.ttft_reserve}: give at "
                "least 1 token, a factor above 0, and 0 seconds or more"
            )

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished | HandedOff):
                self._credit.pop(event.id, None)

    def plan(self, view: View) -> Plan:
        queue, late = self._guard_ttft(view)
        drop = refusals(late, view)
        queue += sorted([s for s in view.waiting if s.best_effort], key=_arrival)
        queue += [s for s in late if s.id not in drop]
        builder = BatchBuilder(view, self.budget)
        self._turns.give(builder)
        if self.mixed:
            self._add_decodes(builder)
        self._add_prefills(builder, queue)
        if not builder.work:
            builder = BatchBuilder(view)
            self._add_decodes(builder)
        if not builder.work:
            run_in_order(builder, view.running)
        builder.fold_decodes()
        tpots_ahead = (stage.slo.tpot or inf for s in view.running for stage in s.request.stages[s.stage :])
        is_steady = not view.waiting and len(set(tpots_ahead)) < 2  # else credits, admission or a later stage change it
        return builder.plan(
            demote=[s.id for s in late if s.id not in drop], drop=drop,
            repeat_steps=builder.repeat_steps() if is_steady else 0,
        )  # fmt: skip

    def _guard_ttft(self, view: View) -> tuple[list[SeqView], list[SeqView]]:
        """Divides waiting requests with SLOs into those that can be in time, by deadline, and the others. A request
        that prefers a refusal is among the others, too, if it could not meet its SLO even alone."""
        in_time: list[SeqView] = []
        late: list[SeqView] = []
        before = NO_BATCH.with_entries([(s.pending, s.cached) for s in view.prefilling])
        for seq in sorted([s for s in view.waiting if not s.best_effort], key=_deadline):
            together = before.plus(seq.pending, seq.cached)
            first = view.now + view.latency.step_time(together) + self.ttft_reserve
            has_output = seq.first_token_at is not None
            if not has_output and (seq.due < first or wants_refusal(seq, view)):
                late.append(seq)
            else:
                in_time.append(seq)
                before = together
        return in_time, late

    def _add_decodes(self, builder: BatchBuilder) -> None:
        """Adds the decodes with the tightest TPOT, and others that have a credit."""
        decodes = [s for s in builder.view.running if s.pending == 1]
        tpots = _bounded([*map(tpot_of, decodes)])
        tightest = min(tpots, default=inf)
        chosen = []
        for seq, tpot in zip(decodes, tpots, strict=True):
            if tpot > tightest:
                credit = self._credit.get(seq.id, 0.0) + tightest / tpot
                has_credit = credit >= 1.0 - CREDIT_ROUNDING
                self._credit[seq.id] = credit - has_credit
                if not has_credit:
                    continue
            chosen.append(seq)
        add_decodes(builder, chosen)

    def _add_prefills(self, builder: BatchBuilder, queue: Sequence[SeqView]) -> None:
        view, block = builder.view, builder.view.limits.block_size
        for seq in view.prefilling:
            if seq.id not in builder.work and seq not in builder.preempted and (most := builder.tokens_that_fit(seq)):
                builder.add(seq, most)
        if builder.preempted:  # what waits would take the KV just freed
            return
        here = [*view.running]
        unreserved = unreserved_blocks(view) if self.reserve_kv and queue else 0
        for seq in queue:
            if seq.id in builder.work:
                continue
            tokens = seq.pending
            if self.mixed or (tokens > builder.tokens_left and not builder.work):  # longer than a batch: alone
                tokens = min(tokens, builder.tokens_left)
            unreserved -= blocks_at_end(seq, block) if self.reserve_kv else 0
            if here or view.moving:  # else it starts whatever is predicted
                to_grow = seq.pending + block * (len(here) + 1)
                if unreserved < 0 or builder.missing_blocks(seq, to_grow) > 0 or not self._can_admit(view, here, seq):
                    return
            if tokens == 0 or builder.tokens_that_fit(seq) < tokens:
                return
            builder.add(seq, tokens)
            here.append(seq)

    def _can_admit(self, view: View, here: Sequence[SeqView], seq: SeqView) -> bool:
        """Returns whether decodes of these requests and one more are predicted to keep the tightest TPOT."""
        together = [*here, seq]
        counts = Counter(_bounded([*map(tpot_of, together)]))
        tightest = min(counts)
        if tightest == inf:
            return True
        size = ceil(sum(count * tightest / tpot for tpot, count in counts.items()) - CREDIT_ROUNDING)
        length = sum(s.length for s in together) / len(together) + remaining_output(seq) / 2.0
        step = view.latency.step_time(Shape.decodes(size, ceil(size * length)))
        return step * self.inefficiency < tightest


def _bounded(tpots: Sequence[float]) -> list[float]:
    """Replaces missing TPOTs (inf) by the loosest one, if there is any."""
    loosest = max([t for t in tpots if t < inf], default=inf)
    return [min(t, loosest) for t in tpots]


def _arrival(seq: SeqView) -> tuple[float, str]:
    return seq.request.arrival, seq.id


def _deadline(seq: SeqView) -> tuple[float, float, str]:
    return seq.due, seq.request.arrival, seq.id
