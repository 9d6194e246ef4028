"""Equal steps in a row: what is in each of them, and when each ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from rubato.core.interfaces import LatencyModel, Line
from rubato.core.kv_blocks import blocks_for
from rubato.core.plan import Shape
from rubato.engines.simulated import check_noise, factors

if TYPE_CHECKING:
    from rubato.simulation.fast_sequence import FastSeq

DRAWN = 1024  # step-time factors drawn at a time

Seconds = Callable[[int, int, int, int, int, int, int], float]  # `LatencyModel.seconds_of`


class ChunkShare(NamedTuple):
    """A sequence that is in every step of a run with `tokens` tokens, in the first on top of `start` in KV, in the last
    with what is left of `total`."""

    seq: FastSeq
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


@dataclass(slots=True)
class RepeatedSteps:
    """Steps tick, tick + 1, ..., the first of which begins at `begin`: one token of each of `seqs` sequences that
    together have `kv` tokens in KV before the first, and chunks. order: whom the plan named, in its order.
    ends: when each step ends, while the run is under way (then the log has it). steps: how many; done: booked."""

    begin: float
    tick: int
    seqs: int
    kv: int
    chunks: Sequence[ChunkShare]
    order: Sequence[FastSeq]
    ends: list[float]
    steps: int = 0
    done: int = 0

    def shape(self, i: int) -> Shape:
        """Of the i-th step."""
        tokens, seqs, kv, context, square, chunks, chunk_kv = self.features(i)
        return Shape(tokens, seqs, kv, context, square, 0, chunks, chunk_kv)

    def features(self, i: int) -> tuple[int, int, int, int, int, int, int]:
        """Of the i-th step's shape, but for draft steps."""
        tokens = seqs = self.seqs
        kv = self.kv + (i + 1) * seqs
        context = square = chunks = chunk_kv = 0
        for part in self.chunks:
            count, start = part.at(i)
            tokens += count
            seqs += 1
            kv += start + count
            if count > 1:
                context += count * start
                square += count * count
                chunks += 1
                chunk_kv += start + count
        return tokens, seqs, kv, context, square, chunks, chunk_kv

    def decodes(self, i: int) -> Shape:
        """The i-th step's entries of one token that are not in `chunks`."""
        return Shape(self.seqs, self.seqs, self.kv + (i + 1) * self.seqs)

    def all_decodes(self, i: int) -> Shape:
        """All entries of one token of the i-th step."""
        shape = self.decodes(i)
        for part in self.chunks:
            tokens, before = part.at(i)
            if tokens == 1:
                shape = shape.plus(1, before)
        return shape


class StepTimes:
    """The time steps take, in the order they are run: a model's, times factors as `engines.simulated` draws them."""

    def __init__(self, truth: LatencyModel, noise: float, seed: int) -> None:
        check_noise(noise)
        self._seconds: Seconds = truth.seconds_of
        self._line = None if truth.line(1, 1) is None else cast(Callable[[int, int], Line], truth.line)
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._factors: list[float] = []
        self._first = 0  # the step whose factor is first in the list

    def take(self, run: RepeatedSteps, steps: int) -> None:
        """Put the end of each of so many steps of the run into `ends`."""
        run.steps = steps
        seconds, n, kv = self._seconds, run.seqs, run.kv
        if self._line is not None and steps > 1 and not (run.chunks or self._noise):
            run.ends = _ends_along(self._line, n, kv, steps, run.begin)
            return
        if run.chunks:
            took = self._with_chunks(run, steps, seconds)
        elif steps == 1:
            took = [seconds(n, n, kv + n, 0, 0, 0, 0)]
        elif self._line is None:
            took = [seconds(n, n, at, 0, 0, 0, 0) for at in range(kv + n, kv + n * (steps + 1), n)]
        else:
            took = _along(self._line, n, kv, steps)
        if self._noise:
            took = [seconds * self._factor(run.tick + i) for i, seconds in enumerate(took)]
        took[0] += run.begin
        run.ends = list(accumulate(took))

    def _with_chunks(self, run: RepeatedSteps, steps: int, seconds: Seconds) -> list[float]:
        """From one step to the next only three sums of a shape change, each by the same; the last may be smaller."""
        if len(run.chunks) == 1:
            return self._with_one(run, steps, seconds)
        if steps == 1:
            return [seconds(*run.features(0))]
        tokens, seqs, kv, context, square, chunks, chunk_kv = run.features(0)
        in_chunks = tokens - (seqs - chunks)
        took = []
        for _ in range(steps - 1):
            took.append(seconds(tokens, seqs, kv, context, square, chunks, chunk_kv))
            kv += tokens
            context += square
            chunk_kv += in_chunks
        took.append(seconds(*run.features(steps - 1)))
        return took

    def _with_one(self, run: RepeatedSteps, steps: int, seconds: Seconds) -> list[float]:
        """`Run.features` of each step, for the chunk that most runs with chunks have."""
        n, (_, held, tokens, total) = run.seqs, run.chunks[0]
        kv, left, took = run.kv, total, []
        for _ in range(steps):
            here = tokens if tokens < left else left
            kv += n
            upto = held + here
            if here > 1:
                took.append(seconds(n + here, n + 1, kv + upto, here * held, here * here, 1, upto))
            else:
                took.append(seconds(n + here, n + 1, kv + upto, 0, 0, 0, 0))
            held = upto
            left -= here
        return took

    def _factor(self, tick: int) -> float:
        at = tick - self._first
        if at >= len(self._factors):
            keep = max(0, at - DRAWN)  # steps that were worked out in vain are worked out again
            self._factors = self._factors[keep:] + factors(self._rng, self._noise, DRAWN).tolist()
            self._first += keep
            at -= keep
        return self._factors[at]


def _along(line: Callable[[int, int], Line], n: int, kv: int, steps: int) -> list[float]:
    """Seconds of steps of n decodes alone that together have `kv` tokens in KV before the first."""
    took: list[float] = []
    kv += n
    while steps:
        fixed, y, slope, x, until = line(n, kv)
        here = steps if until == inf else min(steps, max(1, ceil((until - kv) / n)))
        took += [fixed + (y + slope * (at - x)) for at in range(kv, kv + here * n, n)]
        kv += here * n
        steps -= here
    return took


def _ends_along(line: Callable[[int, int], Line], n: int, kv: int, steps: int, end: float) -> list[float]:
    """When each of these steps ends, the first begun at `end`: `_along` and their sums in one go."""
    kv += n
    fixed, y, slope, x, until = line(n, kv)
    if kv + (steps - 1) * n < until:
        return [end := end + (fixed + (y + slope * (at - x))) for at in range(kv, kv + steps * n, n)]
    took = _along(line, n, kv - n, steps)
    took[0] += end
    return list(accumulate(took))
