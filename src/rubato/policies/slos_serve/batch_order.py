"""Tokens of the next batch that all admitted requests can spare, and what gets them: decodes behind by chance, for
which it is cut short; decodes left out; drafts beyond those planned; decodes that are ahead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from rubato.core.interfaces import SeqView, View
from rubato.policies.slos_serve.demand import BatchCapacity, counted
from rubato.policies.slos_serve.speculation import Drafts
from rubato.policies.slos_serve.token_budget import Demand, Grid, room

DRAFT_FREELY_BELOW_KV_SHARE = 0.5  # share of memory: while less is promised, decodes need not hurry


@dataclass
class BatchOrder:
    """seqs: the admitted, and `demands` what they demand, one each. prefill_weight: what a token of prefill counts.
    entries: the demands, with what is verified in each entry. order: by deadline. skipped: ids of decodes that the last
    batches went without, the longest wait first."""

    view: View
    grid: Grid
    seqs: Sequence[SeqView]
    demands: Sequence[Demand]
    drafts: Drafts
    margin: float
    prefill_weight: float
    skipped: Collection[str] = ()
    entries: dict[str, Demand] = field(init=False)
    order: list[SeqView] = field(init=False)
    _left: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.entries = {d.id: d for d in self.drafts.entries(self.demands)}
        self.order = sorted(self.seqs, key=lambda s: (self.entries[s.id].due, s.request.arrival))

    def spend(self, tokens: float) -> bool:
        """Take so many tokens of the batch, if they can be spared; returns whether."""
        left = self._spare()
        if tokens > left:
            return False
        self._left = left - max(0.0, tokens)
        return True

    def _spare(self) -> float:
        if self._left is None:
            self._left = float(room(self.grid, [self.entries[s.id] for s in self.order]).min(initial=inf))
        return self._left

    def bounds(self) -> tuple[float, int]:
        """Seconds of the batch, and how many tokens to draft for each in it.

        The grid's seconds, or until the first token is due of a decode that is behind by chance; as deep as is fastest
        once memory fills; where all others can spare what the batch then lacks, and all decodes are in it: not in a
        short one for a prompt, for which those ahead wait.
        """
        first, planned = self.grid.phases[0], self.drafts.in_force.steps
        if not self.drafts.able:
            return first.seconds, 0
        if self.grid.leads:
            return first.seconds, planned
        decodes = [s for s in self.seqs if s.pending == 1]
        beside = min(sum(s.pending for s in self.seqs if s.pending > 1), ceil(first.tokens / self.prefill_weight))
        roomy = sum(d.memory for d in self.demands) < DRAFT_FREELY_BELOW_KV_SHARE * self.view.kv_total
        fastest = 0 if roomy else self.drafts.fastest(self.view, decodes, beside)
        behind = sorted({d.due for d in self.demands if self.entries[d.id].due == 0.0 < d.due < first.seconds})
        if not behind and fastest <= planned:
            return first.seconds, planned
        capacity = BatchCapacity(self.view, self.seqs, self.demands, self.margin, self.prefill_weight)
        need = sum(self.entries[s.id].tokens for s in decodes)
        for seconds in [*behind, first.seconds]:
            for depth in range(fastest, -1 if seconds < first.seconds else planned, -1):
                tokens = capacity.tokens(seconds, depth)
                if tokens >= need and self.spend(first.tokens - tokens):
                    return seconds, depth
        return first.seconds, planned

    def in_order(self) -> tuple[list[SeqView], dict[str, int]]:
        """In order of deadline, and of turn, but decodes that are ahead come before prefills due sooner, as far as a
        batch can spare the tokens: so none is held up for as long as it was ahead. But all come after those that cannot
        wait for the next batch: where kernels make a prompt's first tokens cost more than the others, fewer fit than
        were counted. And how many drafted tokens to verify for each: what was planned on, or all there are where they
        can be spared, counted as those of a prompt: they share the context that is read for the entry. Plans count them
        as decodes, lest long batches are taken too often."""
        urgent = self._urgent()
        order, drafted = [*self.order[:urgent], *self._in_turn(self.order[urgent:])], self.drafts.drafted
        first = next((i for i in range(urgent, len(order)) if order[i].pending > 1), len(order))
        verified: dict[str, int] = {}
        for seq in order[:first] if drafted else ():
            if seq.pending == 1:
                there, planned = drafted.get(seq.id, 0), int(self.entries[seq.id].tokens) - 1
                verified[seq.id] = (
                    there if there > planned and self.spend((there - planned) * self.prefill_weight) else planned
                )
        if not drafted:
            return [*order[:first], *self._ahead(order[first:])], {}
        early: list[SeqView] = []
        late: list[SeqView] = []
        for seq in order[first:]:
            there = drafted.get(seq.id, 0)
            ahead = seq.pending == 1 and not self.grid.leads and self.spend(counted(1 + there, self.prefill_weight))
            (early if ahead else late).append(seq)
            if there:
                verified[seq.id] = there if ahead else min(there, self.entries[seq.id].verified - 1)
        return [*order[:first], *early, *late], {id: nodes for id, nodes in verified.items() if nodes}

    def _urgent(self) -> int:
        """How many, by deadline, are due before the next batch will have ended."""
        soon = self.grid.phases[0].seconds + self.grid.second.seconds
        return bisect_left(self.order, soon, key=lambda s: self.entries[s.id].due)

    def _ahead(self, order: list[SeqView]) -> list[SeqView]:
        """Of `order` decodes first, as many as can be spared."""
        decodes = [s for s in order if s.pending == 1]
        if not decodes or self.grid.leads:
            return order
        early = decodes[: max(0, int(min(self._spare(), len(decodes))))]
        if len(early) == len(decodes):
            return [*early, *(s for s in order if s.pending > 1)]
        ids = {s.id for s in early}
        return [*early, *(s for s in order if s.id not in ids)]

    def _in_turn(self, order: list[SeqView]) -> list[SeqView]:
        """Decodes that were left out come first, as far as their tokens can be spared: where a batch does not hold all
        ahead they take turns, so those furthest ahead do not wait for all others."""
        if not self.skipped or self.grid.leads:
            return order
        able = {s.id: s for s in order if s.pending == 1}
        turn = {id: able[id] for id in self.skipped if id in able and self.spend(self.entries[id].tokens)}
        return [*turn.values(), *(s for s in order if s.id not in turn)]
