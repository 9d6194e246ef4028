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
    """What one request demands: `tokens` by `due` (seconds from where the grid begins), from then on an entry of
    `verified` every `tpot` seconds (inf: none), and `memory` KV blocks at its end. value: of attaining it. accepts:
    probability that a token drafted for it is right. left: tokens of output to come. Tokens count as a decode's,
    drafted or not: a prefill's last counts as one, the others as what they cost beside it (`prefill_token_weight`)."""

    id: str
    due: float
    tokens: float
    tpot: float
    memory: int = 0
    value: float = 1.0
    accepts: float = 0.0
    verified: int = 1
    left: float = 0.0


def rows(demands: Sequence[Demand], in_order_given: bool = False) -> NDArray[np.float64]:
    """Returns rows (due, tokens, tpot, verified, memory, value) of demands with a deadline, sorted by deadline unless
    `in_order_given`; computed once for many grids."""
    each = [(d.due, d.tokens, d.tpot, d.verified, d.memory, d.value) for d in demands if d.due < inf]
    if not in_order_given:
        each.sort()
    flat = np.fromiter(chain.from_iterable(each), np.float64, 6 * len(each))  # `array` of rows takes twice as long
    return flat.reshape(len(each), 6)


def prompt_stage(seq: SeqView) -> int:
    """Returns the stage with a prompt that it is in, or that its decode-only stage continues: admission is per such
    stage."""
    at, stages = seq.stage, seq.request.stages
    while stages[at].prompt == 0:
        at -= 1
    return at


@dataclass(frozen=True)
class DemandReader:
    """How deadlines are read, `now` being when the grid begins.

    windows: of decodes that are to keep their pace in each window, however far ahead of their deadlines they are.
    weight: what a token of prefill counts. accepts: of each the probability that a token drafted for it is right.
    """

    now: float
    block: int
    values: Mapping[str, float] = field(default_factory=dict)
    windows: Mapping[str, Window] = field(default_factory=dict)
    weight: float = 1.0
    accepts: Callable[[SeqView], float] = lambda seq: 0.0

    def demand(self, seq: SeqView) -> Demand:
        """What it demands. Where an e2e bounds it, half of the time is for the prompt, half for a steady decode."""
        due, tpot, pending, left = seq.due, tightest_tpot(seq), seq.pending, remaining_output(seq)
        e2e = seq.slo.e2e
        if e2e is not None:
            steady = 0.5 * e2e / (left + seq.output)
            tpot = min(tpot, steady)
            due = min(due, seq.request.arrival + seq.tool_seconds + e2e - (left - 1.0) * steady)
        elif due == inf and (seq.output == 0 or pending > 1):  # also one that is resumed by a prefill
            due = max(seq.stage_start + PATIENCE_S, self.now + min(tpot, PATIENCE_S))
        if pending == 1 and e2e is None and seq.id in self.windows:
            _, before, began = self.windows[seq.id]
            due = min(due, began + (seq.output + 1 - before) * tpot)
        value = self.values.get(seq.request.tier, 1.0) if self.values else 1.0
        tokens, held = 1.0 + (pending - 1) * self.weight, blocks_at_end(seq, self.block, left)
        return Demand(seq.id, due - self.now, tokens, tpot, held, value, self.accepts(seq), 1, left)

    def demands(self, seqs: Iterable[SeqView], soonest: float, paced: bool = True) -> list[Demand]:
        """Of each. One that is behind, whose next token is due before a batch of it alone would end, in `soonest`
        seconds, counts as of the next tighter tier. paced: by windows, too."""
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
    """What a token of prefill costs, in tokens of the decodes that run: 1 for a roofline, much less for long contexts,
    whose KV every decode reads. In steps of √2, and what it was before while that is less than a step off, as a grid
    counts tokens by it; any value keeps the promises."""
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
    """The KV that these will hold together."""
    return PeakKV([d.memory for d in demands], [d.left for d in demands], block)
