"""Derives each request's demand for admission from the view: deadline, pace and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policy_kit.batch_builder import blocks_at_end, remaining_output
from rubato.policy_kit.kv_forecast import PeakKV
from rubato.policy_kit.paces import Window, tightest_tpot

PROBE_TOKENS = 512  # marginal prefill time is measured on these
CATCH_UP_TPOT_SHARE = 0.8  # of its TPOT: the pace of one behind schedule when there is no tighter tier (ours)
PATIENCE_S = 4.0  # seconds that a prompt without a TTFT, or best effort, may wait before it is planned (ours)


class Demand(NamedTuple):
    """What one request demands: `tokens` by `due`, and from then on an entry of `verified` tokens every `tpot` seconds.

    Tokens count as a decode's, drafted or not: a prefill's last one counts as 1, each other as what it costs beside
    decodes (`prefill_token_weight`).

    Args:
        id: of the request
        due: seconds from where the grid begins
        tokens: due by then, in tokens of a decode
        tpot: seconds from one entry to the next; inf: no decode has to keep a pace
        memory: KV blocks at its end
        value: what attaining its SLO is worth
        accepts: probability that a token drafted for it is right
        verified: tokens verified in an entry
        output_left: output tokens to come
    """

    id: str
    due: float
    tokens: float
    tpot: float
    memory: int = 0
    value: float = 1.0
    accepts: float = 0.0
    verified: int = 1
    output_left: float = 0.0


def rows(demands: Sequence[Demand], in_order_given: bool = False) -> NDArray[np.float64]:
    """Returns rows (due, tokens, tpot, verified, memory, value) of demands with a deadline, sorted by deadline unless
    `in_order_given`; computed once for many grids."""
    each = [(d.due, d.tokens, d.tpot, d.verified, d.memory, d.value) for d in demands if d.due < inf]
    if not in_order_given:
        each.sort()
    flat = np.fromiter(chain.from_iterable(each), np.float64, 6 * len(each))  # `array` of rows takes twice as long
    return flat.reshape(len(each), 6)


def prompt_stage(seq: SeqView) -> int:
    """Returns the request's last stage that began with a prompt: admission is per such stage."""
    at, stages = seq.stage, seq.request.stages
    while stages[at].prompt == 0:
        at -= 1
    return at


@dataclass(frozen=True)
class DemandReader:
    """Reads what requests demand.

    Args:
        now: time at which the grid begins
        block: tokens of a KV block
        values: what a tier's requests are worth; 1 for a tier not named
        windows: of decodes that have to keep their pace in each window, however far ahead of their deadlines they are
        weight: what a token of prefill counts
        accepts: gives the probability that a token drafted for a request is right
    """

    now: float
    block: int
    values: Mapping[str, float] = field(default_factory=dict)
    windows: Mapping[str, Window] = field(default_factory=dict)
    weight: float = 1.0
    accepts: Callable[[SeqView], float] = lambda seq: 0.0

    def demand(self, seq: SeqView) -> Demand:
        """Returns what a request demands. Of an e2e, half is for the prompt and half for a steady decode."""
        due, tpot, pending, to_come = seq.due, tightest_tpot(seq), seq.pending, remaining_output(seq)
        e2e = seq.slo.e2e
        if e2e is not None:
            steady = 0.5 * e2e / (to_come + seq.output)
            tpot = min(tpot, steady)
            due = min(due, seq.request.arrival + seq.tool_seconds + e2e - (to_come - 1.0) * steady)
        elif due == inf and (seq.output == 0 or pending > 1):  # also one that is resumed by a prefill
            due = max(seq.stage_start + PATIENCE_S, self.now + min(tpot, PATIENCE_S))
        if pending == 1 and e2e is None and seq.id in self.windows:
            _, before, began = self.windows[seq.id]
            due = min(due, began + (seq.output + 1 - before) * tpot)
        value = self.values.get(seq.request.tier, 1.0) if self.values else 1.0
        tokens, memory = 1.0 + (pending - 1) * self.weight, blocks_at_end(seq, self.block, to_come)
        return Demand(seq.id, due - self.now, tokens, tpot, memory, value, self.accepts(seq), 1, to_come)

    def demands(self, seqs: Iterable[SeqView], soonest: float, paced: bool = True) -> list[Demand]:
        """Returns what each request demands. A decode that is behind counts as of the next tighter tier.

        Args:
            seqs: the requests
            soonest: seconds of a batch of one decode alone; a decode due before that is behind
            paced: whether decodes keep the pace of their windows, too
        """
        reader = self if paced else replace(self, windows={})
        demands = [reader.demand(seq) for seq in seqs]
        if not any(d.due < soonest for d in demands):
            return demands
        paces = sorted({d.tpot for d in demands})

        def tighter(demand: Demand) -> Demand:
            below = [p for p in paces if p < demand.tpot]
            return demand._replace(due=0.0, tpot=below[-1] if below else CATCH_UP_TPOT_SHARE * demand.tpot)

        return [tighter(d) if d.tokens == 1 and d.due < soonest and d.tpot < inf else d for d in demands]


def prefill_token_weight(view: View, before: float = 1.0) -> float:
    """Returns what a token of prefill costs, in tokens of the decodes that run: 1 for a roofline, much less for long
    contexts, whose KV every decode reads.

    As a grid counts tokens by it, it changes rarely: in steps of √2, and only when it is a step or more off `before`.
    Any value keeps the promises.
    """
    decodes, model = view.decodes, view.latency
    if not decodes.seqs:
        return 1.0
    base = model.step_time(decodes)
    more = model.step_time(Shape(*(2 * part for part in decodes[:3]))) - base
    chunk = min(PROBE_TOKENS, view.limits.max_num_batched_tokens)
    prefill = (model.step_time(decodes.plus(chunk, 0)) - base) / chunk
    if prefill * decodes.seqs >= more:
        return 1.0
    steps = 2.0 * log2(prefill * decodes.seqs / more)
    return before if abs(steps - 2.0 * log2(before)) < 1.0 else float(2.0 ** (0.5 * round(steps)))


def peak_kv(demands: Sequence[Demand], block: int) -> PeakKV:
    """Returns the forecast of the KV that these will hold together."""
    return PeakKV([d.memory for d in demands], [d.output_left for d in demands], block)
