"""Arrival processes have the rate and the burstiness asked for, and more of them begin with the fewer."""

from dataclasses import replace

import numpy as np
import pytest

from rubato.workloads.arrivals import AtOnce, Bursts, Gamma, Piecewise, Poisson, Replay, offered, on_off, parse
from rubato.workloads.scenarios import CHAT_ARRIVALS, CODE_STAND_IN

UNEVEN = Bursts(3.0, 40.0, spread=1.0, hold=20.0)
TOGETHER = Bursts(3.0, 40.0, together=1.25)
PROCESSES = [
    Poisson(), Gamma(3.0), Bursts(6.0, 40.0), UNEVEN, TOGETHER, on_off(10.0, 30.0, 0.2),
    Replay((0.0, 1.0, 1.5, 7.0)), AtOnce(),
]  # fmt: skip


def times(process, rate=2.0, n=20_000, seed=0):
    return process.times(rate, n, np.random.default_rng(seed))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gamma_gaps_have_their_mean_and_variation(cv):
    gaps = np.diff(times(Gamma(cv)))
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_gaps_vary_as_much_as_they_last():
    gaps = np.diff(times(Poisson()))
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert gaps.mean() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("process", PROCESSES, ids=str)
def test_a_longer_run_begins_with_the_shorter_one_and_times_ascend(process):
    assert times(process, n=500)[:100].tolist() == times(process, n=100).tolist()
    assert (np.diff(times(process)) >= 0).all()


def test_bursts_have_their_rate_their_peak_and_their_size():
    at = times(Bursts(6.0, 40.0), n=400_000)
    assert len(at) / at[-1] == pytest.approx(2.0, rel=0.05)
    gaps = np.diff(at)
    assert np.median(gaps) == pytest.approx(np.log(2.0) / 12.0, rel=0.03)  # Poisson at six times the rate
    assert len(at) / (gaps > 2.0).sum() == pytest.approx(40.0 / np.exp(-2.0 * 3.0 / 50.0), rel=0.05)  # most pauses


def test_bursts_are_stretched_with_the_rate():
    assert times(Bursts(6.0, 40.0), rate=4.0).tolist() == (times(Bursts(6.0, 40.0)) / 2.0).tolist()


def test_bursts_are_as_uneven_as_azures_code_trace():
    at = times(Bursts(6.0, 130.0), rate=2.566, n=200_000)
    assert np.diff(at).std() / np.diff(at).mean() == pytest.approx(13.2, rel=0.1)
    for window, spread in ((0.1, 2.5), (1.0, 13.2), (10.0, 71.3), (60.0, 160.5)):
        counts = np.bincount((at / window).astype(int))
        assert counts.var() / counts.mean() == pytest.approx(spread, rel=0.2)


def test_bursts_of_unequal_rates_have_the_mean_rate_and_the_bursts_size():
    at = times(UNEVEN, n=400_000)
    assert len(at) / at[-1] == pytest.approx(2.0, rel=0.05)
    assert times(UNEVEN, rate=4.0).tolist() == (times(UNEVEN) / 2.0).tolist()
    alike = times(Bursts(3.0, 40.0, spread=0.0, hold=20.0), n=400_000)
    assert alike.tolist() == times(Bursts(3.0, 40.0), n=400_000).tolist()

    def unevenness(at):  # of the requests that come within the same second
        counts = np.bincount(at.astype(int))
        low, high = np.quantile(np.repeat(counts, counts), (0.1, 0.9))
        return high / low

    assert unevenness(at) > 1.5 * unevenness(alike)


def test_some_requests_of_bursts_come_at_the_same_moment():
    at = times(TOGETHER, n=400_000)
    assert len(at) / at[-1] == pytest.approx(2.0, rel=0.05)
    assert (np.diff(at) == 0.0).mean() == pytest.approx(1.0 - 1.0 / 1.25, rel=0.02)
    assert len(at) / (np.diff(at) > 2.0).sum() == pytest.approx(40.0 / np.exp(-2.0 / 10.0), rel=0.1)  # most pauses
    near = times(replace(TOGETHER, apart=0.02), n=400_000)
    assert len(near) / near[-1] == pytest.approx(2.0, rel=0.05)
    gaps = np.diff(near)
    assert (gaps == 0.0).sum() == 0
    assert (gaps < 0.02).mean() == pytest.approx(0.2 * (1 - np.exp(-2.0)) + 0.8 * 0.09, rel=0.1)  # at 2/s: 10 ms apart


def test_requests_meet_rates_as_uneven_as_in_azures_code_trace():
    at = times(CODE_STAND_IN, rate=2.567, n=200_000)
    for window, low, high in ((1.0, 1.95, 16.75), (20.0, 0.99, 7.5)):
        counts = np.bincount((at / window).astype(int))
        own = np.quantile(np.repeat(counts, counts), (0.1, 0.97)) / (2.567 * window)
        assert own == pytest.approx([low, high], rel=0.25)
    for window, spread in ((0.01, 1.92), (0.1, 2.5), (1.0, 13.2), (10.0, 71.6), (60.0, 164.0)):
        counts = np.bincount((at / window).astype(int))
        assert counts.var() / counts.mean() == pytest.approx(spread, rel=0.25)


def test_chat_arrivals_have_the_gaps_of_azures_chat_trace_and_code_comes_in_bursts_beside_them():
    """SLOs-Serve, §6: code comes in bursts, conversations do not. The minutes of the chat trace differ from each other,
    a variance of counts of 16 times their mean, and those of its stand-in do not."""
    chat, code = times(CHAT_ARRIVALS, rate=5.53, n=200_000), times(CODE_STAND_IN, rate=2.567, n=200_000)
    assert np.diff(chat).std() / np.diff(chat).mean() == pytest.approx(1.094, rel=0.05)
    spread = {}
    for name, at in (("chat", chat), ("code", code)):
        counts = np.bincount((at / 10.0).astype(int))
        spread[name] = counts.var() / counts.mean()
    assert spread["code"] > 10.0 * spread["chat"]


def test_on_off_keeps_its_seconds_and_its_share():
    at = times(on_off(10.0, 30.0, 0.2))
    assert len(at) / at[-1] == pytest.approx(2.0, rel=0.05)
    busy = (at % 40.0) < 10.0
    assert busy.mean() == pytest.approx(10 / (10 + 0.2 * 30), rel=0.03)
    assert not ((times(on_off(10.0, 30.0), rate=5.0) % 40.0) > 10.0 + 1e-6).any()


def test_a_rate_that_changes_by_pieces():
    at = times(Piecewise((0.0, 60.0, 90.0), (1.0, 5.0, 2.0), 360.0), rate=4.0, n=200_000)
    assert len(at) / at[-1] == pytest.approx(4.0, rel=0.01)
    counts = np.histogram(at % 360.0, [0, 60, 90, 360])[0] / [60, 30, 270]
    assert counts / counts[0] == pytest.approx([1.0, 5.0, 2.0], rel=0.03)


def test_a_replay_is_stretched_by_one_factor_and_begins_again():
    trace = Replay((5.0, 6.0, 6.5, 11.0))  # 3 gaps in 6 s: 0.5 requests/s, and a mean gap of 2 s before it repeats
    assert trace.rate == 0.5
    assert times(trace, rate=0.5, n=6).tolist() == [0.0, 1.0, 1.5, 6.0, 8.0, 9.0]
    assert times(trace, rate=2.0, n=6).tolist() == [0.0, 0.25, 0.375, 1.5, 2.0, 2.25]
    later = trace.beginning_at(2)
    assert later.rate == pytest.approx(3 / 7.5)
    assert np.diff(later.seconds).tolist() == [4.5, 2.0, 1.0]
    assert trace.beginning_at(0) == trace


@pytest.mark.parametrize(
    "words",
    [
        "poisson",
        "gamma:cv=3",
        "bursts:peak=6,size=130",
        "bursts:peak=3,size=150,spread=1,hold=20,together=1.4,apart=0.007",
        "piecewise:0=1,60=3,90=1,360=0",
        "at-once",
    ],
)
def test_words_and_processes_are_each_others(words):
    assert str(parse(words)) == words


def test_on_off_in_words():
    assert parse("on-off:on=10,off=50,quiet=0.1") == Piecewise((0.0, 10.0), (1.0, 0.1), 60.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("weibull", "give poisson, gamma:cv=3"),
        ("gamma", "cv"),
        ("gamma:cv=0", "positive number"),
        ("gamma:cv=much", "could not convert"),
        ("poisson:cv=2", "poisson:cv=2"),
        ("bursts:peak=1,size=9", "give 1 or more, above 1"),
        ("bursts:peak=2,size=9,spread=-1", "give 0 or more, and 1 or more"),
        ("bursts:peak=2,size=9,spread=1,hold=0", "give 0 or more, and 1 or more"),
        ("bursts:peak=2,size=9,together=10", "give from 1 to their size"),
        ("bursts:peak=2,size=9,together=2,apart=0.5", "and less than a gap within bursts"),
        ("piecewise:0=1", "piecewise"),
        ("piecewise:5=1,9=0", "ascending, the first 0"),
        ("piecewise:0=0,9=0", "at least one positive"),
        ("piecewise:0=-1,5=2,9=0", "none negative"),
        ("on-off:on=10", "off"),
    ],
)
def test_words_that_say_nothing_possible(words, says):
    with pytest.raises(ValueError, match=says):
        parse(words)


@pytest.mark.parametrize("trace", [(1.0,), (2.0, 2.0), (3.0, 1.0)])
def test_a_replay_needs_two_ascending_times(trace):
    with pytest.raises(ValueError, match="at least two arrivals"):
        Replay(trace)


def test_duration_and_count():
    within = offered(Poisson(), 3.0, [7], None, 50.0)
    assert within[-1] < 50.0
    assert within.tolist() == offered(Poisson(), 3.0, [7], len(within), None).tolist()
    assert offered(Poisson(), 3.0, [7], len(within) + 1, None)[-1] >= 50.0
    with pytest.raises(ValueError, match="either duration"):
        offered(Poisson(), 3.0, [7], 5, 50.0)
    with pytest.raises(ValueError, match="count is 0"):
        offered(Poisson(), 3.0, [7], 0, None)
    with pytest.raises(ValueError, match="duration is -1"):
        offered(Poisson(), 3.0, [7], None, -1.0)
    with pytest.raises(ValueError, match="never reach 5"):
        offered(AtOnce(), 3.0, [7], None, 5.0)
