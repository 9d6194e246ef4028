"""Distributions of lengths have the figures they are made from."""

import numpy as np
import pytest

from rubato.core.request import SLO
from rubato.workloads.lengths import (
    LogNormal,
    Normal,
    Percentiles,
    Uniform,
    fixed,
    log_normal,
    log_normal_p99,
    mean,
    of,
)
from rubato.workloads.request_kinds import Kind, within

U = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize(("m", "std", "p99"), [(763, 424, 1591), (847, 617, 2010), (4693, 1442, 7297), (26, 47, 232)])
def test_a_cut_log_normal_keeps_mean_and_deviation(m, std, p99):
    drawn = log_normal(m, std, p99).at(U)
    assert drawn.mean() == pytest.approx(m, rel=0.005)
    assert drawn.std() == pytest.approx(std, rel=0.01)
    assert np.quantile(drawn, 0.99) == drawn.max() == p99


def test_cutting_without_correcting_would_shift_the_mean():
    naive = LogNormal(log_normal(847, 617).mu, log_normal(847, 617).sigma, 2010)
    assert naive.at(U).mean() == pytest.approx(847 * 0.958, rel=0.003)


def test_a_log_normal_by_mean_and_p99():
    drawn = log_normal_p99(200, 1500).at(U)
    assert drawn.mean() == pytest.approx(200, rel=0.01)
    assert np.quantile(drawn, 0.99) == pytest.approx(1500, rel=0.01)
    assert log_normal_p99(200, 1500).moments()[0] == pytest.approx(200)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: log_normal_p99(200, 3100), "P99 of 1 to 15 times"),
        (lambda: log_normal_p99(200, 150), "P99 of 1 to 15 times"),
        (lambda: log_normal(200, 50, 150), "0 < mean < P99"),
        (lambda: log_normal(200, 0.0), "std > 0"),
        (lambda: log_normal(100, 500, 150), "smaller deviation"),
        (lambda: Uniform(5, 3), "0 <= least <= most"),
        (lambda: Percentiles((0.5, 0.25), (1, 2)), "both ascending"),
        (lambda: Percentiles((0.5,), (1, 2)), "as many of each"),
    ],
)
def test_impossible_figures_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_percentiles_are_met_and_lines_between_them():
    table = Percentiles((0.25, 0.5, 0.99), (100.0, 200.0, 690.0))
    assert table.at(np.array([0.0, 0.125, 0.25, 0.375, 0.5, 0.745, 0.99, 0.999])).tolist() == [
        1, 50, 100, 150, 200, 445, 690, 690,
    ]  # fmt: skip


def test_uniform_takes_both_ends_evenly():
    assert np.bincount(Uniform(3, 6).at(U))[3:].tolist() == [5000] * 4
    assert set(fixed(7).at(U)) == {7}
    assert of((3, 6)) == Uniform(3, 6)
    assert mean(Uniform(1, 8192)) == pytest.approx(4096.5, rel=1e-3)


def test_counts_are_whole_and_within_bounds():
    rounds = Normal(1.7, 1.1, most=8).at(U)
    assert rounds.min() == 0
    assert rounds.max() <= 8
    assert rounds.mean() == pytest.approx(1.7, abs=0.05)
    assert rounds.std() == pytest.approx(1.1, abs=0.05)


@pytest.mark.parametrize(
    "lengths", [Uniform(10, 90), log_normal(300, 200, 900), Percentiles((0.5, 0.9), (50.0, 200.0))]
)
def test_scaled_lengths_are_so_many_times_as_long(lengths):
    assert mean(lengths.scaled(3.0)) == pytest.approx(3 * mean(lengths), rel=0.02)
    assert (np.diff(lengths.at(U)) >= 0).all()


def test_outputs_cut_to_a_context_keep_their_mean():
    kind = Kind("summary", SLO(), log_normal(1333, 444, 1946), log_normal(202, 234, 1508))
    rng = np.random.default_rng(1)
    u = rng.random((100_000, 2))
    room = 2048 - of(kind.prompt).at(u[:, 0])
    assert np.minimum(of(kind.output).at(u[:, 1]), room).mean() == pytest.approx(0.82 * 202, rel=0.02)
    assert np.minimum(of(within(kind, 2048).output).at(u[:, 1]), room).mean() == pytest.approx(202, rel=0.02)
    assert within(kind, 8192) is kind
    with pytest.raises(ValueError, match="no room in 300"):
        within(kind, 300)
