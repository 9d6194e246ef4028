"""Equal steps in a row: what is in each of them, and when each ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rubato.engines.simulated import check_noise, factors
from rubato.interfaces import LatencyModel, Line
from rubato.types import Shape

if TYPE_CHECKING:
    from rubato.lean.seq import LeanSeq

DRAWN = 1024  # step-time factors drawn at a time


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence that is in every step of a run with `tokens` tokens, in the first on top of `start` in KV."""

    seq: LeanSeq
    start: int
    tokens: int


@dataclass(slots=True)
class Run:
    """Steps tick, tick + 1, ..., the first of which begins at `begin`: one token of each of `seqs` sequences that
    together have `kv` tokens in KV before the first, and chunks. ends: when each step ends. needs: KV blocks that steps
    up to each take, of `free`. order: the sequences that the plan named, in its order. done: steps booked."""

    begin: float
    tick: int
    seqs: int
    kv: int
    chunks: tuple[Part, ...]
    order: Sequence[LeanSeq]
    free: int
    needs: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    done: int = 0

    def shape(self, i: int) -> Shape:
        """Of the i-th step."""
        shape = self.decodes(i)
        for part in self.chunks:
            shape = shape.plus(part.tokens, part.start + i * part.tokens)
        return shape

    def decodes(self, i: int) -> Shape:
        """The i-th step's entries of one token that are not in `chunks`."""
        return Shape(self.seqs, self.seqs, self.kv + (i + 1) * self.seqs)

    def all_decodes(self, i: int) -> Shape:
        """All entries of one token of the i-th step."""
        shape = self.decodes(i)
        for part in self.chunks:
            if part.tokens == 1:
                shape = shape.plus(1, part.start + i)
        return shape

    def seconds(self, i: int) -> float:
        """That the i-th step took."""
        return self.ends[i] - (self.ends[i - 1] if i else self.begin)


class Steps:
    """The time steps take, in the order they are run: a model's, times factors as `engines.simulated` draws them."""

    def __init__(self, truth: LatencyModel, noise: float, seed: int) -> None:
        check_noise(noise)
        self._truth = truth
        self._seconds: Callable[[int, int, int, int, int, int, int], float] | None = getattr(truth, "seconds", None)
        self._line: Callable[[int, int], Line] | None = getattr(truth, "line", None)
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._factors: list[float] = []
        self._first = 0  # the step whose factor is first in the list

    def take(self, run: Run) -> None:
        """Put the end of each step of the run into `ends`: as many as `needs` has."""
        at, ends, noise = run.begin, run.ends, self._noise
        if self._seconds is None:
            for i in range(len(run.needs)):
                seconds = self._truth.step_time(run.shape(i))
                at += seconds * self._factor(run.tick + i) if noise else seconds
                ends.append(at)
            return
        if self._line is not None and not run.chunks:
            self._decodes(run)
            return
        # From one step to the next only three sums of a shape change, each by the same.
        shape = run.shape(0)
        tokens, seqs, square, chunks = shape.tokens, shape.seqs, shape.chunk_sq, shape.chunks
        kv, context, chunk_kv = shape.kv, shape.chunk_context, shape.chunk_kv
        in_chunks = sum(part.tokens for part in run.chunks if part.tokens > 1)
        for i in range(len(run.needs)):
            seconds = self._seconds(tokens, seqs, kv, context, square, chunks, chunk_kv)
            at += seconds * self._factor(run.tick + i) if noise else seconds
            ends.append(at)
            kv += tokens
            context += square
            chunk_kv += in_chunks

    def _decodes(self, run: Run) -> None:
        """Steps of decodes alone: along a line."""
        assert self._line is not None
        at, ends, noise, n, kv = run.begin, run.ends, self._noise, run.seqs, run.kv
        until = -1.0
        for i in range(len(run.needs)):
            kv += n
            if kv >= until:
                fixed, y, slope, x, until = self._line(n, kv)
            seconds = fixed + (y + slope * (kv - x))
            at += seconds * self._factor(run.tick + i) if noise else seconds
            ends.append(at)

    def _factor(self, tick: int) -> float:
        at = tick - self._first
        if at >= len(self._factors):
            keep = max(0, at - DRAWN)  # steps that were worked out in vain are worked out again
            self._factors = self._factors[keep:] + factors(self._rng, self._noise, DRAWN).tolist()
            self._first += keep
            at -= keep
        return self._factors[at]
