"""From what a replica shows to what admission counts with: deadlines, paces, memory, and how much a batch holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf, log2

import numpy as np

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.policies.slos_serve.token_budget import Demand
from rubato.policy_kit.batch_builder import blocks_at_end, remaining_output

PROBE = 512  # tokens of prefill whose time stands for all
TIGHTER = 0.8  # of its TPOT: the pace of one behind schedule when there is no tighter tier (ours)


def prompt_stage(seq: SeqView) -> int:
    """The stage with a prompt that it is in, or that its decode-only stage goes on from: what a promise is made for."""
    at, stages = seq.stage, seq.request.stages
    while stages[at].prompt == 0:
        at -= 1
    return at


def tightest_tpot(seq: SeqView) -> float:
    """The tightest TPOT of this stage and of the decode-only stages that follow it; inf for one token alone."""
    stages = seq.request.stages
    tpot = stages[seq.stage].slo.tpot or inf
    if len(stages) == 1:
        return tpot if seq.request.sampling.max_tokens > 1 else inf
    for stage in stages[seq.stage + 1 :]:
        if stage.prompt:
            break
        tpot = min(tpot, stage.slo.tpot or inf)
    return tpot


@dataclass(frozen=True)
class DemandReader:
    """How deadlines are read, `now` being when the grid begins.

    patience: seconds after its stage's start in which a prompt without a deadline is to be done all the same. since: of
    decodes that are to have a token every TPOT, however far ahead they are, when the last came out. prefill_weight:
    what a token of prefill counts. accepts: of each the probability that a token drafted for it is right.
    """

    now: float
    block: int
    patience: float
    values: Mapping[str, float] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    prefill_weight: float = 1.0
    accepts: Callable[[SeqView], float] = lambda seq: 0.0

    def demand(self, seq: SeqView) -> Demand:
        """What it demands. Where an e2e bounds it, half of the time is for the prompt, half for a steady decode."""
        due, tpot, pending, left = seq.due, tightest_tpot(seq), seq.pending, remaining_output(seq)
        e2e = seq.request.stages[seq.stage].slo.e2e
        if e2e is not None:
            steady = 0.5 * e2e / (left + seq.output)
            tpot = min(tpot, steady)
            due = min(due, seq.request.arrival + seq.tool_seconds + e2e - (left - 1.0) * steady)
        elif due == inf and (seq.output == 0 or pending > 1):  # also one that is resumed by a prefill
            due = max(seq.stage_start + self.patience, self.now + min(tpot, self.patience))
        if pending == 1 and seq.id in self.since:
            due = min(due, self.since[seq.id] + tpot)
        value = self.values.get(seq.request.tier, 1.0) if self.values else 1.0
        tokens = 1.0 if pending == 1 else counted(pending, self.prefill_weight)
        held = blocks_at_end(seq, self.block, left)
        return Demand(seq.id, due - self.now, tokens, tpot, held, value, self.accepts(seq), 1, left)


def counted(pending: int, prefill_weight: float) -> float:
    """Pending tokens, in tokens of decodes."""
    return 1.0 + (pending - 1) * prefill_weight


def prefill_token_weight(view: View) -> float:
    """What a token of prefill costs, in tokens of the decodes that run: 1 for a roofline, much less for long contexts,
    whose KV every decode reads. In steps of √2, so that it seldom changes; any value keeps the promises."""
    decodes, model = view.decodes, view.latency
    if not decodes.seqs:
        return 1.0
    base = model.step_time(decodes)
    more = model.step_time(Shape(*(2 * part for part in decodes[:3]))) - base
    chunk = min(PROBE, view.limits.max_num_batched_tokens)
    prefill = (model.step_time(decodes.plus(chunk, 0)) - base) / chunk
    if prefill * decodes.seqs >= more:
        return 1.0
    return float(2.0 ** (0.5 * round(2.0 * log2(prefill * decodes.seqs / more))))


def catch_up(demands: list[Demand], soonest: float) -> list[Demand]:
    """Decodes that are behind, whose next token is due sooner than any batch ends, at the pace of the next tighter
    tier, with a token due as soon as can be."""
    if not any(d.due < soonest for d in demands):
        return demands
    paces = sorted({d.tpot for d in demands})

    def tighter(demand: Demand) -> Demand:
        below = [p for p in paces if p < demand.tpot]
        return demand._replace(due=0.0, tpot=below[-1] if below else TIGHTER * demand.tpot)

    return [tighter(d) if d.tokens == 1 and d.due < soonest and d.tpot < inf else d for d in demands]


def peak_kv_tokens(demands: Sequence[Demand], block: int) -> int:
    """The most KV, in tokens, that they will hold together if each has a token in every batch until it ends: that is
    just before one of them does. Less than what all hold at their ends, for these are at different times."""
    left = np.array([d.left for d in demands])
    final = np.array([d.memory for d in demands]) * block
    last = np.argsort(-left)  # the last to end first
    together = (final - left)[last].cumsum() + left[last] * np.arange(1, len(demands) + 1)
    return ceil(float(together.max(initial=0.0)))


def demand_after_current_batch(
    view: View, seqs: Sequence[SeqView], demands: Sequence[Demand], prefill_weight: float = 1.0
) -> list[Demand]:
    """What those running demand once the batch in flight has ended, where the grid begins. What each has in it is
    a guess, not read from the view.

    A decode's token due before its TPOT is over is in that batch, for no batch is longer. Beside the decodes that batch
    holds at least as much of the prompts due first as its remaining time allows, and all of a prompt due before it
    ends.
    """
    base = view.decodes
    longest = max((s.length for s in seqs), default=0)
    left = view.latency.largest_chunk(
        view.busy_until - view.now, base, longest, view.limits.max_num_batched_tokens - base.tokens
    )
    after = list(demands)
    for i in sorted(range(len(demands)), key=lambda i: demands[i].due):
        demand = demands[i]
        pending = 1 + round((demand.tokens - 1.0) / prefill_weight)
        if seqs[i].in_flight and not view.in_flight.seqs:  # shown as it will be
            continue
        chunk = min(pending, left) if pending > 1 else 0
        left -= chunk
        if demand.due < demand.tpot < inf if pending == 1 else chunk == pending or demand.due <= 0.0:
            after[i] = demand._replace(due=demand.due + demand.tpot, tokens=1)
        elif chunk:
            after[i] = demand._replace(tokens=counted(pending - chunk, prefill_weight))
    return after


def seconds_at_full_speed(view: View, seq: SeqView) -> Iterator[float]:
    """Seconds that its pending tokens take while nothing else runs, in ever more batches until that is no faster: the
    last is the least. Step times are convex, so equal batches are best; each batch adds its overhead, a chunk past a
    knee costs more a token."""
    batches, least = -(-seq.pending // view.limits.max_num_batched_tokens), inf
    while batches <= seq.pending:
        seconds = batches * view.latency.step_time(Shape().plus(seq.pending // batches, seq.cached))
        if seconds >= least:
            return
        yield seconds
        batches, least = batches + 1, seconds


class BatchCapacity:
    """How many tokens a batch of so many seconds holds, by the view's latency model.

    A roofline sees tokens only, and this is its time2bs. For a model that sees KV, contexts or sequences it is a lower
    bound of a batch with all decodes: they hold as much KV as they ever will (`peak_kv_tokens`), and what else is in
    the batch, drafted tokens too, is one chunk on top of the longest context of a prompt, or of any that may draft.
    Where not all of them fit, batches hold some in turn: their share of the KV, and the longest once more, for a batch
    is left when the next one does not fit; in one batch alone (`beside`) they are the longest. prefill_weight: what a
    token of a chunk counts. The smaller of two counts: of a batch of all decodes and a chunk, and of a chunk alone;
    step times being convex, whatever lies between fits too. steps: draft steps run at its end.
    """

    def __init__(
        self, view: View, seqs: Iterable[SeqView], demands: Sequence[Demand], margin: float, prefill_weight: float = 1.0
    ) -> None:
        limits = view.limits
        self._model = view.latency
        self._slower = 1.0 + margin
        self._prefill_weight = prefill_weight
        self._most = limits.max_num_batched_tokens
        self._decodes = min(len(demands), limits.max_num_seqs, limits.max_num_batched_tokens)
        self._kv = min(peak_kv_tokens(demands, limits.block_size), view.kv_total * limits.block_size)
        ends = sorted((d.memory * limits.block_size for d in demands), reverse=True)
        self._ends = list(accumulate(ends, initial=0))  # KV of the longest ones, by how many
        self._context = max((s.length for s in seqs if s.pending > 1), default=0)
        self._longest = max((s.length for s in seqs), default=0)
        self._known: dict[tuple[float, int], int] = {}

    def seconds(self, tokens: int, steps: int = 0) -> float:
        """That a batch of as many takes at most."""
        decodes = min(tokens, self._decodes)
        shape = self._shape(decodes, steps)
        if tokens > decodes:
            shape = shape.plus(tokens - decodes, self._above(steps))
        return self._model.step_time(shape) * self._slower

    def tokens(self, seconds: float, steps: int = 0) -> int:
        """The most tokens that end within as many seconds, whatever they are."""
        asked = (seconds, steps)
        if asked not in self._known:
            base = self._shape(self._decodes, steps)
            most = self._most - self._decodes
            if self._model.step_time(base) * self._slower <= seconds:
                together = self._decodes + self._prefill_weight * self._chunk(seconds, base, most)
            else:
                fewer = range(1, self._decodes)
                together = bisect_right(fewer, seconds, key=lambda n: self.seconds(n, steps))
            if self._prefill_weight < 1.0 and together >= 1.0:
                alone = self._chunk(seconds, Shape(spec_steps=steps), self._most)
                together = min(together, self._prefill_weight * alone)
            self._known[asked] = int(together)
        return self._known[asked]

    def beside(self, seconds: float, decodes: int, steps: int = 0) -> float:
        """As `tokens`, of a batch in which no more than so many decode; 0 where these do not fit."""
        decodes = min(decodes, self._decodes)
        base = self._shape(decodes, steps, min(self._kv, self._ends[decodes]))
        if decodes and self._model.step_time(base) * self._slower > seconds:
            return 0.0
        return decodes + self._prefill_weight * self._chunk(seconds, base, self._most - decodes)

    def _chunk(self, seconds: float, base: Shape, most: int) -> int:
        return self._model.largest_chunk(seconds / self._slower, base, self._above(base.spec_steps), most)

    def _above(self, steps: int) -> int:
        """The context of a chunk that stands for all that a batch holds beside one token of each decode."""
        return self._longest if steps else self._context

    def full(self, steps: int = 0) -> float:
        """Seconds of the largest batch the engine takes."""
        return self.seconds(self._most, steps)

    def _shape(self, decodes: int, steps: int, kv: int | None = None) -> Shape:
        if kv is None:
            share = self._kv * decodes // self._decodes if self._decodes else 0
            kv = min(self._kv, self._ends[decodes], share + self._ends[min(1, decodes)])
        return Shape(decodes, decodes, max(kv, decodes), spec_steps=steps)
