"""Traffic drawn anew keeps what it must: rates by the minute, lengths, order, seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rubato.planning.request_source import TraceSource as Source
from rubato.workloads import Workload
from rubato.workloads.resample import bootstrapped, busiest, multiplied, sampled, window
from rubato.workloads.traces import Trace, TraceRequest, make
from tests.planning.machine import KINDS

OFFERS = [TraceRequest(t * 1.7 + (t % 7), 10 + t, 1 + t % 5) for t in range(200)]
OFFERS.sort(key=lambda o: o.at)


def per_minute(times: list[float]) -> Counter[int]:
    return Counter(int(at // 60.0) for at in times)


def test_ten_times_the_traffic_has_ten_times_each_minute() -> None:
    ten = multiplied(OFFERS, 10.0, seed=4)
    assert len(ten) == 2000
    own = per_minute([o.at for o in OFFERS])
    assert per_minute([o.at for o in ten]) == Counter({minute: 10 * n for minute, n in own.items()})
    assert [o.at for o in ten] == sorted(o.at for o in ten)
    assert Counter(o.prompt for o in ten) == Counter({o.prompt: 10 for o in OFFERS})
    assert ten == multiplied(OFFERS, 10.0, seed=4) != multiplied(OFFERS, 10.0, seed=5)
    assert len({o.at for o in ten}) > 1900  # copies do not fall on the same instants
    assert multiplied(OFFERS, 1.0) == OFFERS
    assert 60 <= len(multiplied(OFFERS, 0.4)) <= 100


@pytest.mark.parametrize("end", [None, 45.0, 90.0, 400.0])
def test_copies_stay_in_a_last_minute_that_is_cut_short(end: float | None) -> None:
    offers = [o for o in OFFERS if o.at < (end or 1e9)]
    last = offers[-1].at if end is None else end
    ten = multiplied(offers, 10.0, seed=4, end=end)
    assert len(ten) == 10 * len(offers)
    assert max(o.at for o in ten) <= last
    first_half = sum(o.at < last / 2 for o in offers)
    assert sum(o.at < last / 2 for o in ten) == pytest.approx(10 * first_half, rel=0.25)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_sample_is_the_beginning_of_each_minute(share: float) -> None:
    load = made()
    part = sampled(load, share)
    kept = [a for a in load.arrivals if a.at % 60.0 < 60.0 * share]
    assert [a.id for a in part.arrivals] == [a.id for a in kept]
    times = [a.at for a in part.arrivals]
    assert times == sorted(times)
    assert times[-1] <= part.duration
    assert part.duration == pytest.approx(
        share * 60.0 * (load.duration // 60.0) + min(load.duration % 60.0, 60.0 * share)
    )
    assert part.rate * part.duration == pytest.approx(len(part.arrivals))


def test_where_nothing_arrives_early_in_a_minute_a_sample_is_all() -> None:
    late = replace(made(), arrivals=tuple(a for a in made().arrivals if a.at % 60.0 > 30.0))
    assert sampled(late, 0.2) == late


def test_a_request_beyond_the_end_cannot_be_resampled() -> None:
    with pytest.raises(ValueError, match="lasts 100 s and has a request at"):
        bootstrapped(replace(made(), duration=100.0), 1)


def test_requests_at_one_instant_have_no_busiest_stretch() -> None:
    with pytest.raises(ValueError, match="there is no stretch of time"):
        busiest(drawn([TraceRequest(0.0, 5, 5), TraceRequest(0.0, 6, 6)]), 60.0)


def test_a_stretch_of_all_has_its_last_request(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("t_s,input_tokens,output_tokens\n" + "".join(f"{o.at},{o.prompt},{o.output}\n" for o in OFFERS))
    source = Source(str(file), KINDS, factor=3.0)
    stretch = source.busiest(0, 1e6)
    assert len(source.make(0, stretch).arrivals) == len(source.make(0).arrivals) == 3 * len(OFFERS)
    drawn_again = [len(bootstrapped(source.make(0, source.busiest(0, 100.0)), seed).arrivals) for seed in range(4)]
    assert len(set(drawn_again)) > 1


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_scale(factor: float) -> None:
    with pytest.raises(ValueError, match="give how many times"):
        multiplied(OFFERS, factor)


def drawn(offers: Sequence[TraceRequest], seed: int = 0) -> Workload:
    return make("t", Trace("t", tuple(offers)), KINDS, seed=seed, texts=False)


def made(seed: int = 0) -> Workload:
    return drawn(OFFERS, seed)


def test_tiers_are_drawn_by_share_and_lengths_are_the_traces() -> None:
    big = drawn(OFFERS * 20, 1)
    shares = {tier: n / len(big.arrivals) for tier, n in Counter(a.tier for a in big.arrivals).items()}
    assert shares == {"chat": pytest.approx(0.4, abs=0.03), "code": pytest.approx(0.3, abs=0.03),
                      "summary": pytest.approx(0.3, abs=0.03)}  # fmt: skip
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in made().arrivals] == [
        (o.at, o.prompt, o.output) for o in OFFERS
    ]
    assert made(1).arrivals == made(1).arrivals != made(2).arrivals
    named = drawn([TraceRequest(0.0, 5, 5, "code"), TraceRequest(1.0, 5, 5)])
    assert named.arrivals[0].tier == "code"
    with pytest.raises(ValueError, match="tier 'cod', which no kind is of: did you mean 'code'"):
        drawn([TraceRequest(0.0, 5, 5, "cod")])
    with pytest.raises(ValueError, match="trace 't' has no requests"):
        drawn([])


def test_blocks_are_stretches_of_the_workload() -> None:
    load = made()
    again = bootstrapped(load, 3)
    assert again.duration == load.duration
    assert 0.0 <= min(a.at for a in again.arrivals) <= max(a.at for a in again.arrivals) <= load.duration
    assert len({a.id for a in again.arrivals}) == len(again.arrivals)
    known = {(a.prompt_tokens, a.output_tokens, a.tier) for a in load.arrivals}
    assert all((a.prompt_tokens, a.output_tokens, a.tier) in known for a in again.arrivals)
    gaps = {round(b.at - a.at, 6) for a, b in zip(load.arrivals, load.arrivals[1:], strict=False)}
    inside = [round(b.at - a.at, 6) for a, b in zip(again.arrivals, again.arrivals[1:], strict=False)]
    assert sum(gap in gaps for gap in inside) > 0.9 * len(inside)  # neighbours stay neighbours
    assert again.arrivals == bootstrapped(load, 3).arrivals != bootstrapped(load, 4).arrivals


def test_the_busiest_stretch_has_the_most_tokens() -> None:
    load = made()
    start, end = busiest(load, 120.0)
    assert end - start == 120.0

    def tokens(begin: float) -> int:
        return sum(a.prompt_tokens + a.output_tokens for a in load.arrivals if begin <= a.at < begin + 120.0)

    assert tokens(start) == max(tokens(60.0 * i) for i in range(5))
    cut = window(load, (start, end))
    assert (cut.duration, cut.rate) == (120.0, len(cut.arrivals) / 120.0)
    assert cut.arrivals[0].at < 5.0
    assert busiest(load, 1e6) == (0.0, load.duration)
    assert window(load, busiest(load, 1e6)).arrivals == load.arrivals
