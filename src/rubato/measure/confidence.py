"""Confidence intervals for attainment: Wilson's for one proportion, a moving-block bootstrap for that and differences.

Requests that arrive close together share one server queue, so their outcomes are not independent: when the queue is
long, all of them miss. Resampling single requests would give intervals that are too narrow. The bootstrap therefore
resamples blocks of arrival time with all the requests in them, in every run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import cos, inf, isinf, pi, sin, sqrt, tan
from statistics import NormalDist

import numpy as np

LEVEL = 0.95  # of every interval


def wilson(met: int, offered: int) -> tuple[float, float]:
    """Wilson's score interval for the proportion met/offered, in [0, 1]; (0, 1) when nothing was offered.

    It takes requests as independent; see the module's text on why the true interval of one run is wider.
    """
    if not 0 <= met <= offered:
        raise ValueError(f"{met} met of {offered} offered: give 0 <= met <= offered")
    if offered == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    p = met / offered
    centre = p + z * z / (2 * offered)
    half = z * sqrt(p * (1 - p) / offered + z * z / (4 * offered * offered))
    scale = 1 + z * z / offered
    low = 0.0 if met == 0 else (centre - half) / scale
    high = 1.0 if met == offered else (centre + half) / scale
    return low, high


def student_t(degrees: int) -> float:
    """Student's t quantile: t lies within ± this with probability `LEVEL`, for so many degrees of freedom."""
    low, high = 0.0, pi / 2  # of atan(t / sqrt(degrees)), in which the distribution has a finite sum
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _student_within(middle, degrees) < LEVEL else (low, middle)
    return tan(high) * sqrt(degrees)


def _student_within(angle: float, degrees: int) -> float:
    """The probability that |t| is below tan(angle) * sqrt(degrees) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    total, term = 0.0, cos(angle) if odd else 1.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cos(angle) ** 2 * (k - 1) / k
    return (angle + sin(angle) * total) * 2 / pi if odd else sin(angle) * total


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of one request of one run.

    Args:
        workload: its workload's name.
        at: its arrival, seconds from the start.
    """

    workload: str
    at: float
    tier: str
    met: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """a against b. difference = attainment a - attainment b; ratio = requests met per second, a / b (inf when b met
    none, None when neither met any; for the same workload that is met a / met b)."""

    offered_a: int
    offered_b: int
    met_a: int
    met_b: int
    difference: float
    difference_low: float
    difference_high: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None

    @property
    def estimate(self) -> Estimate:
        """Returns the estimate of `difference`."""
        return Estimate(self.difference, self.difference_low, self.difference_high)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval; infinite ends where nothing bounds it."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Makes an estimate without spread: of a count, or a value in virtual time that no seed changes."""
        return cls(value, value, value)

    def interval(self, shown: Callable[[float], str]) -> str:
        """Formats the interval for a table; one seed has none.

        Args:
            shown: formats one end of the interval.
        """
        return "(one seed)" if isinf(self.high) else f"[{shown(self.low)}, {shown(self.high)}]"

    def shown(self, form: str = ".2f") -> str:
        """Formats the number and its interval for a table, as `1.68 [1.57, 1.80]`.

        Args:
            form: the format of each number.
        """
        return f"{self.value:{form}} {self.interval(lambda end: f'{end:{form}}')}"

    def exp(self) -> Estimate:
        """Returns the estimate of the number whose logarithm this is."""
        with np.errstate(over="ignore"):
            return Estimate(*(float(np.exp(end)) for end in (self.value, self.low, self.high)))


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed, with Student's t interval; without bounds from fewer than two seeds."""
    if not values:
        raise ValueError("no seed, no estimate: give one value or more")
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return Estimate(mean, -inf, inf)
    half = student_t(n - 1) * float(np.std(values, ddof=1)) / sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def attainment_over_seeds(met: Sequence[int], offered: Sequence[int]) -> Estimate:
    """The mean over seeds of met / offered, each seed one observation; on each side at least as wide as Wilson's
    interval of all requests pooled, which holds where every seed gave the same (all met). Within [0, 1]."""
    mean = over_seeds([m / n for m, n in zip(met, offered, strict=True)])
    low, high = wilson(sum(met), sum(offered))
    return Estimate(mean.value, max(0.0, min(low, mean.low)), min(1.0, max(high, mean.high)))


ALL = "all"
ONE_SEED = "one seed has no interval: give several (--seeds 0,1,2)"
DEFAULT_BLOCKS = 12  # by default a twelfth of the time is resampled together,
MIN_BLOCK_S = 5.0  # but at least so many seconds


def default_block(durations: Mapping[str, float]) -> float:
    """Seconds of arrival time to resample together, for workloads that offer requests over `durations` seconds.

    Blocks should outlast a spell of congestion. With spells of about 8 s, twelve blocks covered a planted difference in
    86 % of trials of 60 s, 91 % of 120 s and 93-95 % of 300 s and more; thirty blocks in 80, 86 and 91-93 %.
    """
    return max(MIN_BLOCK_S, sum(durations.values()) / DEFAULT_BLOCKS)


def proportion(
    outcomes: Sequence[RequestOutcome], durations: Mapping[str, float], *, resamples: int = 2000
) -> tuple[float, float]:
    """An interval for met / offered in [0, 1]: the wider, on each side, of Wilson's and a moving-block bootstrap's.

    Where all or none were met, or in a calm run, resampling finds no spread and Wilson's holds; where misses come in
    spells it is the bootstrap's. durations as in `paired`. (0, 1) when nothing was offered.
    """
    low, high = wilson(sum(outcome.met for outcome in outcomes), len(outcomes))
    if not outcomes:
        return low, high
    blocks = _Blocks([(f.workload, f.at) for f in outcomes], durations, default_block(durations), resamples)
    weights = blocks.resampled(np.ones(len(outcomes)))
    met = blocks.resampled(np.array([outcome.met for outcome in outcomes], dtype=np.float64))
    tail = _tail(blocks.count)
    below, above = (float(q) for q in np.quantile(met[weights > 0] / weights[weights > 0], [tail, 1 - tail]))
    return min(low, below), max(high, above)


def paired(
    a: Sequence[RequestOutcome],
    met_b: Sequence[bool],
    durations: Mapping[str, float],
    *,
    block: float = MIN_BLOCK_S,
    resamples: int = 5000,
) -> dict[str, Difference]:
    """Computes differences per tier and over "all", with expanded percentile intervals of a moving-block bootstrap.
    Rounds of one workload lie on top of each other on its time axis, since they repeat the same requests; different
    workloads follow one another; the axis is closed to a ring, so that every moment is equally likely to be drawn.

    Args:
        met_b: whether b met each of the same requests.
        durations: seconds over which each workload offers requests.
        block: length of a block, in seconds of arrival time.

    Raises:
        ValueError: there are no requests.
    """
    if not a:
        raise ValueError("nothing to compare: no request is in both runs")
    one = _side(a, durations, block, resamples)
    other = replace(one, met=np.array(met_b, dtype=np.float64))
    return {tier: _difference(one, other, tier) for tier in one.masks}


def unpaired(
    a: Sequence[RequestOutcome],
    b: Sequence[RequestOutcome],
    durations_a: Mapping[str, float],
    durations_b: Mapping[str, float],
    seconds: tuple[float, float],
    *,
    resamples: int = 5000,
) -> dict[str, Difference]:
    """Computes the same as `paired` for runs of different requests: each side is resampled by itself, in blocks of
    `default_block`. Only tiers that both sides have are compared.

    Args:
        seconds: how long each side offered requests, all its rounds together.

    Raises:
        ValueError: a side is empty, or the two share no tier.
    """
    if not a or not b:
        raise ValueError("nothing to compare: a run has no requests")
    one = _side(a, durations_a, default_block(durations_a), resamples, seconds[0])
    other = _side(b, durations_b, default_block(durations_b), resamples, seconds[1], seed=1)
    shared = [tier for tier in one.masks if tier in other.masks]
    if shared == [ALL]:
        raise ValueError(f"the runs share no tier: {', '.join(one.masks)} against {', '.join(other.masks)}")
    return {tier: _difference(one, other, tier) for tier in shared}


class _Blocks:
    """Resamples of arrival time by moving blocks on a ring: sums over what lies in them."""

    def __init__(
        self,
        places: Sequence[tuple[str, float]],
        durations: Mapping[str, float],
        block: float,
        resamples: int,
        seed: int = 0,
    ) -> None:
        if block <= 0:
            raise ValueError(f"block is {block} s: give a positive length")
        times, length = _axis(places, durations, block)
        self._order = np.argsort(times, kind="stable")
        times = times[self._order]
        self.count = max(1, round(length / block))
        starts = np.random.default_rng(seed).uniform(0.0, length, size=(resamples, self.count))
        ring = np.concatenate([times, times + length])
        self._low = np.searchsorted(ring, starts, side="left")
        self._high = np.searchsorted(ring, starts + length / self.count, side="left")

    def resampled(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of `values` (one per request, in their order) in each resample."""
        ordered = values[self._order]
        total = np.concatenate([[0.0], np.cumsum(np.concatenate([ordered, ordered]))])
        return np.asarray((total[self._high] - total[self._low]).sum(axis=1), dtype=np.float64)


def _tail(blocks: int) -> float:
    """The quantile to cut off at each end. A percentile interval from few blocks is too narrow, as a normal one with
    an estimated variance is; the expanded percentile interval (Hesterberg, 2015) puts Student's t in its place."""
    if blocks < 2:
        return 0.0
    t = student_t(blocks - 1) * sqrt(blocks / (blocks - 1))
    return NormalDist().cdf(-t)


def _axis(
    places: Sequence[tuple[str, float]], durations: Mapping[str, float], block: float
) -> tuple[np.ndarray, float]:
    """Each request's place on one time axis, and the axis's length; workloads one after another."""
    latest: dict[str, float] = {}
    for name, at in places:
        latest[name] = max(at, latest.get(name, 0.0))
    offsets: dict[str, float] = {}
    length = 0.0
    for name, last in latest.items():
        offsets[name] = length
        length += max(durations[name], last + 1e-9, block)
    return np.array([offsets[name] + at for name, at in places]), length


@dataclass(frozen=True)
class _Side:
    """The requests of one policy.

    Args:
        masks: which requests are of a tier, by tier and for all.
        met: which requests were met, as 0 and 1.
        seconds: how long requests were offered.
    """

    blocks: _Blocks
    masks: Mapping[str, np.ndarray]
    met: np.ndarray
    seconds: float

    def counts(self, tier: str) -> tuple[int, int, np.ndarray, np.ndarray]:
        """Returns the numbers of offered and met requests, in all and in each resample."""
        mask, met = self.masks[tier], self.masks[tier] * self.met
        return int(mask.sum()), int(met.sum()), self.blocks.resampled(mask), self.blocks.resampled(met)


def _side(
    outcomes: Sequence[RequestOutcome], durations: Mapping[str, float], block: float, resamples: int,
    seconds: float = 1.0, seed: int = 0,
) -> _Side:  # fmt: skip
    tiers = np.array([outcome.tier for outcome in outcomes])
    masks = {tier: (tiers == tier).astype(np.float64) for tier in dict.fromkeys(outcome.tier for outcome in outcomes)}
    blocks = _Blocks([(outcome.workload, outcome.at) for outcome in outcomes], durations, block, resamples, seed)
    met = np.array([outcome.met for outcome in outcomes], dtype=np.float64)
    return _Side(blocks, masks | {ALL: np.ones(len(outcomes))}, met, seconds)


def _difference(a: _Side, b: _Side, tier: str) -> Difference:
    tail = _tail(min(a.blocks.count, b.blocks.count))
    offered_a, met_a, weights_a, met_weights_a = a.counts(tier)
    offered_b, met_b, weights_b, met_weights_b = b.counts(tier)
    some = (weights_a > 0) & (weights_b > 0)  # a rare tier can be absent from a resample
    differences = met_weights_a[some] / weights_a[some] - met_weights_b[some] / weights_b[some]
    low, high = np.quantile(differences, [tail, 1 - tail]) if some.any() else (-1.0, 1.0)
    ratio = ratio_low = ratio_high = None
    if met_a or met_b:
        scale = b.seconds / a.seconds if a.seconds else 1.0
        ratio = scale * met_a / met_b if met_b else inf
        defined = (met_weights_a > 0) | (met_weights_b > 0)
        with np.errstate(divide="ignore"):
            ratios = scale * met_weights_a[defined] / met_weights_b[defined]
        # "inverted_cdf": a quantile that is one of the values, as interpolation between infinities is not a number
        ratio_low, ratio_high = (float(q) for q in np.quantile(ratios, [tail, 1 - tail], method="inverted_cdf"))
    difference = met_a / offered_a - met_b / offered_b
    return Difference(
        offered_a, offered_b, met_a, met_b, difference, float(low), float(high), ratio, ratio_low, ratio_high
    )  # fmt: skip
