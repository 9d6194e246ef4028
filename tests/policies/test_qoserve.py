"""View in, plan out: each rule of `qoserve`. A step takes 10 ms and 1 ms a token."""

from __future__ import annotations

from math import nextafter

import pytest

from rubato.core.plan import Plan
from tests.kit.plans import decode, load, prompt, seen, work

PLAIN = {"alpha": 0.0, "margin": 1.0, "min_budget": 1}
THROUGHPUT = 100 / 0.11  # tokens a second: a batch of 100, the engine's limit, in 110 ms


@pytest.mark.parametrize(
    ("settings", "due", "chunk"),
    [
        ({}, 0.0551, 43),  # 10 ms + 2 decodes + 43
        ({"margin": 1.2}, 0.0551, 33),  # 45.9 ms
        ({"max_budget": 30}, 0.0551, 28),
        ({"min_budget": 20}, 0.02, 18),  # 8 would be in time
        ({"min_budget": 20}, -0.01, 18),
        ({}, -0.01, 0),
    ],
)
def test_a_chunk_ends_before_the_first_decode_is_due(settings: dict[str, object], due: float, chunk: int) -> None:
    running = [decode("tight", tpot=0.05, due=due), decode("loose", tpot=0.1, due=9.0)]
    plan = load("qoserve", PLAIN | settings).plan(seen([prompt("a", 60, ttft=1.0)], running))
    assert work(plan) == {"tight": 1, "loose": 1} | ({"a": chunk} if chunk else {})


def test_decodes_without_a_tpot_bound_no_chunk() -> None:
    plan = load("qoserve", PLAIN).plan(seen([prompt("a", 60, ttft=1.0)], [decode("r", e2e=0.01, due=0.01)]))
    assert work(plan) == {"r": 1, "a": 60}


def test_one_whose_first_token_was_late_is_due_by_its_tpot_from_there() -> None:
    """Three tokens after the one at 0.9005 s, 40 ms each: due 20.5 ms from now."""
    late = decode("r", tpot=0.04, due=0.5)
    late.first_token_at, late.output = 0.9005, 3
    assert work(load("qoserve", PLAIN).plan(seen([prompt("a", 60)], [late], now=1.0)))["a"] == 9


def ordered(alpha: float, *waiting: object) -> list[str]:
    return list(work(load("qoserve", PLAIN | {"alpha": alpha}).plan(seen([*waiting], []))))  # type: ignore[list-item]


def test_alpha_is_between_deadline_and_length() -> None:
    """40 tokens more count 0.4 s at 10 ms a token, which is less than half a second and more than 0.3 s."""
    long, near, far = prompt("long", 50, ttft=1.0), prompt("near", 10, ttft=1.3), prompt("far", 10, ttft=1.5)
    assert ordered(0.0, far, near, long) == ["long", "near", "far"]
    assert ordered(0.01, far, near, long) == ["near", "long", "far"]
    assert ordered(0.1, far, near, long) == ["near", "far", "long"]


def test_an_e2e_alone_leaves_time_for_the_output() -> None:
    """16 tokens of 11 ms: to be prefilled by 0.824 s."""
    batch = prompt("batch", 10, e2e=1.0)
    batch.due = 1.0
    assert ordered(0.0, prompt("chat", 10, ttft=0.823), batch, prompt("x", 10, ttft=0.825)) == ["chat", "batch", "x"]


def relegating(due: float, *, refuse: bool = False) -> Plan:
    waiting = [prompt("x", 50, ttft=due, refuse=refuse), prompt("other", 60, ttft=5.0)]
    return load("qoserve", PLAIN).plan(seen(waiting, []))


def test_one_that_would_be_late_if_prefilled_now_is_relegated_from_the_very_instant() -> None:
    in_time = 50 / THROUGHPUT
    kept = relegating(in_time)
    assert (work(kept), kept.demote) == ({"x": 50, "other": 50}, ())
    late = relegating(nextafter(in_time, 0.0))
    assert (list(work(late).items()), late.demote) == ([("other", 60), ("x", 40)], ("x",))
    refused = relegating(nextafter(in_time, 0.0), refuse=True)
    why = "the prompt of 50 tokens takes 60 ms here alone; asked 55 ms"
    assert (work(refused), refused.drop) == ({"other": 60}, {"x": f"rejected-slo-infeasible: {why}"})


def test_best_effort_and_what_was_relegated_come_last() -> None:
    assert ordered(0.0, prompt("back", 10, ttft=0.5, demoted=True), prompt("free", 10), prompt("a", 10, ttft=1.0)) == [
        "a", "back", "free",
    ]  # fmt: skip


def test_throughput_follows_the_steps_that_prefilled() -> None:
    """90 tokens took 10 s: 0.995 of what it was, and 0.005 of 9 tokens a second."""
    policy = load("qoserve", PLAIN)
    policy.plan(seen([prompt("first", 90, ttft=9.0)], []))
    due = 10.0 + 50 / (0.995 * THROUGHPUT + 0.005 * 9.0)
    assert policy.plan(seen([prompt("x", 50, ttft=due * (1 - 1e-9))], [], now=10.0)).demote == ("x",)
    policy = load("qoserve", PLAIN)
    policy.plan(seen([prompt("first", 90, ttft=9.0)], []))
    assert policy.plan(seen([prompt("x", 50, ttft=due * (1 + 1e-9))], [], now=10.0)).demote == ()


def test_a_prompt_that_lacks_kv_lets_those_that_run_go_on() -> None:
    begun = prompt("begun", 50, ttft=9.0)
    begun.cached, begun.blocks = 20, 2
    plan = load("qoserve", PLAIN).plan(seen([prompt("a", 60, ttft=1.0)], [decode("r"), begun], kv_free=5))
    assert work(plan) == {"r": 1, "begun": 30}


def test_a_decode_takes_kv_from_those_started_after_it() -> None:
    plan = load("qoserve", PLAIN).plan(seen([prompt("w", 5, ttft=1.0)], [decode("r"), decode("s")], kv_free=0))
    assert (plan.preempt, work(plan)) == (("s",), {"r": 1})


def test_the_oldest_without_a_deadline_gets_a_turn() -> None:
    policy = load("qoserve", PLAIN)
    view_ = seen([prompt("old", 40)], [decode("r", tpot=0.001, due=-1.0)])
    assert [work(policy.plan(view_)).get("old", 0) for _ in range(16)] == [0] * 15 + [16]
