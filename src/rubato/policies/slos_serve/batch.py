"""The next batch: entries by deadline, as far as its time goes; the rest is for best effort."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Shape
from rubato.core.request import NOTHING
from rubato.policy_kit.batch_builder import BatchBuilder, blocks_at_end


class BatchFiller:
    """A batch of at most `bound` seconds by the latency model, however much that is; its first entry may take longer.

    victims: those whose KV a sequence in need may take, the last one first. drafted: how many tokens there are to
    verify for a decode, by id, as far as time goes and memory is free. drafts: (depth, width) of what to draft at its
    end, by id, for those that sample.
    """

    def __init__(
        self, view: View, bound: float, victims: Sequence[SeqView], drafted: Mapping[str, int] = NOTHING,
        drafts: Mapping[str, tuple[int, int]] = NOTHING,
    ) -> None:  # fmt: skip
        self.builder = BatchBuilder(view, steps=max((depth for depth, _ in drafts.values()), default=0))
        self._drafted = drafted
        self._drafts = drafts
        self._bound = bound
        self._model = view.latency
        self._victims = list(victims)
        self._full = False  # no further token ends in time

    @property
    def empty(self) -> bool:
        return not (self.builder.work or self.builder.decode)

    def decodes(self, order: Sequence[SeqView]) -> bool:
        """`fill` in one go where all that run are in `order`, and the decodes among them come first and fit: the same
        batch. False, and nothing done, where not."""
        builder, many = self.builder, self.builder.decodes
        if self._drafted or builder.shape.spec_steps:
            return False
        first = order[: many.seqs]
        if any(s.pending > 1 for s in first) or not self._model.step_time(many) <= self._bound:
            return False
        if not all(s.id in builder.running for s in first) or not builder.decode_all():
            return False
        self.fill(order[many.seqs :])
        return True

    def left_out(self, order: Sequence[SeqView], before: Sequence[str]) -> list[str]:
        """Ids of decodes that are not in the batch, first those that were not in the one before either."""
        builder = self.builder
        if builder.decode:
            return []
        out = {s.id: None for s in order if s.pending == 1 and s.id not in builder.work}
        return list({id: None for id in before if id in out} | out)

    def fill(self, order: Iterable[SeqView]) -> None:
        """Their pending tokens, in this order: each decode's and its drafted ones, as much of each prefill as fits."""
        for decode, seqs in groupby(order, key=lambda s: s.pending == 1):
            if decode:
                self._decodes(list(seqs))
            else:
                for seq in seqs:
                    self.chunk(seq)

    def chunk(self, seq: SeqView) -> None:
        """As much of it as fits."""
        builder = self.builder
        if self._full:
            return
        self._make_room(seq, min(seq.pending, builder.tokens_left))
        most = builder.tokens_that_fit(seq)
        if most:
            tokens = self._model.largest_chunk(self._bound, builder.shape, seq.cached, most)
            self._full = tokens < most
            if tokens == 0 and self.empty:
                tokens = 1
            if tokens:
                self._add(seq, tokens)

    def add_best_effort(self, order: Sequence[SeqView], free: int, block: int) -> None:
        """Best effort, oldest first, in what is left; the younger give up KV for the older. One starts when `free`
        holds it to its end, so that it need not be preempted for another of its kind."""
        builder = self.builder
        for seq in order:
            if self._full or builder.tokens_left == 0:
                return
            if seq in builder.preempted:
                continue
            if seq.id in builder.running:
                older, self._victims = self._split(seq)
                self.fill([seq])
                self._victims = [*older, *self._victims]
            elif (
                not builder.preempted
                and (need := blocks_at_end(seq, block)) <= free
                and not builder.lacks(seq, seq.pending)
            ):
                free -= need
                self.chunk(seq)

    def run_at_least(self, seq: SeqView, others: Sequence[SeqView]) -> None:
        """Some of it, though `others` lose their KV for it, the last one first."""
        self._victims = [s for s in others if s not in self.builder.preempted]
        self.chunk(seq)

    def _split(self, seq: SeqView) -> tuple[list[SeqView], list[SeqView]]:
        """The victims up to this one, and those after it."""
        at = self._victims.index(seq) + 1 if seq in self._victims else len(self._victims)
        return self._victims[:at], self._victims[at:]

    def _decodes(self, seqs: Sequence[SeqView]) -> None:
        builder, model = self.builder, self._model
        before = builder.shape
        kv = sum([s.cached for s in seqs]) + len(seqs)
        together = before._replace(tokens=before.tokens + len(seqs), seqs=before.seqs + len(seqs), kv=before.kv + kv)
        if self._drafted:
            together = before
            for seq in seqs:
                together = together.plus(1 + self._drafted.get(seq.id, 0), seq.cached)
        all_fit = model.step_time(together) <= self._bound
        if not self._drafted:
            fitting = len(seqs) if all_fit else max(self._fitting(seqs), 1 if self.empty else 0)
            if builder.add_decodes(seqs[:fitting], self._drafts):
                return
        shape: Shape = before
        for seq in seqs:
            self._make_room(seq, 1)
            if builder.tokens_that_fit(seq) == 0:
                continue
            tokens = 1 + builder.verifiable(seq, self._drafted.get(seq.id, 0))
            if not all_fit:
                while tokens > 1 and model.step_time(shape.plus(tokens, seq.cached)) > self._bound:
                    tokens -= 1
                shape = shape.plus(tokens, seq.cached)
                if not self.empty and model.step_time(shape) > self._bound:
                    return
            self._add(seq, 1, tokens - 1)

    def _fitting(self, seqs: Sequence[SeqView]) -> int:
        """How many of these decodes, in this order, end in time."""
        before, model = self.builder.shape, self._model
        kv = list(accumulate((s.cached + 1 for s in seqs), initial=before.kv))

        def seconds(n: int) -> float:
            return model.step_time(before._replace(tokens=before.tokens + n, seqs=before.seqs + n, kv=kv[n]))

        return bisect_right(range(1, len(seqs) + 1), self._bound, key=seconds)

    def _add(self, seq: SeqView, tokens: int, verified: int = 0) -> None:
        draft = self._drafts.get(seq.id) if tokens == seq.pending else None
        self.builder.add(seq, tokens, tuple(range(verified)), draft)

    def _make_room(self, seq: SeqView, tokens: int) -> None:
        builder = self.builder
        while self._victims and tokens and builder.lacks(seq, tokens):
            victim = self._victims.pop()
            if victim is not seq:
                builder.preempt(victim)
