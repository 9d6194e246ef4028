"""`rubato` on one replica: what it promises by a first token in time it keeps; its parts against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.core.events import Demoted, Finished, Tokens
from rubato.core.plan import Tree
from rubato.latency.roofline import Model
from rubato.policies.rubato.drafts import DraftPlanner, nodes_to_verify
from rubato.policies.rubato.requests import TierLosses
from rubato.policies.rubato.supply import PLAIN_DECODE, DecodeSteps, StepErrors, Task, find_omitted
from rubato.policy_kit.kv_survival import MIN_FINISHED_REQUESTS, KVSurvival, OutputRatios, Resident, SurvivalCurve
from rubato.simulation.run_spec import oracle_lengths
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.kit import Seq, run_spec, view
from tests.kit.plans import decode, load, prompt, seen, work
from tests.policies.slos_serve.test_guarantee import promised
from tests.policies.test_adaserve import CHAIN, Drafting, drafted
from tests.policies.test_adaserve import seen as drafting_view
from tests.policies.test_properties import Load


def broken(case: Load, model: Model) -> set[str]:
    """Requests that had their first token in time, not demoted until then, and missed all the same."""
    spec = run_spec(model, case.limits, "rubato", lengths=oracle_lengths, learns=False)
    events = simulate_events(case.requests, case.truth, spec)
    first: dict[str, float] = {}
    declined: set[str] = set()
    lost = set()
    asked = {r.id: r for r in case.requests}
    for event in events:
        if isinstance(event, Tokens):
            first.setdefault(event.id, event.at)
        elif isinstance(event, Demoted) and event.id not in first:
            declined.add(event.id)
        elif isinstance(event, Finished) and not event.verdict.met and event.id in first:
            ttft = asked[event.id].stages[0].slo.ttft
            if ttft is not None and first[event.id] <= asked[event.id].arrival + ttft and event.id not in declined:
                lost.add(event.id)
    return lost


@settings(max_examples=2 * few.max_examples)
@given(promised())
def test_with_exact_models_no_promise_is_broken(case: tuple[Load, Model]) -> None:
    assert not broken(*case)


# ----------------------------------------------------------------- memory

ratios = st.lists(st.floats(0.01, 20.0), min_size=1, max_size=12)


def naive_curve(ended: Sequence[float], so_far: Sequence[float], at: float) -> float:
    """Kaplan and Meier's product, end by end, with half a request more that never ends."""
    share = 1.0
    for i, end in enumerate(sorted(ended)):
        if end < at - 1e-9:
            at_risk = len(ended) - i + sum(r >= end for r in so_far)
            share *= 1.0 - 1.0 / (at_risk + 0.5)
    return share


@given(ended=ratios, so_far=st.lists(st.floats(0.01, 20.0), max_size=6), at=st.floats(0.0, 30.0))
def test_the_survival_curve_is_kaplan_and_meiers(ended: list[float], so_far: list[float], at: float) -> None:
    curve = SurvivalCurve(sorted(ended), np.array(so_far))
    naive = naive_curve(ended, so_far, at)
    beyond = at - max(ended)
    assert curve.at(np.array([at]))[0] == pytest.approx(max(1e-12, naive * np.exp(-5.0 * max(0.0, beyond))))
    steps = curve.at(np.linspace(0.0, 30.0, 50))
    assert all(a >= b for a, b in pairwise(steps))


@given(
    residents=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100), st.integers(1, 300)), min_size=1, max_size=8)
)
def test_with_exact_predictions_the_forecast_is_the_sum_of_those_still_there(
    residents: list[tuple[int, int, int]],
) -> None:
    """At each of its points, but for a block that is not full."""
    given_ = [Resident("a", out, out + left, out + left, length) for out, left, length in residents]
    limits_blocks = 10_000
    forecast = KVSurvival(view(kv_total=limits_blocks, kv_free=limits_blocks), OutputRatios(), given_)
    forecast.add(slice(0, len(given_)))
    horizon = max(left for _, left, _ in residents)
    block = view().limits.block_size
    for i, ahead in enumerate(np.linspace(0.0, max(1.0, horizon), len(forecast._sum))):
        there = [length + ahead for _, left, length in residents if ahead <= left + 1e-9]
        exact = sum(there) / block
        # one whose end has just come may count or not
        ends_now = [length + ahead for _, left, length in residents if abs(ahead - left) < 1e-6]
        low = exact - sum(e / block for e in ends_now)
        assert low - 1e-6 <= forecast._sum[i] <= exact + len(residents) * 0.6


def test_requests_longer_than_predicted_count_by_how_often_that_was() -> None:
    """Half of those that finished were twice as long as predicted: a new one counts half beyond its prediction."""
    known = OutputRatios()
    for i in range(40):
        known.add("a", 1.0 if i % 2 else 2.0)
    forecast = KVSurvival(view(kv_total=100, kv_free=100), known, [Resident("a", 0, 100.0, 1000, 0)])
    shares = forecast._blocks[0] / (np.linspace(0.0, 200.0, 24) / view().limits.block_size + 0.55)
    assert shares[5] == pytest.approx(1.0)
    assert shares[15] == pytest.approx(0.5, abs=0.02)
    known.add("b", 9.0)
    assert tuple(known.ratios_of("b")) == tuple(known.ratios_of(""))  # too few of its own
    for _ in range(MIN_FINISHED_REQUESTS):
        known.add("b", 9.0)
    assert set(known.ratios_of("b")) == {9.0}
    assert tuple(OutputRatios().ratios_of("a")) == (1.0,)


# ----------------------------------------------------------------- time


@given(jobs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=7))
def test_as_few_prompts_as_possible_are_left_out(jobs: list[tuple[int, int]]) -> None:
    jobs = sorted(jobs, key=lambda job: job[1])
    seconds, room = [float(s) for s, _ in jobs], np.array([float(r) for _, r in jobs])
    gone = find_omitted(seconds, seconds, room)
    kept = [i for i in range(len(jobs)) if i not in gone]
    assert in_time(kept, seconds, room)
    most = max(
        (bin(mask).count("1") for mask in range(1 << len(jobs))
         if in_time([i for i in range(len(jobs)) if mask >> i & 1], seconds, room)),
        default=0,
    )  # fmt: skip
    assert len(kept) == most


def in_time(kept: list[int], seconds: list[float], room: Any) -> bool:
    total = 0.0
    for i in kept:
        total += seconds[i]
        if total > room[i]:
            return False
    return True


def test_what_decodes_are_owed_is_counted_by_their_deadlines() -> None:
    first = decode("a", ttft=1.0, tpot=0.1, due=0.05)
    second = decode("b", ttft=1.0, tpot=0.04, due=0.2)
    jobs = [Task(s.due, 0.0, s.id, s.request.stages[0].slo.tpot or 0.0, 1, s.cached, s) for s in (first, second)]
    steps = DecodeSteps(seen([], [first, second]), jobs, 0.0, 0.0, 1.0)
    most, all_ = steps.entries_owed(np.array([0.04, 0.16, 0.25]))
    assert list(most) == [0, 2, 3]  # a at 0.05, 0.15, 0.25; b at 0.2, 0.24
    assert list(all_) == [0, 2, 5]
    assert steps.due_by(0.1) == 1
    assert steps.first_due() == 0.05


def test_errors_are_measured_from_plan_to_plan_mean_and_deviation_apart() -> None:
    errors, now, running = StepErrors(), 0.0, [decode("a")]
    for i in range(400):
        errors.learn(seen([], running, now=now))
        errors.record_plan(now, 0.1)
        now += 0.1 * (1.2 if i % 2 else 1.0)
    assert errors.slower == pytest.approx(1.1, abs=0.01)
    assert errors.spread(0.0) == pytest.approx(0.1, abs=0.01)
    assert errors.spread(0.3) == 0.3


def lead_after(*took: float) -> float:
    """Of steps of 100 ms that took so long, in seconds, after 16 that took what was predicted."""
    errors, now, running = StepErrors(), 0.0, [decode("a")]
    for seconds in [*[0.1] * 16, *took]:
        errors.record_plan(now, 0.1)
        now += seconds
        errors.learn(seen([], running, now=now))
    return errors.lead


@pytest.mark.parametrize(
    ("took", "lead"),
    [
        ([0.1] * 40, 0.0),  # as predicted, always
        ([0.15], 0.2),  # once late: two steps
        ([0.15] * 8, 0.29),  # late again and again: the steps are planned longer
        ([0.6], 0.49),  # a pause of five steps, a tenth of a step of which is made up for at once
        ([0.6, *[0.1] * 10, 0.3], 0.56),  # ten steps later it is still 390 ms behind
        ([0.6, *[0.1] * 100], 0.48),  # forgotten in 4,096 steps
        ([9.0], 0.79),  # eight steps at most
    ],
)
def test_the_lead_is_how_far_steps_have_been_behind_their_plan(took: list[float], lead: float) -> None:
    assert lead_after(*took) == pytest.approx(lead, abs=0.03)


# ----------------------------------------------------------------- a step


def test_a_prompt_runs_in_one_step_where_decodes_are_ahead() -> None:
    """In up to five steps of all decodes, of 22 ms at least, and 0.75 of the 300 ms."""
    plan = load("rubato").plan(seen([prompt("p", 60, ttft=10.0)], [decode("d", ttft=1.0, tpot=0.3, due=0.3)]))
    assert work(plan)["p"] == 60
    plan = load("rubato").plan(seen([prompt("p", 60, ttft=10.0)], [decode("d", ttft=1.0, tpot=0.05, due=0.05)]))
    assert work(plan)["p"] < 60


def test_a_decode_that_is_ahead_sits_out_for_a_prompt_that_is_due() -> None:
    """10 ms + 1 ms a token. The prompt's 40 tokens must be through in 52 ms; the second decode is not due by then."""
    near, far = decode("near", ttft=1.0, tpot=0.05, due=0.06), decode("far", ttft=1.0, tpot=0.5, due=5.0)
    plan = load("rubato").plan(seen([prompt("p", 40, ttft=0.053)], [near, far]))
    assert work(plan) == {"near": 1, "p": 40}


def test_decodes_alone_all_run() -> None:
    plan = load("rubato").plan(seen([], [decode("a", ttft=1.0, tpot=0.05, due=0.06), decode("b", tpot=1.0, due=9.0)]))
    assert work(plan) == {"a": 1, "b": 1}


def test_a_prompt_that_cannot_be_in_time_even_alone_is_best_effort_from_then_on() -> None:
    policy = load("rubato")
    plan = policy.plan(seen([prompt("p", 60, ttft=0.05), prompt("q", 30, ttft=0.5)], []))
    assert plan.demote == ("p",)
    assert work(plan)["q"] == 30
    plan = policy.plan(seen([prompt("p", 60, ttft=0.05)], []))  # told once
    assert plan.demote == ()


def test_one_that_wants_to_be_refused_is() -> None:
    plan = load("rubato").plan(seen([prompt("p", 60, ttft=0.05, refuse=True), prompt("q", 30, ttft=0.5)], []))
    why = "the prompt of 60 tokens takes 70 ms here alone; asked 50 ms"
    assert dict(plan.drop) == {"p": f"rejected-slo-infeasible: {why}"}
    assert plan.demote == ()


def test_a_prompt_waits_whose_kv_would_not_last() -> None:
    """Of 40 blocks of 10 the decode comes to hold 11 (100 tokens and what is left of 16): 300 more do not fit."""
    running = decode("r", 101, ttft=1.0, tpot=0.5, due=9.0)
    held = prompt("p", 300, ttft=9.0)
    assert "p" not in work(load("rubato").plan(seen([held], [running], kv_free=29)))
    assert "p" in work(load("rubato").plan(seen([prompt("p", 200, ttft=9.0)], [running], kv_free=29)))


def test_the_oldest_best_effort_has_turns_beside_prompts_that_are_due() -> None:
    policy = load("rubato", {"patience": 0.1})
    old = prompt("old", 200)
    served = 0
    for i in range(40):
        now = 1.0 + 0.05 * i
        due = decode("d", ttft=1.0, tpot=0.02, due=now + 0.012)
        spare = decode("e", ttft=1.0, tpot=0.02, due=now + 0.4)
        fresh = prompt(f"p{i}", 90, ttft=now + 0.11)
        old.demoted = True
        plan = policy.plan(seen([old, fresh], [due, spare], now=now, kv_free=30))
        served += "old" in work(plan)
    assert served >= 40 // 16


def test_a_tier_that_loses_more_is_left_out_less() -> None:
    losses = TierLosses(10.0)
    assert losses.weights() == {}
    for _ in range(100):
        losses.count_request("a", True)
        losses.count_request("b", False)
    weights = losses.weights()
    assert weights["a"] < 1.0 < weights["b"]
    assert losses.lost_share() == pytest.approx(0.5, abs=0.02)
    assert TierLosses(0.0).weights() == {}
    for i in range(5000):
        losses.count_request(f"tier {i}", False)
    assert len(losses._tiers) < 1000  # a client may name any


# ----------------------------------------------------------------- drafts


def job(seq: Seq) -> Task:
    return Task(seq.due, 0.0, seq.id, seq.request.stages[0].slo.tpot or 0.0, 1, seq.cached, seq)


def test_nodes_go_to_decodes_that_are_due_again_too_soon_then_to_the_likeliest() -> None:
    """Until 0.1 s `near` is due at 0.02, 0.06 and 0.1: it needs two tokens beside its own, `far` none."""
    near = drafted("near", CHAIN, tpot=0.04, due=0.02)
    far = drafted("far", Tree((-1, 0), (0.95, 0.92)), tpot=0.04, due=9.0)
    jobs = [job(near), job(far)]
    assert nodes_to_verify(jobs, 0.1, 2) == {"near": (0, 1)}
    assert nodes_to_verify(jobs, 0.1, 4) == {"near": (0, 1, 2), "far": (0,)}  # 0.9 and 0.8 are not two tokens yet
    assert nodes_to_verify(jobs, 0.01, 2) == {"far": (0, 1)}
    assert nodes_to_verify(jobs, 0.1, 0) == {}


def test_an_entry_verifies_as_much_as_pays_and_brings_what_its_trees_promise() -> None:
    """10 ms, 1 ms a token, 1 ms a draft step, two of which pay once such trees are known: of 0.9, 0.8, 0.3 and 0.1 the
    last does not."""
    running = [drafted("a", CHAIN, tpot=0.04, due=9.0)]
    shown, drafts = drafting_view(running, latency=Drafting(per_draft=0.001)), DraftPlanner()
    for _ in range(200):
        entry = drafts.entry(shown, [job(s) for s in running])
    assert (entry.draft, entry.nodes, entry.tokens) == ((2, 3), 3.0, pytest.approx(3.0))
    steps = DecodeSteps(shown, [job(s) for s in running], 0.0, 0.0, 1.0, entry)
    assert steps.full == pytest.approx(entry.seconds) == pytest.approx(0.016)
    assert steps.seconds_without_drafts(1) == pytest.approx(0.011)
    most, _ = steps.entries_owed(np.array([9.0, 9.0 + 3.1 * 0.04]))
    assert list(most) == [1.0, pytest.approx(5 / 3)]  # entries: one, then all that its five tokens to come take
    assert DraftPlanner().entry(replace(shown, supports=frozenset()), [job(s) for s in running]) == PLAIN_DECODE


def test_nodes_take_no_kv_that_decodes_need() -> None:
    running = [drafted("a", CHAIN, tpot=0.04, due=9.0), drafted("b", CHAIN, tpot=0.04, due=9.0)]
    plan = load("rubato").plan(drafting_view(running, kv_free=2))
    assert {w.seq: w.verify for w in plan.work} == {"a": (), "b": ()}
    assert not plan.preempt


def test_settings_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match=r"patience 0.0 above 0"):
        load("rubato", {"patience": 0.0})
