"""Intervals: Wilson against published values, the paired block bootstrap against planted differences."""

from math import inf
from typing import NamedTuple

import numpy as np
import pytest

from rubato.measure.confidence import Difference, RequestOutcome, paired, proportion, unpaired, wilson


@pytest.mark.parametrize(
    ("met", "offered", "low", "high"),
    [  # Newcombe (1998), table I, method 3 (score), four decimals
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 1 - 0.1611, 1.0),
    ],
)
def test_wilson_gives_the_published_intervals(met, offered, low, high):
    assert wilson(met, offered) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_wilson_knows_nothing_of_nothing_and_refuses_nonsense():
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 met of 2"):
        wilson(3, 2)


class Pair(NamedTuple):
    """One request under both policies."""

    workload: str
    at: float
    tier: str
    met_a: bool
    met_b: bool


def one(at, a, b, tier="t", workload="w"):
    return Pair(workload, at, tier, bool(a), bool(b))


def contrast(pairs, durations, **how) -> dict[str, Difference]:
    return paired([RequestOutcome(*pair[:4]) for pair in pairs], [pair.met_b for pair in pairs], durations, **how)


def test_a_difference_without_noise_has_an_interval_without_width():
    pairs = [one(i / 2, i % 4 != 0, i % 4 == 1) for i in range(240)]  # each 5 s block: hardly any variation
    result = contrast(pairs, {"w": 120.0}, block=10.0)["all"]
    assert (result.offered_a, result.met_a, result.met_b) == (240, 180, 60)
    assert (result.difference, result.ratio) == (0.5, 3.0)
    assert result.difference_low == pytest.approx(0.5, abs=0.02)
    assert result.difference_high == pytest.approx(0.5, abs=0.02)


def test_tiers_are_counted_apart_and_together():
    pairs = [one(i, i % 2, 0, "x") for i in range(30)] + [one(i + 0.5, 1, 1, "y") for i in range(30)]
    result = contrast(pairs, {"w": 30.0})
    assert list(result) == ["x", "y", "all"]
    assert (result["x"].difference, result["y"].difference, result["all"].difference) == (0.5, 0.0, 0.25)
    assert (result["y"].difference_low, result["y"].difference_high) == (0.0, 0.0)


def test_ratios_are_infinite_or_absent_when_one_or_both_met_none():
    some = contrast([one(i, 1, 0) for i in range(40)], {"w": 40.0})["all"]
    assert (some.ratio, some.ratio_low, some.ratio_high) == (inf, inf, inf)
    none = contrast([one(i, 0, 0) for i in range(40)], {"w": 40.0})["all"]
    assert (none.ratio, none.ratio_low, none.difference) == (None, None, 0.0)


def test_rounds_of_one_workload_do_not_count_as_new_evidence_about_time():
    rng = np.random.default_rng(0)
    pairs = [one(at, rng.random() < 0.9, rng.random() < 0.5) for at in np.arange(0, 100, 0.5)]
    once = contrast(pairs, {"w": 100.0})["all"]
    same = contrast(pairs * 3, {"w": 100.0})["all"]  # three rounds that came out alike
    assert same.offered_b == 600
    assert (same.difference_low, same.difference_high) == pytest.approx((once.difference_low, once.difference_high))
    others = [Pair(f"w{k}", p.at, p.tier, p.met_a, p.met_b) for k in range(3) for p in pairs]
    apart = contrast(others, {f"w{k}": 100.0 for k in range(3)})["all"]  # three workloads: three times the evidence
    assert apart.difference_high - apart.difference_low < 0.75 * (once.difference_high - once.difference_low)


def congested(rng, seconds=300.0, rate=2.0):
    """Two policies through spells of about 8 s, calm and congested in turn: calm, a meets 95 % and b 90 %; congested,
    70 % and 20 %. Half the time each: the true difference is 0.275."""
    spells = np.cumsum(rng.exponential(8.0, size=400))
    first = int(rng.integers(2))
    for at in np.sort(rng.uniform(0, seconds, size=rng.poisson(rate * seconds))):
        bad = (int(np.searchsorted(spells, at)) + first) % 2
        yield one(at, rng.random() < (0.7 if bad else 0.95), rng.random() < (0.2 if bad else 0.9))


def test_the_block_bootstrap_covers_a_planted_difference_where_single_requests_would_not():
    rng = np.random.default_rng(42)
    covered = alone = 0
    widths = []
    for _ in range(60):
        pairs = list(congested(rng))
        block = contrast(pairs, {"w": 300.0}, block=25.0, resamples=300)["all"]
        single = contrast(pairs, {"w": 300.0}, block=1.0, resamples=300)["all"]
        covered += block.difference_low <= 0.275 <= block.difference_high
        alone += single.difference_low <= 0.275 <= single.difference_high
        widths.append((block.difference_high - block.difference_low) / (single.difference_high - single.difference_low))
    assert covered >= 53
    assert alone < covered
    assert np.median(widths) > 1.2


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="nothing to compare"):
        contrast([], {})
    with pytest.raises(ValueError, match="block is 0"):
        contrast([one(0, 1, 1)], {"w": 1.0}, block=0)


def alone(pairs, side, workload="w"):
    return [RequestOutcome(workload, p.at, p.tier, p.met_a if side == "a" else p.met_b) for p in pairs]


def test_unpaired_runs_cover_a_planted_difference():
    """Two runs of their own congestion: the interval is wider than a paired one and covers as it should."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(60):
        a, b = alone(congested(rng), "a"), alone(congested(rng), "b", "v")
        found = unpaired(a, b, {"w": 300.0}, {"v": 300.0}, (300.0, 300.0), resamples=1000)["all"]
        covered += found.difference_low <= 0.275 <= found.difference_high
    assert covered >= 53


def test_unpaired_ratios_are_of_rates():
    a = [RequestOutcome("w", i / 2, "t", i % 4 != 0) for i in range(120)]  # 90 met in 60 s
    b = [RequestOutcome("v", i / 4, "t", i % 2 == 0) for i in range(120)]  # 60 met in 30 s
    found = unpaired(a, b, {"w": 60.0}, {"v": 30.0}, (60.0, 30.0))["t"]
    assert (found.met_a, found.met_b, found.difference, found.ratio) == (90, 60, 0.25, 0.75)
    with pytest.raises(ValueError, match="share no tier"):
        unpaired(a, [RequestOutcome("v", 0.0, "u", True)], {"w": 60.0}, {"v": 30.0}, (60.0, 30.0))
    with pytest.raises(ValueError, match="no requests"):
        unpaired(a, [], {"w": 60.0}, {}, (60.0, 0.0))


def test_a_proportion_is_no_narrower_than_wilsons_and_covers_where_misses_come_in_spells():
    rng = np.random.default_rng(3)
    covered = by_wilson = 0
    for _ in range(100):
        fates = alone(congested(rng), "b")  # met: 0.55 in the long run
        low, high = proportion(fates, {"w": 300.0}, resamples=1000)
        below, above = wilson(sum(f.met for f in fates), len(fates))
        assert low <= below
        assert high >= above
        covered += low <= 0.55 <= high
        by_wilson += below <= 0.55 <= above
    assert covered >= 88
    assert by_wilson < 75


def test_a_proportion_of_all_or_nothing_is_wilsons():
    assert proportion([], {}) == (0.0, 1.0)
    every = [RequestOutcome("w", float(i), "t", True) for i in range(40)]
    assert proportion(every, {"w": 40.0}) == wilson(40, 40)
