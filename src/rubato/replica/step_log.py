"""The steps that a replica runs and has run: what is in each, for the engine's time, and for the cause of a miss."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rubato.core.plan import Shape, blocks_for
from rubato.replica.sequence import Seq, StepEnds


class Chunk(NamedTuple):
    """A sequence that is in every step of a run with `tokens` tokens, in the first on top of `start` in KV, in the last
    with what is left of `total`."""

    seq: Seq
    start: int
    tokens: int
    total: int

    def at(self, i: int) -> tuple[int, int]:
        """(tokens, tokens in KV before) of the i-th step."""
        before = i * self.tokens
        return min(self.tokens, self.total - before), self.start + before

    def blocks(self, steps: int, block: int) -> int:
        """KV blocks that so many steps of it take."""
        held = self.start + min(steps * self.tokens, self.total)
        return blocks_for(held, block) - blocks_for(self.start, block)


class Speculation(NamedTuple):
    """Nodes of its draft that a sequence verifies in a step, on top of the `start` tokens in KV and the `pending` ones
    that run, and the (depth, width) of the tree that is drafted for it at the end."""

    seq: Seq
    start: int
    pending: int
    verify: tuple[int, ...]
    draft: tuple[int, int] | None


@dataclass(slots=True)
class StepRun:
    """Equal steps in a row, the first of which is number `tick` and begins at `begin`: one token of each of `seqs`
    sequences that decode and together have `kv` tokens in KV before the first, and chunks.

    order: sequences that the plan named, in its order; decode_all: after all that decode. speculation: of those in it
    that verify or draft, by id; only a single step has any. ends: when each step ends, as far as it is known
    beforehand. steps: how many; done: how many of them are over. shares: for `MissCauses`, of the first steps, as far
    as asked for.
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
    done: int = 0
    shares: Sequence[tuple[float, float]] = ()

    def shape(self, i: int, decodes: bool = False) -> Shape:
        """Of the i-th step. decodes: only of its entries of one pending token, with what they verify, the drafts for
        them, and all draft steps."""
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
    """The runs of a replica, for the cause of a miss, while a sequence that ran in them is there."""

    def __init__(self, steps: StepEnds) -> None:
        self._steps = steps
        self._runs: list[StepRun] = []

    def keep(self, run: StepRun) -> None:
        """A run that begins; it may still be cut."""
        self._runs.append(run)

    def drop(self, run: StepRun) -> None:
        """The last run has come to nothing; it may not have been kept."""
        if self._runs and self._runs[-1] is run:
            self._runs.pop()

    def forget(self, before: int) -> None:
        """The runs that ended before this step."""
        del self._runs[: max(0, bisect_right(self._runs, before, key=_tick) - 1)]

    def clear(self) -> None:
        self._runs.clear()

    def runs(self, first: int, after: int) -> Sequence[StepRun]:
        """Those with the steps first, ..., after - 1."""
        at = bisect_right(self._runs, first, key=_tick) - 1
        return self._runs[max(at, 0) : bisect_right(self._runs, after - 1, key=_tick)]

    def at(self, tick: int) -> StepRun:
        """The run with this step."""
        return self._runs[bisect_right(self._runs, tick, key=_tick) - 1]

    def seconds(self, run: StepRun, i: int) -> float:
        """That the i-th step of a run took."""
        at = run.tick + i
        return self._steps.at(at) - (self._steps.at(at - 1) if i else run.begin)


def _tick(run: StepRun) -> int:
    return run.tick
