"""The rate at which 90 % is attained, from attainment at a few rates; for `vllm_plugin.py`, of numbers alone.

Attainment is taken to fall with the rate (the closest values that do, by pooling neighbours), and to fall on a line
between two rates that were measured. Intervals are of a bootstrap over seeds, and within each seed over moving blocks
of requests that follow one another, since neighbours share a queue. All contenders and rates are resampled alike: they
were given the same requests, and what made these hard is in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from rubato.latency.least_squares import isotonic
from rubato.measure.confidence import DEFAULT_BLOCKS, LEVEL

HOLDS = 0.9  # attainment at which a rate is held
WIDEN = 1.5  # factor from one rate that is tried to the next, until one is held and one is not
CLOSE = 1.1  # how far apart, as a factor, these two may stay
TRIES = 7

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Capacity:
    """Requests/s, or a ratio of two such. bound: "" where it lies within the rates measured; "at least", "at most"
    where it is their end; "unknown" for a ratio of two such ends. Ends of the interval lie within those rates too."""

    value: float
    low: float
    high: float
    bound: str = ""


def crossing(rates: Sequence[float], attained: Sequence[float] | Array) -> tuple[float, str]:
    """The rate at which HOLDS is attained, and how to read it (`Capacity.bound`). rates: ascending."""
    falling = -isotonic(-np.asarray(attained, dtype=np.float64))
    if falling[0] < HOLDS:
        return rates[0], "at most"
    if falling[-1] >= HOLDS:
        return rates[-1], "at least"
    i = int(np.flatnonzero(falling >= HOLDS)[-1])
    part = float((falling[i] - HOLDS) / (falling[i] - falling[i + 1]))
    return rates[i] + part * (rates[i + 1] - rates[i]), ""


def next_rate(tries: Mapping[float, float], start: float) -> float | None:
    """The rate to try after these (rate -> attainment): up or down from `start` until one is held and one is not, then
    half way between the two. None when they are close, or tries are used up."""
    if not tries:
        return start
    if len(tries) >= TRIES:
        return None
    failed = [rate for rate, attained in tries.items() if attained < HOLDS]
    if not failed:
        return max(tries) * WIDEN
    high = min(failed)
    held = [rate for rate in tries if rate < high]
    if not held:
        return high / WIDEN
    low = max(held)
    return None if high / low <= CLOSE else sqrt(low * high)


def ratio_bound(ours: str, theirs: str) -> str:
    """How to read a ratio of two capacities with these bounds."""
    inverse = {"at least": "at most", "at most": "at least"}
    said = {ours, inverse.get(theirs, "")} - {""}
    return "unknown" if len(said) > 1 else "".join(said)


Met = Mapping[float, Sequence[Sequence[bool]]]  # rate -> seed -> request, in order of arrival -> was it met?


def capacities(
    met: Mapping[str, Met], stock: Sequence[str], resamples: int = 2000
) -> tuple[dict[str, Capacity], dict[str, Capacity]]:
    """Each contender's capacity, and its ratio to that of the best of `stock` (in each resample, the best there).

    All have the same rates, seeds and numbers of requests.
    """
    draws = _Draws(next(iter(met.values())), resamples)
    rates = sorted(draws.rates)
    point = {name: crossing(rates, [float(np.mean(runs[rate])) for rate in rates]) for name, runs in met.items()}
    drawn = {name: _resampled(rates, np.stack([draws.attained(runs[r]) for r in rates])) for name, runs in met.items()}
    best = max(stock, key=lambda name: point[name][0])
    best_drawn: Array = np.max([drawn[name] for name in stock], axis=0)
    own = {name: Capacity(value, *_interval(drawn[name]), bound) for name, (value, bound) in point.items()}
    ratios = {
        name: Capacity(
            value / point[best][0], *_interval(drawn[name] / best_drawn), ratio_bound(bound, point[best][1])
        )
        for name, (value, bound) in point.items()
    }  # fmt: skip
    return own, ratios


def _resampled(rates: Sequence[float], attained: Array) -> Array:
    """The capacity in each resample. attained: by rate, by resample."""
    return np.array([crossing(rates, column)[0] for column in attained.T])


def _interval(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


class _Draws:
    """Which seeds, and which blocks of requests of each, make up each resample; blocks lie on a ring."""

    def __init__(self, runs: Met, resamples: int) -> None:
        self.rates = list(runs)
        first = runs[self.rates[0]]
        self.seeds, self.requests = len(first), len(first[0])
        self.length = ceil(self.requests / DEFAULT_BLOCKS)
        rng = np.random.default_rng(0)
        self._seed = rng.integers(self.seeds, size=(resamples, self.seeds))
        self._start = rng.integers(self.requests, size=(resamples, self.seeds, ceil(self.requests / self.length)))

    def attained(self, runs: Sequence[Sequence[bool]]) -> Array:
        """The share that was met in each resample."""
        ring = np.tile(np.array(runs, dtype=np.float64), 2)
        total = np.concatenate([np.zeros((self.seeds, 1)), np.cumsum(ring, axis=1)], axis=1)
        seed = self._seed[:, :, None]
        blocks = total[seed, self._start + self.length] - total[seed, self._start]
        shares: Array = blocks.mean(axis=(1, 2)) / self.length
        return shares
