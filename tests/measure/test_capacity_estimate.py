"""Capacity at 90 % from attainment at a few rates (`benchmarks/_capacity_estimate.py`): tables with known answers."""

from __future__ import annotations

import importlib.util
import sys
from math import sqrt
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "_capacity_estimate.py"
SPEC = importlib.util.spec_from_file_location("_capacity_estimate", PATH)
estimate = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = estimate  # a dataclass looks its module up
SPEC.loader.exec_module(estimate)


@pytest.mark.parametrize(
    ("rates", "attained", "rate", "bound"),
    [
        ((1, 2), (1.0, 0.8), 1.5, ""),
        ((1, 2), (0.9, 0.5), 1.0, ""),
        ((1, 2, 4), (1.0, 0.9, 0.4), 2.0, ""),
        ((1, 2, 4), (1.0, 0.92, 0.82), 2.4, ""),
        ((1, 2, 3, 4), (1.0, 0.88, 0.92, 0.5), 3.0, ""),  # the two in the middle are 0.9 each
        ((1, 2, 3), (0.8, 1.0, 0.6), 2 + 0.0 / 0.3, ""),  # 0.9, 0.9, 0.6
        ((1, 2, 3), (0.95, 0.96, 0.91), 3, "at least"),
        ((1, 2, 3), (0.89, 0.5, 0.2), 1, "at most"),
        ((1, 2, 3), (0.85, 0.91, 0.3), 1, "at most"),  # 0.88 at both
        ((1,), (0.9,), 1, "at least"),
        ((1,), (0.1,), 1, "at most"),
    ],
)
def test_where_attainment_crosses_ninety_percent(rates, attained, rate, bound):
    assert estimate.crossing(rates, attained) == (pytest.approx(rate), bound)


@pytest.mark.parametrize(
    ("tries", "rate"),
    [
        ({}, 2.0),
        ({2.0: 1.0}, 3.0),
        ({2.0: 1.0, 3.0: 0.95}, 4.5),
        ({2.0: 0.3}, 2.0 / 1.5),
        ({2.0: 0.3, 1.0: 0.99}, sqrt(2.0)),
        ({2.0: 0.3, 1.0: 0.99, 2.5: 0.95}, sqrt(2.0)),  # a rate held above one that was not says nothing
        ({2.0: 0.3, 1.9: 0.99}, None),
        ({float(rate): 1.0 for rate in range(1, 8)}, None),
    ],
)
def test_the_next_rate_halves_what_is_between_held_and_not(tries, rate):
    found = estimate.next_rate(tries, 2.0)
    assert found == (rate if rate is None else pytest.approx(rate))


def test_the_search_finds_a_capacity():
    tries = {}
    while (rate := estimate.next_rate(tries, 10.0)) is not None:
        tries[rate] = 1.0 if rate < 3.7 else 0.2
    assert 3.7 / 1.1 < estimate.crossing(sorted(tries), [tries[r] for r in sorted(tries)])[0] <= 3.7
    assert len(tries) <= estimate.TRIES


@pytest.mark.parametrize(
    ("ours", "theirs", "bound"),
    [
        ("", "", ""),
        ("at least", "", "at least"),
        ("at most", "", "at most"),
        ("", "at most", "at least"),
        ("", "at least", "at most"),
        ("at least", "at most", "at least"),
        ("at most", "at least", "at most"),
        ("at least", "at least", "unknown"),
        ("at most", "at most", "unknown"),
    ],
)
def test_how_to_read_a_ratio(ours, theirs, bound):
    assert estimate.ratio_bound(ours, theirs) == bound


def every(share, requests=120):
    """So large a share of the requests met, spread as evenly as can be."""
    return [int((i + 1) * share) > int(i * share) for i in range(requests)]


def test_without_spread_the_interval_is_a_point():
    good = {1.0: [every(1.0)] * 3, 2.0: [every(1.0)] * 3, 3.0: [every(0.0)] * 3}
    poor = {1.0: [every(1.0)] * 3, 2.0: [every(0.0)] * 3, 3.0: [every(0.0)] * 3}
    own, ratios = estimate.capacities({"stock": poor, "edf": good}, ["stock"], resamples=50)
    assert own["edf"] == estimate.Capacity(pytest.approx(2.1), pytest.approx(2.1), pytest.approx(2.1))
    assert own["stock"] == estimate.Capacity(pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1))
    assert ratios["edf"] == estimate.Capacity(*[pytest.approx(2.1 / 1.1)] * 3)
    assert ratios["stock"] == estimate.Capacity(1.0, 1.0, 1.0)


def test_the_best_of_stock_is_what_counts():
    def runs(last_held):
        return {r: [every(1.0 if r <= last_held else 0.0)] * 2 for r in (1.0, 2.0, 3.0)}

    met = {"stock": runs(1.0), "stock, 128 tokens": runs(2.0), "edf": runs(3.0)}
    own, ratios = estimate.capacities(met, ["stock", "stock, 128 tokens"], resamples=20)
    assert (own["edf"].value, own["edf"].bound) == (3.0, "at least")
    assert (ratios["edf"].value, ratios["edf"].bound) == (pytest.approx(3.0 / 2.1), "at least")
    assert ratios["stock"].value == pytest.approx(1.1 / 2.1)


def test_seeds_that_differ_and_misses_in_spells_widen_the_interval():
    def width(second):
        met = {"stock": {1.0: [every(1.0)] * 3, 2.0: second}}
        own, _ = estimate.capacities(met, ["stock"], resamples=500)
        return own["stock"].high - own["stock"].low

    even = width([every(0.5)] * 3)
    spells = width([[True] * 60 + [False] * 60] * 3)
    seeds = width([every(0.8), every(0.5), every(0.2)])
    assert even < 0.02
    assert spells > 3 * even
    assert seeds > 3 * even


def test_the_interval_holds_the_truth():
    """Of independent requests and known chances, about as often as it says."""
    rng = np.random.default_rng(5)
    chances = {1.0: 0.98, 2.0: 0.8}
    truth, _ = estimate.crossing([1.0, 2.0], [0.98, 0.8])
    inside = 0
    for _ in range(60):
        met = {"stock": {rate: [list(rng.random(120) < p) for _ in range(3)] for rate, p in chances.items()}}
        own, _ = estimate.capacities(met, ["stock"], resamples=200)
        inside += own["stock"].low <= truth <= own["stock"].high
    assert inside >= 53
