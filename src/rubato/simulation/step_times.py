"""Computes how long simulated steps take: the end times of a run's steps, all at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, islice
from math import ceil, inf
from typing import cast

from rubato.core.interfaces import LatencyModel, Line
from rubato.engines.simulated import step_noise
from rubato.replica.step_log import StepRun

FACTORS_AT_ONCE = 1024  # step-time factors drawn at a time

Seconds = Callable[[int, int, int, int, int, int, int], float]  # `LatencyModel.seconds_of`


class StepTimes:
    """Gives the times of steps, in the order run: a model's step times multiplied by the factors of
    `engines.simulated.step_noise`.
    """

    def __init__(self, truth: LatencyModel, noise: step_noise.Noise, seed: int) -> None:
        self._seconds: Seconds = truth.seconds_of
        self._step_time = truth.step_time
        self._line = None if truth.line(1, 1) is None else cast(Callable[[int, int], Line], truth.line)
        self._noise = step_noise.factors(noise, seed)
        self._factors: list[float] = []
        self._first = 0  # the step whose factor is first in the list

    def take(self, run: StepRun, steps: int) -> None:
        """Gives the run `steps` steps, and sets the end of each in its `ends`."""
        run.steps = steps
        seconds, n, kv = self._seconds, run.seqs, run.kv
        if self._line is not None and steps > 1 and not run.chunks and self._noise is None:
            run.ends = _ends_on_line(self._line, n, kv, steps, run.begin)
            return
        if run.chunks:
            took = self._with_chunks(run, steps, seconds)
        elif steps == 1:
            took = [seconds(n, n, kv + n, 0, 0, 0, 0)]
        elif self._line is None:
            took = [seconds(n, n, at, 0, 0, 0, 0) for at in range(kv + n, kv + n * (steps + 1), n)]
        else:
            took = _seconds_on_line(self._line, n, kv, steps)
        if self._noise is not None:
            took = [seconds * self.factor(run.tick + i) for i, seconds in enumerate(took)]
        took[0] += run.begin
        run.ends = list(accumulate(took))

    def _with_chunks(self, run: StepRun, steps: int, seconds: Seconds) -> list[float]:
        """Returns the seconds of steps with several chunks.

        From step to step only three sums of a shape change, each by a constant; the last chunk may be smaller.
        """
        if len(run.chunks) == 1:
            return self._with_one_chunk(run, steps, seconds)
        first = run.shape(0)
        if steps == 1:
            return [self._step_time(first)]
        tokens, seqs, kv, context, square, _, chunks, chunk_kv, _ = first
        in_chunks = tokens - (seqs - chunks)
        took = []
        for _ in range(steps - 1):
            took.append(seconds(tokens, seqs, kv, context, square, chunks, chunk_kv))
            kv += tokens
            context += square
            chunk_kv += in_chunks
        took.append(self._step_time(run.shape(steps - 1)))
        return took

    def _with_one_chunk(self, run: StepRun, steps: int, seconds: Seconds) -> list[float]:
        """Returns the seconds of steps with one chunk, as most runs with chunks have."""
        n, (_, cached, tokens, total) = run.seqs, run.chunks[0]
        kv, remaining, took = run.kv, total, []
        for _ in range(steps):
            here = tokens if tokens < remaining else remaining
            kv += n
            upto = cached + here
            if here > 1:
                took.append(seconds(n + here, n + 1, kv + upto, here * cached, here * here, 1, upto))
            else:
                took.append(seconds(n + here, n + 1, kv + upto, 0, 0, 0, 0))
            cached = upto
            remaining -= here
        return took

    def factor(self, tick: int) -> float:
        """Returns what the time of this step is multiplied by; no step much earlier is asked for again."""
        if self._noise is None:
            return 1.0
        at = tick - self._first
        if at >= len(self._factors):
            keep = max(0, at - FACTORS_AT_ONCE)  # steps that were worked out in vain are worked out again
            self._factors = self._factors[keep:] + list(islice(self._noise, FACTORS_AT_ONCE))
            self._first += keep
            at -= keep
        return self._factors[at]


def _seconds_on_line(line: Callable[[int, int], Line], n: int, kv: int, steps: int) -> list[float]:
    """Returns the seconds of steps of `n` decodes alone that together have `kv` tokens in KV before the first."""
    took: list[float] = []
    kv += n
    while steps:
        fixed, y, slope, x, until = line(n, kv)
        here = steps if until == inf else min(steps, max(1, ceil((until - kv) / n)))
        took += [fixed + (y + slope * more) for more in range(kv - x, kv - x + here * n, n)]
        kv += here * n
        steps -= here
    return took


def _ends_on_line(line: Callable[[int, int], Line], n: int, kv: int, steps: int, end: float) -> list[float]:
    """Returns when each of these steps ends, the first begun at `end`: `_seconds_on_line` and their sums in one go."""
    kv += n
    fixed, y, slope, x, until = line(n, kv)
    if kv + (steps - 1) * n < until:
        return [end := end + (fixed + (y + slope * more)) for more in range(kv - x, kv - x + steps * n, n)]
    took = _seconds_on_line(line, n, kv - n, steps)
    took[0] += end
    return list(accumulate(took))
