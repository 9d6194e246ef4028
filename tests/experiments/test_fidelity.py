"""Simulated against live: what a fit run gives, on logs whose truth is known because they were simulated; the rule."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from experiments._timelines import timelines
from experiments.fidelity.fit_run import LearnedModel, delivered, learn, lengthened, outside
from experiments.fidelity.live_runs import apart, at_least
from experiments.fidelity.table import Cell, Deviation, Figures, Rule, figures, table
from rubato.core.events import Event, Finished, Offered, Stepped, Verdict
from rubato.core.plan import Limits, Shape
from rubato.core.request import SLO, Request, Stage
from rubato.latency import affine
from rubato.simulation.simulate import simulate, simulate_events
from rubato.workloads import Workload
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import chat, code
from tests.kit import run_spec

LIMITS = Limits(64, 2048, 4096, 4096, 16)
TRUE = affine.Model(k=(1e-5, 4e-4), b=(0.02, 0.005), a=1e-6, d=2e-8, e=1e-7, host_per_seq=2e-4)


def load(seed: int, rate: float = 5.0) -> Workload:
    slos = (SLO(ttft=0.4, tpot=0.06), SLO(ttft=0.5, tpot=0.08))
    kinds = [chat(slos[0], output=(20, 60)), code(slos[1], output=(20, 60))]
    return make(f"w{seed}", kinds, rate, duration=60.0, seed=seed)


def events(asked: Workload, policy: str, **settings: object) -> list[Event]:
    return simulate_events(list(asked.requests()), {}, run_spec(TRUE, LIMITS, policy, settings, noise=0.15))


def test_the_fit_run_gives_back_what_was_put_in() -> None:
    """Step times with a spread of 15 %, and 30 ms outside the server until the first token, 20 ms at the last."""
    asked = load(7)
    known = LearnedModel(TRUE, TRUE, noise=0.15, first=0.03, last=0.02)
    server = run_spec(TRUE, LIMITS, "vllm", noise=0.15)
    client = delivered(simulate(asked, server), known)
    found = learn(events(load(3), "sarathi", budget=128), events(asked, "vllm"), client)
    assert (found.first, found.last) == (pytest.approx(0.03), pytest.approx(0.02))
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    assert found.noise == pytest.approx(0.15, rel=0.15)
    for shape in (Shape(8, 8, 2000), Shape(300, 5, 1500, 0, 296 * 296)):
        assert found.truth.step_time(shape) == pytest.approx(TRUE.step_time(shape), rel=0.08)


def test_requests_that_do_not_match_their_log_are_an_error() -> None:
    asked = load(7)
    run = simulate(asked, run_spec(TRUE, LIMITS, "vllm"))
    lines = list(timelines(events(replace(asked, arrivals=load(8).arrivals[:60]), "vllm")))
    with pytest.raises(ValueError, match="could be matched"):
        outside(run.records[:60], lines)


def test_time_between_steps_counts_only_while_somebody_waits() -> None:
    """Steps of 10 ms; 2 ms pass between the first two, 4 ms before the third, then nobody is here for a second."""

    def step(end: float) -> Stepped:
        return Stepped(end, "r0", Shape(1, 1, 10), 0.010)

    def offered(at: float, id: str) -> Offered:
        return Offered(at, id, Request(id, (Stage(5),), at))

    def finished(at: float, id: str) -> Finished:
        return Finished(at, id, "completed", "stop", Verdict(True, "deadline"))

    log = [
        offered(0.0, "a"), step(0.010), step(0.022), step(0.036), finished(0.036, "a"), offered(1.0, "b"), step(1.010),
        finished(1.010, "b"),
    ]  # fmt: skip
    samples, usual = lengthened(log)
    assert usual == pytest.approx(0.003)
    assert [s.seconds for s in samples] == pytest.approx([0.013, 0.012, 0.014, 0.013])


@pytest.mark.parametrize(
    ("one", "two", "simulated", "attainment", "e2e"),
    [
        ((200, 0.80, 2.0), (200, 0.80, 2.0), (200, 0.849, 2.19), True, True),
        ((200, 0.80, 2.0), (200, 0.80, 2.0), (200, 0.751, 1.81), True, True),
        ((200, 0.80, 2.0), (200, 0.80, 2.0), (200, 0.86, 2.1), False, True),
        ((200, 0.80, 2.0), (200, 0.80, 2.0), (200, 0.80, 2.3), True, False),
        ((200, 0.70, 1.8), (200, 0.80, 2.2), (200, 0.89, 2.5), True, True),  # the live runs differ by 10 points, 20 %
        ((200, 0.70, 1.8), (200, 0.80, 2.2), (200, 0.91, 2.7), False, False),
    ],
)
def test_the_rule(
    one: tuple[int, float, float],
    two: tuple[int, float, float],
    simulated: tuple[int, float, float],
    attainment: bool,
    e2e: bool,
) -> None:
    three = (Figures(*each, ttft=1.0) for each in (one, two, simulated))
    cell = Cell("edf", 1.0, 5.0, "chat", *three)
    assert (cell.attainment.holds, cell.e2e.holds) == (attainment, e2e)
    assert cell.verdict() == ("holds" if attainment and e2e else "fails: attainment, e2e" if not (attainment or e2e)
                              else "fails: e2e" if attainment else "fails: attainment")  # fmt: skip
    assert cell.verdict() in table([cell], "about")


@pytest.mark.parametrize(("two", "simulated", "holds"), [(1.0, 1.14, True), (1.0, 1.16, False), (1.2, 1.39, True)])
def test_ttft_is_judged_where_the_rule_says_so(two: float, simulated: float, holds: bool) -> None:
    three = [Figures(300, 0.8, 2.0, ttft) for ttft in (1.0, two, simulated)]
    strict = Cell("edf", 1.0, 5.0, "all", *three, Rule(0.03, 0.07, 0.15))
    assert strict.holds == holds
    assert strict.verdict() == ("holds" if holds else "fails: TTFT")
    assert "P99 of TTFT within 15 %" in table([strict], "about")
    assert Cell("edf", 1.0, 5.0, "all", *three).holds


def test_a_share_of_the_bound_has_the_spread_of_the_seeds() -> None:
    """Two seeds, off by 2 and 4 % where 6 % are allowed: t is 12.7, the half width 12.7 %."""
    both = Deviation(-0.03, 0.06, (-0.02, -0.04)).share()
    assert (both.value, both.low) == (pytest.approx(0.5), 0.0)
    assert both.high == pytest.approx((0.03 + 12.706 * 0.01) / 0.06, rel=1e-4)
    alike = Deviation(0.03, 0.06, (0.03, 0.03, 0.03)).share()
    assert alike.low == pytest.approx(alike.high)
    assert Deviation(0.03, 0.06, (0.03,)).share().high == inf


def test_runs_on_one_server_are_told_apart() -> None:
    first = events(load(7), "vllm")
    second = [replace(e, at=e.at + 1000.0) for e in first]
    count = len(load(7).arrivals)
    assert apart(first, count) == [first]
    assert apart([*first, *second], count) == [first, second]


def test_all_tiers_together() -> None:
    run = simulate(load(7), run_spec(TRUE, LIMITS, "vllm"))
    parts = [figures([run], tier) for tier in ("chat", "code")]
    whole = figures([run], "all")
    assert whole.requests == sum(part.requests for part in parts)
    assert whole.e2e == pytest.approx(sum(part.e2e * part.requests for part in parts) / whole.requests)
    assert min(p.ttft for p in parts) <= whole.ttft <= max(p.ttft for p in parts)


def test_a_workload_is_as_long_as_its_rarest_tier_needs() -> None:
    kinds = [chat(SLO(), share=5.0), code(SLO(), share=1.0)]
    short = at_least(lambda count: make("w", kinds, 1.0, count=count, seed=2), 10)
    tiers = [a.tier for a in short.arrivals]
    assert tiers.count("code") == 10
    assert tiers[-1] == "code"
