"""What every scheduler must add up while it makes a plan: tokens, sequences, KV blocks, predicted time."""

from __future__ import annotations

from collections.abc import Iterable

from rubato.interfaces import SeqView, View
from rubato.kv import blocks_for
from rubato.types import Plan, Shape, Work


class Packing:
    """A plan in the making on a view: never beyond the engine's limits or the free KV.

    budget: tokens the batch may have, the engine's limit if not given.
    """

    def __init__(self, view: View, budget: int | None = None) -> None:
        limits = view.limits
        self.view = view
        self.tokens_left = min(limits.max_tokens, budget) if budget is not None else limits.max_tokens
        self.seqs_left = limits.max_seqs
        self.kv_left = view.kv_free
        self.running = {s.id for s in view.running}
        most = limits.max_running
        self.slots_left = len(view.waiting) if most is None else most - len(self.running)
        self.shape = Shape()
        self.work: dict[str, int] = {}
        self.preempted: list[SeqView] = []

    def room(self, seq: SeqView) -> int:
        """The most tokens of `seq` that still fit (0: none), for a sequence not in the batch yet."""
        if self.seqs_left == 0 or self.lacks_slot(seq):
            return 0
        by_kv = (seq.blocks + self.kv_left) * self.view.limits.block - seq.cached
        return max(0, min(seq.pending, self.tokens_left, by_kv))

    def lacks_slot(self, seq: SeqView) -> bool:
        """Whether so many hold KV already that this one may not start."""
        return self.slots_left < 1 and seq.id not in self.running

    def lacks(self, seq: SeqView, tokens: int) -> bool:
        """Whether another must be preempted first: for KV, or for a slot."""
        return self.lacks_kv(seq, tokens) or self.lacks_slot(seq)

    def lacks_kv(self, seq: SeqView, tokens: int) -> bool:
        return self._new_blocks(seq, tokens) > self.kv_left

    def add(self, seq: SeqView, tokens: int) -> None:
        """Put work into the batch; the caller has asked `room`."""
        self.work[seq.id] = tokens
        self.slots_left -= seq.id not in self.running
        self.tokens_left -= tokens
        self.seqs_left -= 1
        self.kv_left -= self._new_blocks(seq, tokens)
        self.shape = self.shape.plus(tokens, seq.cached)

    def remove(self, seq: SeqView) -> None:
        """Take its work out of the batch again."""
        tokens = self.work.pop(seq.id)
        self.slots_left += seq.id not in self.running
        self.tokens_left += tokens
        self.seqs_left += 1
        self.kv_left += self._new_blocks(seq, tokens)
        many = tokens > 1
        s = self.shape
        self.shape = Shape(
            s.tokens - tokens,
            s.seqs - 1,
            s.kv - seq.cached - tokens,
            s.chunk_context - (tokens * seq.cached if many else 0),
            s.chunk_sq - (tokens * tokens if many else 0),
            s.spec_steps,
        )

    def preempt(self, seq: SeqView) -> None:
        """Give back a running sequence's KV, and its place in this batch if it has one."""
        if seq.id in self.work:
            self.remove(seq)
        self.kv_left += seq.own_blocks
        self.slots_left += 1
        self.preempted.append(seq)

    def plan(self, *, demote: Iterable[str] = (), promote: Iterable[str] = (), drop: dict[str, str] | None = None,
             wake_at: float | None = None) -> Plan:  # fmt: skip
        return Plan(
            work=tuple(Work(id, tokens) for id, tokens in self.work.items()),
            preempt=tuple(s.id for s in self.preempted),
            demote=tuple(demote),
            promote=tuple(promote),
            drop=drop or {},
            wake_at=wake_at,
        )

    def _new_blocks(self, seq: SeqView, tokens: int) -> int:
        return max(0, blocks_for(seq.cached + tokens, self.view.limits.block) - seq.blocks)


def run_in_order(packing: Packing, running: Iterable[SeqView]) -> None:
    """vLLM's rule for the running: each gets its pending tokens in order of start; who lacks KV takes it from the one
    started last (itself in the end)."""
    order = list(running)
    at = 0
    while at < len(order):
        seq = order[at]
        tokens = min(seq.pending, packing.tokens_left) if packing.seqs_left else 0
        if tokens == 0:
            at += 1
            continue
        while packing.lacks_kv(seq, tokens) and order[-1] is not seq:
            packing.preempt(order.pop())
        if packing.lacks_kv(seq, tokens):
            packing.preempt(order.pop())
            return
        packing.add(seq, tokens)
        at += 1


def admit_in_order(packing: Packing, waiting: Iterable[SeqView]) -> None:
    """First come, first served, by chunks; stop at the first that does not fit. Nobody is admitted in a step that
    preempted: it would take the KV just freed."""
    if packing.preempted:
        return
    for seq in waiting:
        tokens = min(seq.pending, packing.tokens_left)
        if tokens == 0 or packing.room(seq) < tokens:
            return
        packing.add(seq, tokens)


def decodes_first(packing: Packing) -> Plan:
    """Sarathi's order: decodes, then prompts that have begun, then waiting ones by arrival, within the budget."""
    running = packing.view.running
    run_in_order(packing, [*(s for s in running if s.pending == 1), *(s for s in running if s.pending > 1)])
    admit_in_order(packing, packing.view.waiting)
    return packing.plan()
