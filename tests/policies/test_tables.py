"""View in, plan out: one small case a policy's every rule."""

from __future__ import annotations

import pytest

from rubato.interfaces import View
from rubato.policies import PolicyError, describe, load, load_router, names
from rubato.types import Finished, Limits, Plan, Verdict
from tests.doubles import Linear, Seq, request, view

LIMITS = Limits(max_seqs=8, max_tokens=100, max_length=500, kv_blocks=40, block=10)


def decode(id: str, length: int = 21, **slo: float) -> Seq:
    """A running sequence with one token pending."""
    due = slo.pop("due", float("inf"))
    return Seq(request(id, 10, **slo), length, length - 1, -(-(length - 1) // 10), 1, due=due)  # type: ignore[arg-type]


def prompt(id: str, length: int, **slo: float) -> Seq:
    """A waiting sequence; its first token is due at its TTFT."""
    refuse = bool(slo.pop("refuse", 0))
    demoted = bool(slo.pop("demoted", 0))
    due = slo.get("ttft", float("inf"))
    return Seq(request(id, length, refuse=refuse, **slo), length, due=due, demoted=demoted)  # type: ignore[arg-type]


def seen(waiting: list[Seq], running: list[Seq], *, kv_free: int = 40, now: float = 0.0) -> View:
    return view(waiting, running, kv_free=kv_free, kv_total=40, limits=LIMITS, latency=Linear(), now=now)


def work(plan: Plan) -> dict[str, int]:
    return {w.seq: w.tokens for w in plan.work}


def test_vllm_fills_the_budget_with_decodes_then_the_oldest_prompts() -> None:
    plan = load("vllm", {"budget": 50}).plan(seen([prompt("a", 30), prompt("b", 30)], [decode("r")]))
    assert list(work(plan).items()) == [("r", 1), ("a", 30), ("b", 19)]


def test_vllm_takes_kv_from_the_one_started_last() -> None:
    plan = load("vllm").plan(seen([prompt("w", 5)], [decode("r"), decode("s")], kv_free=0))
    assert plan.preempt == ("s",)
    assert work(plan) == {"r": 1}  # and admits nobody in a step that preempted


def test_prefill_first_stalls_decodes_and_takes_whole_prompts() -> None:
    policy = load("prefill_first", {"budget": 50})
    assert work(policy.plan(seen([prompt("a", 30), prompt("b", 30)], [decode("r")]))) == {"a": 30}
    assert work(policy.plan(seen([], [decode("r"), decode("s")]))) == {"r": 1, "s": 1}


def test_prefill_first_runs_a_prompt_longer_than_a_batch_alone() -> None:
    assert work(load("prefill_first", {"budget": 50}).plan(seen([prompt("a", 80)], [decode("r")]))) == {"a": 50}


def test_sarathis_budget_keeps_the_tightest_tpot() -> None:
    """10 ms + 1 ms a token within 50 ms: 40 tokens, one of them the decode's."""
    plan = load("sarathi", {"least": 1}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.05)]))
    assert work(plan) == {"r": 1, "a": 39}
    plan = load("sarathi", {"budget": 20}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.05)]))
    assert work(plan) == {"r": 1, "a": 19}


def test_sarathi_goes_on_with_prefill_though_decodes_fill_the_tpot() -> None:
    plan = load("sarathi", {"least": 7}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.005)]))
    assert work(plan) == {"r": 1, "a": 7}


EDF = {"safety": 0.0, "reserve": 0.0, "longest": 1e9}


def test_edf_ends_the_step_before_the_tightest_due_token() -> None:
    """The decode is due in 30 ms: 10 ms + 20 tokens, one of them its own."""
    view_ = seen([prompt("a", 60, ttft=1.0)], [decode("r", ttft=1.0, tpot=0.5, due=0.03)])
    assert work(load("edf", EDF).plan(view_)) == {"r": 1, "a": 19}


def test_edf_serves_prompts_by_deadline() -> None:
    view_ = seen([prompt("late", 60, ttft=2.0), prompt("soon", 60, ttft=1.0)], [])
    assert list(work(load("edf", EDF).plan(view_)).items()) == [("soon", 60), ("late", 40)]


def test_edf_sets_aside_the_longest_when_not_all_can_be_in_time() -> None:
    """100 + 20 + 20 tokens of prefill by 80 ms: without the longest the others are in time, and it gets the rest."""
    waiting = [prompt("long", 100, ttft=0.2), prompt("a", 60, ttft=0.15), prompt("b", 60, ttft=0.15)]
    plan = load("edf", EDF).plan(seen(waiting, []))
    assert plan.demote == ("long",)
    assert list(work(plan))[:2] == ["a", "b"]


def test_edf_refuses_instead_where_the_client_asked_for_that() -> None:
    plan = load("edf", EDF).plan(seen([prompt("a", 100, ttft=0.05, refuse=True)], [decode("r")]))
    assert plan.drop == {"a": "rejected-slo-infeasible"}
    assert not plan.demote


def test_edf_brings_back_what_could_be_in_time_after_all() -> None:
    plan = load("edf", EDF).plan(seen([prompt("a", 50, ttft=1.0, demoted=True)], []))
    assert plan.promote == ("a",)
    assert work(plan) == {"a": 50}


def test_edf_gives_best_effort_what_is_left() -> None:
    """30 ms until the decode is due: 19 tokens beside it, all for the one without a promise."""
    view_ = seen([prompt("free", 50)], [decode("r", ttft=1.0, tpot=0.5, due=0.03)])
    assert work(load("edf", EDF).plan(view_)) == {"r": 1, "free": 19}


def test_edf_takes_kv_from_best_effort_first() -> None:
    free, older, strict = decode("free"), decode("older"), decode("r", ttft=1.0, tpot=0.5, due=1.0)
    plan = load("edf", EDF).plan(seen([], [older, free, strict], kv_free=0))
    assert plan.preempt == ("free",)
    assert "r" in work(plan)


def test_edf_lets_the_tier_that_fell_behind_go_first() -> None:
    policy = load("edf", EDF)
    loser = prompt("x", 30, ttft=1.0)
    for i in range(6):  # six misses of tier "default", none of tier "other"
        policy.plan(seen([Seq(request(f"m{i}", 10, ttft=1.0), 10, due=1.0)], []))
        policy.observe([Finished(0.0, f"m{i}", "completed", "stop", Verdict(False, "deadline"))])
    hopeless = Seq(request("h", 90, ttft=0.001), 90, due=0.001)
    other = Seq(request("o", 60, ttft=0.5, tier="other"), 60, due=0.5)
    policy.plan(seen([hopeless, other], []))
    for _ in range(3):
        policy.plan(seen([Seq(request("h2", 90, ttft=0.001), 90, due=0.001)], []))
    policy.observe([Finished(0.0, "o", "completed", "stop", Verdict(True, "deadline"))])
    plan = policy.plan(seen([Seq(request("o2", 60, ttft=0.5, tier="other"), 60, due=0.5), loser], []))
    assert work(plan) == {"x": 30}  # though o2 is due sooner; it starts nothing new meanwhile


def test_edf_prompts_wait_when_one_more_decode_would_break_the_tightest_tpot() -> None:
    running = [decode(f"r{i}", ttft=1.0, tpot=0.013, due=5.0) for i in range(3)]  # 10 ms + 3 tokens: 13 ms
    plan = load("edf", EDF).plan(seen([prompt("a", 10, ttft=4.0, tpot=0.013)], running))
    assert "a" not in work(plan)


def test_edf_doubts_a_prediction_after_idle_seconds() -> None:
    """A refused request runs no step: a model that saw a slow machine must not refuse on an idle one for ever."""
    policy = load("edf", {**EDF, "stale": 5.0})
    assert work(policy.plan(seen([prompt("warm", 10)], []))) == {"warm": 10}
    hopeful = prompt("a", 100, ttft=0.05, refuse=True)  # predicted at 110 ms
    assert policy.plan(seen([hopeful], [], now=0.01)).drop == {"a": "rejected-slo-infeasible"}
    later = Seq(request("b", 100, ttft=0.05, refuse=True, arrival=6.0), 100, due=6.05)
    assert work(policy.plan(seen([later], [], now=6.0))) == {"b": 100}
    absurd = Seq(request("c", 100, ttft=0.001, refuse=True, arrival=20.0), 100, due=20.001)
    assert policy.plan(seen([absurd], [], now=20.0)).drop == {"c": "rejected-slo-infeasible"}


@pytest.mark.parametrize(
    ("slo", "predicted", "refused"),
    [
        ({"ttft": 1.0, "tpot": 0.005}, None, True),  # a step alone takes 11 ms
        ({"ttft": 1.0, "tpot": 0.05}, None, False),
        ({"e2e": 0.3}, 100.0, True),  # 100 steps of 11 ms
        ({"e2e": 0.3}, 10.0, False),
        ({"e2e": 0.3}, None, False),
    ],
)
def test_edf_refuses_a_pace_that_cannot_be_kept(slo: dict[str, float], predicted: float | None, refused: bool) -> None:
    policy = load("edf", EDF)
    policy.plan(seen([prompt("warm", 10)], []))
    asked = Seq(request("a", 10, refuse=True, **slo), 10, due=1.0, predicted=predicted)
    assert bool(policy.plan(seen([asked], [], now=0.1)).drop) is refused


def fleet(*pending: int) -> list[View]:
    views = []
    for i, tokens in enumerate(pending):
        one = seen([prompt(f"p{i}", tokens)] if tokens else [], [])
        views.append(View(f"r{i}", 0.0, one.waiting, one.running, 40, 40, LIMITS, one.latency))
    return views


def test_round_robin_takes_turns() -> None:
    router = load_router("round_robin")
    held = [request(id, 10) for id in "abc"]
    assert router.place(held, fleet(0, 0), 0.0).place == {"a": "r0", "b": "r1", "c": "r0"}
    assert router.place([request("d", 10)], fleet(0, 0), 0.0).place == {"d": "r1"}


def test_least_loaded_counts_what_it_has_just_placed() -> None:
    router = load_router("least_loaded", {"per_request": 0})
    held = [request(id, 50) for id in "abc"]
    assert router.place(held, fleet(80, 0), 0.0).place == {"a": "r1", "b": "r1", "c": "r0"}


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("vlm", {}, "unknown policy 'vlm': did you mean 'vllm'"),
        ("edf", {"saftey": 0.1}, "has no setting 'saftey': did you mean 'safety'"),
        ("edf", {"every": "often"}, "setting every is 'often'; give a int"),
        ("edf", {"every": 1}, "every 1 must be at least 2"),
        ("round_robin", {}, "has no Scheduler; it defines Router"),
        ("no.such.module", {}, "unknown policy|cannot be imported"),
    ],
)
def test_what_is_wrong_is_named(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load(name, settings)


def test_every_policy_says_what_it_is_and_where_it_comes_from() -> None:
    described = list(describe())
    assert {name for name, *_ in described} == set(names())
    for name, _, about, source, _ in described:
        assert about.endswith((".", "once.")), name
        assert len(source) > 10, name
