"""Distributions of lengths in tokens, each a quantile function: uniform numbers in, tokens out.

One uniform number makes one length, so the lengths of a request depend on nothing but its own two numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rubato.workloads.root import root

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NORMAL = NormalDist()
MAX_SIGMA = 15.0  # sigma, of those tried: cut, such a log-normal is nearly all 1 token or all the cut
_quantiles = np.vectorize(NORMAL.inv_cdf, otypes=[np.float64])


class Lengths(Protocol):
    def at(self, u: Floats) -> Ints:
        """Tokens, 0 or more, at the quantiles `u` in [0, 1); never falling in u."""
        ...

    def scaled(self, factor: float) -> Lengths:
        """The same shape with all lengths times `factor`."""
        ...


def _whole(tokens: Floats) -> Ints:
    rounded: Ints = np.rint(tokens).astype(np.int64)
    return rounded


def normal(u: Floats) -> Floats:
    """Quantiles of the standard normal; those of 0, which have no number, at the smallest number above it."""
    values: Floats = _quantiles(np.maximum(u, sys.float_info.min))
    return values


def mean(lengths: Lengths) -> float:
    """Mean tokens, of the 100,000 midpoints of equal shares."""
    return float(lengths.at((np.arange(100_000) + 0.5) / 100_000).mean())


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"uniform lengths ({self.least}, {self.most}): give 0 <= least <= most")

    def at(self, u: Floats) -> Ints:
        return self.least + (u * (self.most - self.least + 1)).astype(np.int64)

    def scaled(self, factor: float) -> Uniform:
        return Uniform(round(self.least * factor), round(self.most * factor))


def fixed(tokens: int) -> Uniform:
    """The length of every request: `tokens` tokens."""
    return Uniform(tokens, tokens)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal of mean `mu` and deviation `sigma`, cut at `most` (what exceeds it becomes it), at least 1."""

    mu: float
    sigma: float
    most: float = math.inf

    def at(self, u: Floats) -> Ints:
        return _whole(np.clip(np.exp(self.mu + self.sigma * normal(u)), 1.0, self.most))

    def scaled(self, factor: float) -> LogNormal:
        return replace(self, mu=self.mu + math.log(factor), most=self.most * factor)

    def moments(self) -> tuple[float, float]:
        """Mean and deviation after the cut (before rounding), by E[min(X, c)^k] in closed form."""
        first, second = (self._moment(k) for k in (1, 2))
        return first, math.sqrt(max(0.0, second - first * first))

    def _moment(self, k: int) -> float:
        below = math.exp(k * self.mu + (k * self.sigma) ** 2 / 2)
        if self.most == math.inf:
            return below
        z = (math.log(self.most) - self.mu) / self.sigma
        return float(below * NORMAL.cdf(z - k * self.sigma) + self.most**k * NORMAL.cdf(-z))


@cache
def log_normal(mean: float, std: float, p99: float = math.inf) -> LogNormal:
    """The log-normal that has this mean and deviation *after* being cut at `p99`.

    Papers report mean, P99 and deviation; a log-normal has two parameters. The one of the same mean and deviation
    before the cut loses up to 4 % of the mean and 25 % of the deviation to it, so both are solved for after it. P99 is
    then the cut wherever more than one in a hundred reach it, and less where the paper's tail is heavier than a
    log-normal's. Raises ValueError when there is none.
    """
    if not (0.0 < mean < p99 and std > 0.0):
        raise ValueError(f"log-normal lengths of mean {mean}, deviation {std}, P99 {p99}: give 0 < mean < P99, std > 0")
    sigma = math.sqrt(math.log1p((std / mean) ** 2))
    plain = LogNormal(math.log(mean) - sigma * sigma / 2, sigma, p99)
    if p99 == math.inf:
        return plain

    def of_mean(sigma: float) -> LogNormal:
        """The cut log-normal of this mean: it rises with mu."""

        def off(mu: float) -> float:
            return LogNormal(mu, sigma, p99).moments()[0] / mean - 1.0

        top = math.log(p99)
        while off(top) < 0.0:
            top += sigma
        return LogNormal(root(off, math.log(mean) - sigma * sigma, top, 1e-13), sigma, p99)

    # of two such the one of larger sigma has the larger deviation: their quantile functions cross once
    def off(sigma: float) -> float:
        return of_mean(sigma).moments()[1] / std - 1.0

    if off(MAX_SIGMA) < 0.0:
        raise ValueError(f"no log-normal cut at {p99} has mean {mean} and deviation {std}: give a smaller deviation")
    return of_mean(root(off, sigma / 2, MAX_SIGMA, 1e-13))


def log_normal_p99(mean: float, p99: float) -> LogNormal:
    """The log-normal of this mean and P99, not cut: sigma is the smaller root of sigma^2/2 - z*sigma + ln(p99/mean).

    Raises ValueError for a P99 below the mean or beyond exp(z^2/2) = 15 times it, which no log-normal has.
    """
    z = NORMAL.inv_cdf(0.99)
    if not 0.0 < mean < p99 < mean * math.exp(z * z / 2):
        raise ValueError(f"no log-normal has mean {mean} and P99 {p99}: give a P99 of 1 to 15 times the mean")
    sigma = z - math.sqrt(z * z - 2.0 * math.log(p99 / mean))
    return LogNormal(math.log(mean) - sigma * sigma / 2, sigma)


def log_normal_p90(median: float, p90: float, most: float = math.inf) -> LogNormal:
    """The log-normal of this median and P90, cut at `most`. Raises ValueError unless 0 < median < P90 <= most."""
    if not 0.0 < median < p90 <= most:
        raise ValueError(f"log-normal lengths of median {median}, P90 {p90}, at most {most}: give these ascending")
    return LogNormal(math.log(median), math.log(p90 / median) / NORMAL.inv_cdf(0.9), most)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Linear between reported percentiles and from 1 token at 0 up to the first; the last for all beyond it (ours)."""

    shares: tuple[float, ...]  # ascending, in (0, 1)
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(np.diff(self.shares) > 0) and all(np.diff(self.tokens) >= 0)
        if len(self.shares) != len(self.tokens) or not self.shares or not rising:
            raise ValueError(f"percentiles {self.shares} of {self.tokens} tokens: give as many of each, both ascending")

    def at(self, u: Floats) -> Ints:
        least = min(1.0, self.tokens[0])
        return _whole(np.interp(u, (0.0, *self.shares), (least, *self.tokens)))

    def scaled(self, factor: float) -> Percentiles:
        return replace(self, tokens=tuple(max(1.0, t * factor) for t in self.tokens))


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal rounded to whole numbers and kept within `least` and `most`: for counts, such as rounds of a tool."""

    mean: float
    std: float
    least: int = 0
    most: int = 1_000_000

    def at(self, u: Floats) -> Ints:
        return _whole(np.clip(self.mean + self.std * normal(u), self.least, self.most))

    def scaled(self, factor: float) -> Normal:
        return Normal(self.mean * factor, self.std * factor, round(self.least * factor), round(self.most * factor))


def of(lengths: Lengths | Sequence[int]) -> Lengths:
    """A pair of tokens is a uniform range."""
    return Uniform(int(lengths[0]), int(lengths[1])) if isinstance(lengths, Sequence) else lengths
