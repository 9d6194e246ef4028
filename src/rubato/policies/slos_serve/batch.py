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
    """The admitted requests in order of deadline, and the tokens of the next batch that all of them can spare: these
    serve decodes left out of the last batches, and drafts beyond those planned.

    Args:
        view: the replica
        grid: of batches, the next one first
        seqs: the admitted
        demands: theirs, one each
        speculation: what is known of drafts
        margin: share by which steps take longer than the latency model says
        weight: what a token of prefill counts
        skipped: ids of decodes that wait, the longest wait first
    """

    view: View
    grid: Grid
    seqs: Sequence[SeqView]
    demands: Sequence[Demand]
    speculation: SpeculationState
    margin: float
    weight: float
    skipped: Collection[str] = ()
    demand_by_id: dict[str, Demand] = field(init=False)
    entry_by_id: dict[str, Demand] = field(init=False)  # the demands as entries of what is verified
    order: list[SeqView] = field(init=False)
    _tokens_to_spare: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.demand_by_id = {d.id: d for d in self.demands}
        self.entry_by_id = {
            d.id: d for d in self.speculation.in_force.entries(self.demands, self.speculation.draft_tokens)
        }
        self.order = sorted(self.seqs, key=lambda s: (self.entry_by_id[s.id].due, s.request.arrival))

    def spend(self, tokens: float) -> bool:
        """Takes `tokens` of the batch if they can be spared; returns whether they can."""
        if self._tokens_to_spare is None:
            self._tokens_to_spare = self.grid.room([self.entry_by_id[s.id] for s in self.order])
        if tokens > self._tokens_to_spare:
            return False
        self._tokens_to_spare -= max(0.0, tokens)
        return True

    def bounds(self) -> tuple[float, int]:
        """Returns the seconds of the batch, and how many tokens to draft for each decode.

        Once memory fills, that is as many as make decodes end soonest, so that others are admitted, if all can spare
        what it takes. Before, and in a short batch for a prompt, for which decodes that are ahead wait, it is as many
        as planned.
        """
        first, planned = self.grid[0], self.speculation.in_force.draft_steps
        if not self.speculation.can_draft or self.grid.has_short_first:
            return first.seconds, planned
        decodes = [s for s in self.seqs if s.pending == 1]
        roomy = sum(d.memory for d in self.demands) < DRAFT_FREELY_BELOW_KV_SHARE * self.view.kv_total
        fastest = 0 if roomy else self.speculation.find_fastest_depth(self.view, decodes)
        if fastest <= planned:
            return first.seconds, planned
        capacity = BatchCapacity(self.view, self.seqs, self.demands, self.margin, self.weight)
        need = sum(self.entry_by_id[s.id].tokens for s in decodes)
        for depth in range(fastest, planned, -1):
            tokens = capacity.tokens(first.seconds, depth)
            if tokens >= need and self.spend(first.tokens - tokens):
                return first.seconds, depth
        return first.seconds, planned

    def find_early(self, work: Mapping[str, Work]) -> dict[str, float]:
        """Returns which requests would begin a pace too early in a batch of such work, in order of deadline, and how
        many tokens of each would then be due sooner.

        These are prompts that end before their deadline, from which admission counts their decode, and decodes that end
        a window, since their lead ends with it.
        """
        by_id, seconds = {}, self.grid[0].seconds
        soon = seconds + self.grid.step()[0].seconds
        for seq in self.order:
            own, demand = work.get(seq.id), self.demand_by_id[seq.id]
            if own is None or demand.due < soon or demand.tpot == inf:
                continue
            is_prompt = seq.first_token_at is None or seq.pending > 1
            if own.tokens == seq.pending if is_prompt else _may_end_window(seq, own):
                by_id[seq.id] = 1.0 + (demand.due - seconds) / demand.tpot
        return by_id

    def demands_after(self, work: Mapping[str, Work], early: Collection[str]) -> list[Demand]:
        """Returns all demands after a batch of this work, in seconds from its end; `early` are ids of `find_early`."""
        demands, seconds = [], self.grid[0].seconds
        for seq, demand in zip(self.seqs, self.demands, strict=True):
            own, due, tokens = work.get(seq.id), demand.due, demand.tokens
            if seq.id in early or (own is not None and own.tokens == seq.pending > 1):
                due, tokens = min(due, seconds) + demand.tpot, 1.0
            elif own is not None and seq.pending > 1:
                tokens -= own.tokens * self.weight
            elif own is not None:
                due += demand.tpot * expected(demand.accepts, 1 + len(own.verify))
            demands.append(demand._replace(due=max(0.0, due - seconds), tokens=tokens))
        return demands

    def choose_order(self) -> tuple[list[SeqView], dict[str, int]]:
        """Returns the admitted in the order in which a batch takes them, and how many drafted tokens to verify, by id.

        Requests that cannot wait for the next batch come first: where kernels make a prompt's first tokens cost more
        than the others, fewer fit than were counted. Then come decodes whose tokens can be spared, those left out
        before first: where a batch does not hold all that are ahead they take turns. The others follow. All in order of
        deadline.

        Of drafted tokens as many as planned are verified, or all there are if they can be spared. They count as those
        of a prompt, since they share the context that is read.
        """
        entries, order, grid, draft_tokens = self.entry_by_id, self.order, self.grid, self.speculation.draft_tokens
        if not grid.has_short_first and (self.skipped or not draft_tokens):
            soon = grid[0].seconds + grid.step()[0].seconds
            urgent = bisect_left(order, soon, key=lambda s: entries[s.id].due)
            decodes = {s.id: s for s in order[urgent:] if s.pending == 1}
            first = [*(id for id in self.skipped if id in decodes), *(() if draft_tokens else decodes)]
            spared = {id: decodes[id] for id in dict.fromkeys(first) if self.spend(entries[id].tokens)}
            order = [*order[:urgent], *spared.values(), *(s for s in order[urgent:] if s.id not in spared)]
        verified: dict[str, int] = {}
        for seq in order if draft_tokens else ():
            drafts = draft_tokens.get(seq.id, 0) if seq.pending == 1 else 0
            count = min(drafts, entries[seq.id].verified - 1)
            if drafts > count and self.spend((drafts - count) * self.weight):
                count = drafts
            if count:
                verified[seq.id] = count
        return order, verified


def _may_end_window(seq: SeqView, work: Work) -> bool:
    """Returns whether a decode may reach the end of its window."""
    return (seq.output - 1) % WINDOW_TOKENS + 1 + len(work.verify) >= WINDOW_TOKENS


class BatchFiller:
    """Fills a batch of at most `bound` seconds by the latency model; its first entry may take longer.

    Args:
        view: the replica
        bound: seconds
        victims: requests whose KV another one in need may take, the last one first
        draft_tokens: how many drafted tokens to verify, by id, as far as time and free memory allow
        drafts: (depth, width) of what to draft at the batch's end, by id, for those that sample
        unfinished: ids of those that must not end a prompt, or a window, in this batch
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
        """Adds pending tokens in this order: each decode's with its drafts, and as many of each prefill as fit."""
        for is_decode, seqs in groupby(order, key=lambda s: s.pending == 1):
            if is_decode:
                self._add_decodes([seq for seq in seqs if seq.id not in self.unfinished])
            else:
                for seq in seqs:
                    self._add_chunk(seq)

    def add_best_effort(self, order: Sequence[SeqView], free: int, block: int) -> None:
        """Adds best effort in the remaining time; younger requests give up KV for older ones.

        Args:
            order: the requests, oldest first
            free: KV blocks; a request starts only if they hold it to its end, so that no other best effort preempts it
            block: tokens of a KV block
        """
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
                self._add_chunk(seq)

    def _add_chunk(self, seq: SeqView) -> None:
        """Adds as much of a prompt as fits; of one in `unfinished`, all but its last token."""
        builder, pending = self.builder, seq.pending - (seq.id in self.unfinished)
        if self._full:
            return
        make_room(builder, seq, min(pending, builder.tokens_left), self.victims[::-1])
        if most := min(pending, builder.tokens_that_fit(seq)):
            tokens = self._model.largest_chunk(self._bound, builder.shape, seq.cached, most)
            self._full = tokens < most
            if tokens := tokens or int(not builder.work):
                self._add(seq, tokens)

    def _add_decodes(self, seqs: Sequence[SeqView]) -> None:
        """Adds a token of each decode and the drafted tokens that it verifies, as far as they end in time."""
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
