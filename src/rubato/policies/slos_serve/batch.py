"""Fills the next batch: its length, admitted requests by deadline, and best effort in the remaining time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Work
from rubato.core.request import NOTHING
from rubato.core.slo import WINDOW_TOKENS
from rubato.policies.slos_serve.admission import Grid
from rubato.policies.slos_serve.batch_capacity import BatchCapacity
from rubato.policies.slos_serve.demand import Demand
from rubato.policies.slos_serve.speculation import SpeculationState, expected
from rubato.policy_kit.batch_builder import BatchBuilder, blocks_at_end, make_room

DRAFT_FREELY_BELOW_KV_SHARE = 0.5  # share of memory: while less is promised, decodes need not hurry


@dataclass
class BatchOrder:
    """The admitted in order of deadline, and what all of them can spare of the batch's tokens: that is for decodes left
    out of the last batches, and drafts beyond those planned.

    seqs: the admitted, and `demands` what they demand, one each. weight: what a token of prefill counts. entries: the
    demands, with what is verified in each entry. skipped: ids of decodes that wait, the longest wait first.
    """

    view: View
    grid: Grid
    seqs: Sequence[SeqView]
    demands: Sequence[Demand]
    drafts: SpeculationState
    margin: float
    weight: float
    skipped: Collection[str] = ()
    raw: dict[str, Demand] = field(init=False)  # the demands
    entries: dict[str, Demand] = field(init=False)
    order: list[SeqView] = field(init=False)
    _tokens_to_spare: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.raw = {d.id: d for d in self.demands}
        self.entries = {d.id: d for d in self.drafts.in_force.entries(self.demands, self.drafts.draft_tokens)}
        self.order = sorted(self.seqs, key=lambda s: (self.entries[s.id].due, s.request.arrival))

    def spend(self, tokens: float) -> bool:
        """Takes `tokens` of the batch if they can be spared; returns whether they can."""
        if self._tokens_to_spare is None:
            self._tokens_to_spare = self.grid.room([self.entries[s.id] for s in self.order])
        if tokens > self._tokens_to_spare:
            return False
        self._tokens_to_spare -= max(0.0, tokens)
        return True

    def bounds(self) -> tuple[float, int]:
        """Seconds of the batch, and how many tokens to draft for each: as planned; or, once memory fills, as makes
        decodes end soonest, as far as all others can spare what that takes, which admits others. In a short batch for a
        prompt, for which those ahead wait, no more than planned."""
        first, planned = self.grid[0], self.drafts.in_force.steps
        if not self.drafts.able or self.grid.leads:
            return first.seconds, planned
        decodes = [s for s in self.seqs if s.pending == 1]
        roomy = sum(d.memory for d in self.demands) < DRAFT_FREELY_BELOW_KV_SHARE * self.view.kv_total
        fastest = 0 if roomy else self.drafts.fastest(self.view, decodes)
        if fastest <= planned:
            return first.seconds, planned
        capacity = BatchCapacity(self.view, self.seqs, self.demands, self.margin, self.weight)
        need = sum(self.entries[s.id].tokens for s in decodes)
        for depth in range(fastest, planned, -1):
            tokens = capacity.tokens(first.seconds, depth)
            if tokens >= need and self.spend(first.tokens - tokens):
                return first.seconds, depth
        return first.seconds, planned

    def early(self, work: Mapping[str, Work]) -> dict[str, float]:
        """What would begin a pace before its time in a batch of such work, in order of deadline, and how many of its
        tokens would be due so much sooner: a prompt that ends before its deadline, from which admission counts its
        decode, and a decode at the end of a window, with which its lead is gone."""
        by_id, seconds = {}, self.grid[0].seconds
        soon = seconds + self.grid.step()[0].seconds
        for seq in self.order:
            own, demand = work.get(seq.id), self.raw[seq.id]
            if own is None or demand.due < soon or demand.tpot == inf:
                continue
            if own.tokens == seq.pending if seq.first_token_at is None or seq.pending > 1 else _ends_window(seq, own):
                by_id[seq.id] = 1.0 + (demand.due - seconds) / demand.tpot
        return by_id

    def after(self, work: Mapping[str, Work], early: Collection[str]) -> list[Demand]:
        """Returns all demands after a batch of this work, in seconds from its end."""
        by_id, seconds = [], self.grid[0].seconds
        for seq, demand in zip(self.seqs, self.demands, strict=True):
            own, due, tokens = work.get(seq.id), demand.due, demand.tokens
            if seq.id in early or (own is not None and own.tokens == seq.pending > 1):
                due, tokens = min(due, seconds) + demand.tpot, 1.0
            elif own is not None and seq.pending > 1:
                tokens -= own.tokens * self.weight
            elif own is not None:
                due += demand.tpot * expected(demand.accepts, 1 + len(own.verify))
            by_id.append(demand._replace(due=max(0.0, due - seconds), tokens=tokens))
        return by_id

    def in_order(self) -> tuple[list[SeqView], dict[str, int]]:
        """In order of deadline, but decodes that are ahead come before prompts due sooner, as far as their tokens can
        be spared, first those left out before: where a batch does not hold all ahead they take turns. But all come
        after those that cannot wait for the next batch: where kernels make a prompt's first tokens cost more than the
        others, fewer fit than were counted. And how many drafted tokens to verify for each: what was planned on, or all
        there are where they can be spared, counted as those of a prompt: they share the context that is read."""
        entries, order, grid, draft_tokens = self.entries, self.order, self.grid, self.drafts.draft_tokens
        if not grid.leads and (self.skipped or not draft_tokens):
            soon = grid[0].seconds + grid.step()[0].seconds
            urgent = bisect_left(order, soon, key=lambda s: entries[s.id].due)
            able = {s.id: s for s in order[urgent:] if s.pending == 1}
            first = [*(id for id in self.skipped if id in able), *(() if draft_tokens else able)]
            turn = {id: able[id] for id in dict.fromkeys(first) if self.spend(entries[id].tokens)}
            order = [*order[:urgent], *turn.values(), *(s for s in order[urgent:] if s.id not in turn)]
        verified: dict[str, int] = {}
        for seq in order if draft_tokens else ():
            there = draft_tokens.get(seq.id, 0) if seq.pending == 1 else 0
            planned = min(there, entries[seq.id].verified - 1)
            if there > planned and self.spend((there - planned) * self.weight):
                planned = there
            if planned:
                verified[seq.id] = planned
        return order, verified


def _ends_window(seq: SeqView, work: Work) -> bool:
    """Returns whether a decode may reach the end of its window."""
    return (seq.output - 1) % WINDOW_TOKENS + 1 + len(work.verify) >= WINDOW_TOKENS


class BatchFiller:
    """A batch of at most `bound` seconds by the latency model, however much that is; its first entry may take longer.

    victims: those whose KV a sequence in need may take, the last one first. drafted: how many tokens there are to
    verify for a decode, by id, as far as time goes and memory is free. drafts: (depth, width) of what to draft at its
    end, by id, for those that sample. held: what must not end a prompt, or a window, in it.
    """

    def __init__(
        self, view: View, bound: float, victims: Sequence[SeqView], draft_tokens: Mapping[str, int] = NOTHING,
        drafts: Mapping[str, tuple[int, int]] = NOTHING, unfinished: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.unfinished = unfinished
        self.builder = BatchBuilder(view, steps=max((depth for depth, _ in drafts.values()), default=0))
        self._draft_tokens, self._drafts = draft_tokens, drafts
        self._bound, self._model = bound, view.latency
        self.victims = list(victims)
        self._full = False  # no further token ends in time

    def fill(self, order: Iterable[SeqView]) -> None:
        """Adds pending tokens in this order: of each decode with its drafts, and as much of each prefill as fits."""
        for decode, seqs in groupby(order, key=lambda s: s.pending == 1):
            if decode:
                self._decodes([seq for seq in seqs if seq.id not in self.unfinished])
            else:
                for seq in seqs:
                    self._chunk(seq)

    def add_best_effort(self, order: Sequence[SeqView], free: int, block: int) -> None:
        """Adds best effort, oldest first, in what is left; younger requests give up KV for older ones. A request starts
        only if `free` blocks hold it to its end, so that no other best effort preempts it."""
        builder = self.builder
        for seq in order:
            if self._full or builder.tokens_left == 0:
                return
            if seq in builder.preempted:
                continue
            if seq.id in builder.running:
                if seq in self.victims:
                    self.victims = self.victims[self.victims.index(seq) + 1 :]
                self.fill([seq])
            elif not (builder.preempted or blocks_at_end(seq, block) > free or builder.lacks(seq, seq.pending)):
                free -= blocks_at_end(seq, block)
                self._chunk(seq)

    def _chunk(self, seq: SeqView) -> None:
        """Adds as much of a prompt as fits; of one in `unfinished`, all but its last token."""
        builder, own = self.builder, seq.pending - (seq.id in self.unfinished)
        if self._full:
            return
        make_room(builder, seq, min(own, builder.tokens_left), self.victims[::-1])
        if most := min(own, builder.tokens_that_fit(seq)):
            tokens = self._model.largest_chunk(self._bound, builder.shape, seq.cached, most)
            self._full = tokens < most
            if tokens := tokens or int(not builder.work):
                self._add(seq, tokens)

    def _decodes(self, seqs: Sequence[SeqView]) -> None:
        builder, model, before = self.builder, self._model, self.builder.shape
        if not self._draft_tokens:
            kv = list(accumulate((s.cached + 1 for s in seqs), initial=before.kv))
            together = range(1, len(seqs) + 1)
            fitting = bisect_right(together, self._bound, key=lambda n: model.step_time(
                before._replace(tokens=before.tokens + n, seqs=before.seqs + n, kv=kv[n])
            ))  # fmt: skip
            if builder.add_decodes(seqs[: max(fitting, not builder.work)], self._drafts):
                return
        for seq in seqs:
            make_room(builder, seq, 1, self.victims[::-1])
            if builder.tokens_that_fit(seq) == 0:
                continue
            verified = builder.verifiable(seq, self._draft_tokens.get(seq.id, 0))
            while verified and model.step_time(builder.shape.plus(1 + verified, seq.cached)) > self._bound:
                verified -= 1
            if builder.work and model.step_time(builder.shape.plus(1 + verified, seq.cached)) > self._bound:
                return
            self._add(seq, 1, verified)

    def _add(self, seq: SeqView, tokens: int, verified: int = 0) -> None:
        draft = self._drafts.get(seq.id) if tokens == seq.pending else None
        self.builder.add(seq, tokens, tuple(range(verified)), draft)
