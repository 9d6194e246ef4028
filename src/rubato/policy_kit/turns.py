"""Gives turns to requests without a deadline, so that none starves, and adds decodes that leave them their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.batch_builder import BatchBuilder, make_room

# One step in so many gives the oldest so many tokens, as in `edf` and `priority`.
TURN_EVERY_STEPS, TURN_TOKENS = 16, 16


@dataclass
class Turns:
    """Counts the steps in which something waits or prefills, and gives turns."""

    _count: int = 0

    def give(self, builder: BatchBuilder) -> None:
        """Gives, in one step of `TURN_EVERY_STEPS`, the oldest request without a deadline up to `TURN_TOKENS` of its
        tokens before all others, and the KV for them from those started last.

        Call it before anything else is put into the batch.
        """
        view = builder.view
        if not (view.waiting or view.prefilling):
            return
        self._count += 1
        if self._count < TURN_EVERY_STEPS or (seq := oldest_without_deadline(view)) is None:
            return
        self._count = 0
        tokens = min(seq.pending, TURN_TOKENS, builder.tokens_left)
        make_room(builder, seq, tokens, reversed(view.running))
        if tokens := min(tokens, builder.tokens_that_fit(seq)):
            builder.add(seq, tokens)


def oldest_without_deadline(view: View) -> SeqView | None:
    """Returns the oldest request that runs or waits as best effort, or has no SLO on the next token; by arrival."""
    last = [s for group in (view.running, view.waiting) for s in group if s.best_effort or s.due == inf]
    return min(last, key=lambda s: (s.request.arrival, s.id), default=None)


def add_decodes(builder: BatchBuilder, decodes: Sequence[SeqView]) -> None:
    """Adds a token of each decode, in this order, of those that are not in the batch yet.

    One that lacks KV takes it from those started after it, the last first, but not from the oldest without a deadline,
    whose turns would else be in vain; where that is not enough it sits the step out.
    """
    view = builder.view
    todo = [s for s in decodes if s.id not in builder.work and s not in builder.preempted]
    if builder.add_decodes(todo):
        return
    oldest = oldest_without_deadline(view)
    started = {s.id: at for at, s in enumerate(view.running)}
    for seq in todo:
        if seq in builder.preempted or not (builder.tokens_left and builder.seqs_left):
            continue
        make_room(builder, seq, 1, [s for s in view.running[: started[seq.id] : -1] if s is not oldest])
        if builder.tokens_that_fit(seq):
            builder.add(seq, 1)
