"""Confidence intervals for attainment: Wilson's for one proportion, a moving-block bootstrap for paired differences.

Requests that arrive close together share one server queue, so their outcomes are not independent: when the queue is
long, all of them miss. Resampling single requests would give intervals that are too narrow. The bootstrap therefore
resamples blocks of arrival time with all the requests in them, in every run at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import numpy as np
from scipy.special import stdtrit


def wilson(met: int, offered: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for the proportion met/offered, in [0, 1]; (0, 1) when nothing was offered.

    It takes requests as independent; see the module's text on why the true interval of one run is wider.
    """
    if not 0 <= met <= offered:
        raise ValueError(f"{met} met of {offered} offered: give 0 <= met <= offered")
    if offered == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p = met / offered
    centre = p + z * z / (2 * offered)
    half = z * sqrt(p * (1 - p) / offered + z * z / (4 * offered * offered))
    scale = 1 + z * z / offered
    low = 0.0 if met == 0 else (centre - half) / scale
    high = 1.0 if met == offered else (centre + half) / scale
    return low, high


@dataclass(frozen=True, slots=True)
class Pair:
    """One request under both policies, in one round. workload: which one it belongs to; at: seconds from its start."""

    workload: str
    at: float
    tier: str
    met_a: bool
    met_b: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """a against b over `pairs` requests. difference = attainment a - attainment b; ratio = met a / met b (inf when b
    met none, None when neither met any). Intervals at the level asked for."""

    pairs: int
    met_a: int
    met_b: int
    difference: float
    difference_low: float
    difference_high: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None


ALL = "all"


def paired(
    pairs: Sequence[Pair],
    durations: Mapping[str, float],
    *,
    block: float = 5.0,
    resamples: int = 5000,
    seed: int = 0,
    level: float = 0.95,
) -> dict[str, Difference]:
    """Differences per tier and over "all", with expanded percentile intervals of a moving-block bootstrap.

    durations: seconds over which each workload offers requests. block: seconds of arrival time. Rounds of one workload
    lie on top of each other on its time axis, since they repeat the same requests; different workloads follow one
    another; the axis is closed to a ring, so that every moment is equally likely to be drawn. Raises ValueError when
    there are no pairs.
    """
    if not pairs:
        raise ValueError("nothing to compare: no request is in both runs")
    if block <= 0:
        raise ValueError(f"block is {block} s: give a positive length")
    times, length = _axis(pairs, durations, block)
    order = np.argsort(times, kind="stable")
    times = times[order]
    blocks = max(1, round(length / block))
    starts = np.random.default_rng(seed).uniform(0.0, length, size=(resamples, blocks))
    ring = np.concatenate([times, times + length])
    low = np.searchsorted(ring, starts, side="left")
    high = np.searchsorted(ring, starts + length / blocks, side="left")
    tiers = np.array([pair.tier for pair in pairs])[order]
    met_a = np.array([pair.met_a for pair in pairs], dtype=np.int64)[order]
    met_b = np.array([pair.met_b for pair in pairs], dtype=np.int64)[order]

    def resampled(values: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0], np.cumsum(np.concatenate([values, values]))])
        return np.asarray((total[high] - total[low]).sum(axis=1), dtype=np.float64)

    result: dict[str, Difference] = {}
    for tier in [*dict.fromkeys(pair.tier for pair in pairs), ALL]:
        mask = np.ones(len(pairs), dtype=np.int64) if tier == ALL else (tiers == tier).astype(np.int64)
        counts = (resampled(mask), resampled(mask * met_a), resampled(mask * met_b))
        totals = (int(mask.sum()), int((mask * met_a).sum()), int((mask * met_b).sum()))
        result[tier] = _difference(totals, counts, _tail(blocks, level))
    return result


def _tail(blocks: int, level: float) -> float:
    """The quantile to cut off at each end. A percentile interval from few blocks is too narrow, as a normal one with
    an estimated variance is; the expanded percentile interval (Hesterberg, 2015) puts Student's t in its place."""
    if blocks < 2:
        return 0.0
    t = float(stdtrit(blocks - 1, 0.5 + level / 2)) * sqrt(blocks / (blocks - 1))
    return NormalDist().cdf(-t)


def _axis(pairs: Sequence[Pair], durations: Mapping[str, float], block: float) -> tuple[np.ndarray, float]:
    """Each pair's place on one time axis, and the axis's length; workloads one after another."""
    offsets: dict[str, float] = {}
    length = 0.0
    for name in dict.fromkeys(pair.workload for pair in pairs):
        offsets[name] = length
        length += max(durations[name], max(pair.at for pair in pairs if pair.workload == name) + 1e-9, block)
    return np.array([offsets[pair.workload] + pair.at for pair in pairs]), length


def _difference(
    totals: tuple[int, int, int], resampled: tuple[np.ndarray, np.ndarray, np.ndarray], tail: float
) -> Difference:
    offered, a, b = totals
    held, got_a, got_b = resampled
    some = held > 0  # a rare tier can be absent from a resample
    differences = (got_a[some] - got_b[some]) / held[some]
    low, high = np.quantile(differences, [tail, 1 - tail])
    ratio = ratio_low = ratio_high = None
    if a or b:
        ratio = a / b if b else inf
        defined = (got_a > 0) | (got_b > 0)
        with np.errstate(divide="ignore"):
            ratios = got_a[defined] / got_b[defined]
        # "inverted_cdf": a quantile that is one of the values, as interpolation between infinities is not a number
        ratio_low, ratio_high = (float(q) for q in np.quantile(ratios, [tail, 1 - tail], method="inverted_cdf"))
    return Difference(offered, a, b, (a - b) / offered, float(low), float(high), ratio, ratio_low, ratio_high)
