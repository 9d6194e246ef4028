"""Strict priority by tightness: the request with the tighter SLO goes first, and takes KV from the loosest that runs.

For a tight tier that goes first whatever the others lose.

A request's priority is its tightest TTFT, then TPOT, then e2e over all stages; no SLO comes last; within one
priority the first to arrive goes first. Each step is filled in that order under one token budget, so a looser request
that finds no tokens or no place in the batch pauses with its KV. KV that a tighter one lacks is taken from the loosest
(its tokens are kept, it resumes by one prefill of them all). None is refused or demoted.

As in vLLM's `--scheduling-policy priority`: the order, the victims, and that a running request short of KV with none
looser gives up its own. Not as there: priorities come from SLOs, not from a number in the request; a *waiting* request
takes KV from running ones of looser priority too (vLLM's waits for free KV). Added: strict priority starves the
loosest, so the oldest request of a priority behind the tightest, once it has been here for `max_wait`, goes first in
one step of `turn_every` and keeps its KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Plan
from rubato.policy_kit.batch_builder import BatchBuilder, make_room
from rubato.policy_kit.stateless import Stateless

SOURCE = (
    "vLLM V1 scheduler with --scheduling-policy priority; priorities from SLOs, and turns for the starved, are ours"
)


@dataclass
class Scheduler(Stateless):
    """Fills each step in order of priority.

    Args:
        budget: tokens of a step
        max_wait: seconds after which the oldest request of the looser priorities gets turns
        turn_every: steps from one turn to the next
        turn_tokens: tokens that the request gets in its turn, at least, if as many are pending
    """

    needs = frozenset({"chunked", "preempt", "mixed"})
    budget: int = 2048
    max_wait: float = 5.0
    turn_every: int = 16
    turn_tokens: int = 16
    _turn: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.budget < 1 or self.max_wait < 0:
            raise ValueError(f"budget {self.budget}, max_wait {self.max_wait}: give >= 1 token and >= 0 seconds")
        if self.turn_every < 2 or self.turn_tokens < 1:
            raise ValueError(
                f"turn_every {self.turn_every} must be at least 2, turn_tokens {self.turn_tokens} at least 1"
            )

    def plan(self, view: View) -> Plan:
        builder = BatchBuilder(view, self.budget)
        order = sorted([*view.running, *view.waiting], key=_order)
        starved = self._find_starved(view, order)
        running = builder.running
        if starved is not None:
            self._give_turn(builder, starved, [s for s in order[::-1] if s.id in running])
        can_admit = True
        for at, seq in enumerate(order):
            if seq.id in builder.work:
                continue
            if seq in builder.preempted:
                can_admit = False  # requests that wait behind it must not get the KV that it gave back
                continue
            tokens = min(seq.pending, builder.tokens_left) if builder.seqs_left else 0
            if tokens == 0:
                break
            is_running = seq.id in running
            if not is_running and not can_admit:
                continue
            # A waiting request takes KV only from a looser priority: one of its own would take it back, endlessly.
            victims = (
                v
                for v in order[:at:-1]
                if v.id in running and v is not starved and (is_running or tightness(v) > tightness(seq))
            )
            if make_room(builder, seq, tokens, victims):
                builder.add(seq, tokens)
            else:
                can_admit = False
                if is_running and seq is not starved:
                    builder.preempt(seq)
        return builder.plan()

    def _find_starved(self, view: View, order: Sequence[SeqView]) -> SeqView | None:
        """Returns the oldest request behind the tightest priority here, if it has waited for `max_wait`."""
        behind = [s for s in order if tightness(s) > tightness(order[0])]
        oldest = min(behind, key=lambda s: (s.request.arrival, s.id), default=None)
        if oldest is None or view.now - oldest.request.arrival < self.max_wait:
            return None
        return oldest

    def _give_turn(self, builder: BatchBuilder, seq: SeqView, loosest_first: Sequence[SeqView]) -> None:
        self._turn += 1
        if self._turn < self.turn_every:
            return
        self._turn = 0
        tokens = min(seq.pending, self.turn_tokens, builder.tokens_left)
        if make_room(builder, seq, tokens, loosest_first):
            builder.add(seq, tokens)


def tightness(seq: SeqView) -> tuple[float, float, float]:
    """Returns the priority, of which the smallest goes first: the tightest TTFT, TPOT and e2e of all stages in seconds,
    inf without."""
    slos = [stage.slo for stage in seq.request.stages]
    return _least(s.ttft for s in slos), _least(s.tpot for s in slos), _least(s.e2e for s in slos)


def _least(values: Iterable[float | None]) -> float:
    return min((v for v in values if v is not None), default=inf)


def _order(seq: SeqView) -> tuple[tuple[float, float, float], float, str]:
    return tightness(seq), seq.request.arrival, seq.id
