"""Logs a replica's steps and their batches, for step times and for the causes of misses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rubato.core.plan import Shape, blocks_for
from rubato.replica.sequence import Seq, StepEnds


class Chunk(NamedTuple):
    """A sequence that runs `tokens` of its `total` pending tokens in each step of a run, the remainder in the last;
    `start` tokens are in KV before the first."""

    seq: Seq
    start: int
    tokens: int
    total: int

    def at(self, i: int) -> tuple[int, int]:
        """Returns (tokens, tokens in KV before) of the i-th step."""
        before = i * self.tokens
        return min(self.tokens, self.total - before), self.start + before

    def blocks(self, steps: int, block: int) -> int:
        """Returns the KV blocks that its first `steps` steps take."""
        _, start, tokens, total = self
        return blocks_for(start + min(steps * tokens, total), block) - blocks_for(start, block)


class Speculation(NamedTuple):
    """The draft nodes that a sequence verifies in a step, after `start` tokens in KV and its `pending` tokens, and
    (depth, width) of the tree to draft for it at the end."""

    seq: Seq
    start: int
    pending: int
    verify: tuple[int, ...]
    draft: tuple[int, int] | None


@dataclass(slots=True)
class StepRun:
    """Equal consecutive steps, the first with number `tick`: one token of each of `seqs` decodes, and chunks.

    Args:
        begin: when the first step begins.
        tick: number of the first step.
        seqs: decoding sequences in each step.
        kv: their tokens in KV before the first step.
        chunks: of prefill, in every step.
        order: sequences that the plan named, in its order.
        decode_all: all decodes run, before `order`.
        ends: when each step ends, as far as known.
        speculation: by id, of sequences that verify or draft; only in a single step.
        steps: number of steps.
        steps_done: number of steps that are over.
        shares: of the first steps, computed on demand by `MissCauses`.
    """

    begin: float
    tick: int
    seqs: int
    kv: int
    chunks: Sequence[Chunk]
    order: Sequence[Seq]
    decode_all: bool
    ends: list[float]
    speculation: Mapping[str, Speculation]
    steps: int = 1
    steps_done: int = 0
    shares: Sequence[tuple[float, float]] = ()

    def shape(self, i: int, decodes: bool = False) -> Shape:
        """Returns the shape of the i-th step.

        Args:
            i: index of the step in the run.
            decodes: only entries of one pending token, with their verified tokens and drafts, and all draft steps.
        """
        n = self.seqs
        entries = [chunk.at(i) for chunk in self.chunks]
        if decodes:
            entries = [entry for entry in entries if entry[0] == 1]
        shape = Shape.decodes(n, self.kv + (i + 1) * n).with_entries(entries)
        if not self.speculation:
            return shape
        every = self.speculation.values()
        for spec in every:
            if spec.pending == 1 or not decodes:
                if spec.verify:
                    shape = shape.minus(spec.pending, spec.start).plus(spec.pending + len(spec.verify), spec.start)
                if spec.draft is not None:
                    shape = shape.with_entries((), [spec.draft])
        return shape._replace(spec_steps=max([spec.draft[0] for spec in every if spec.draft is not None], default=0))


class StepLog:
    """The runs of a replica, kept for causes of misses while a sequence that ran in them is present."""

    def __init__(self, steps: StepEnds) -> None:
        self._steps = steps
        self._runs: list[StepRun] = []

    def keep(self, run: StepRun) -> None:
        """Adds a run that begins; it may still be shortened."""
        self._runs.append(run)

    def drop(self, run: StepRun) -> None:
        """Removes the last run, which had no step, if it was kept."""
        if self._runs and self._runs[-1] is run:
            self._runs.pop()

    def forget(self, before: int) -> None:
        """Forgets the runs that ended before this step."""
        del self._runs[: max(0, bisect_right(self._runs, before, key=_tick) - 1)]

    def clear(self) -> None:
        self._runs.clear()

    def runs(self, first: int, after: int) -> Sequence[StepRun]:
        """Returns the runs with the steps first, ..., after - 1."""
        at = bisect_right(self._runs, first, key=_tick) - 1
        return self._runs[max(at, 0) : bisect_right(self._runs, after - 1, key=_tick)]

    def at(self, tick: int) -> StepRun:
        """Returns the run with this step."""
        return self._runs[bisect_right(self._runs, tick, key=_tick) - 1]

    def seconds(self, run: StepRun, i: int) -> float:
        """Returns the seconds of the i-th step of a run."""
        at = run.tick + i
        return self._steps.at(at) - (self._steps.at(at - 1) if i else run.begin)


def _tick(run: StepRun) -> int:
    return run.tick
