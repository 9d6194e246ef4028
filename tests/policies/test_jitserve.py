"""View in, plan out: each rule of `jitserve`. A step takes 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rubato.policies import default_lengths
from tests.kit import Seq
from tests.kit.plans import decode, load, prompt, seen, work

EAGER = {"schedule_interval": 1, "penalty_factor": 1.0}  # chooses in every step


def asks(id: str, length: int, left: float, session: str = "", **slo: float) -> Seq:
    """Waits, with so many output tokens predicted."""
    seq = prompt(id, length, **slo)
    seq.predicted, seq.request = left, replace(seq.request, session=session)
    return seq


def runs(id: str, length: int, left: float, **slo: float) -> Seq:
    seq = decode(id, length, **slo)
    seq.predicted, seq.output, seq.first_token_at = left, length - 10, 0.0
    return seq


def order(*waiting: Seq, penalty: float = 1.0, now: float = 0.0) -> list[str]:
    policy = load("jitserve", {"budget": 99, "penalty_factor": penalty})
    return list(work(policy.plan(seen([*waiting], [], now=now))))


def test_who_earns_most_a_second_starts_first() -> None:
    """A step is 11 ms: prompt and 8 times the output over the seconds of the output."""
    assert order(asks("even", 10, 10, e2e=9.0), asks("short", 10, 5, e2e=9.0), asks("prompt", 40, 10, e2e=9.0)) == [
        "prompt", "short", "even",
    ]  # fmt: skip


@pytest.mark.parametrize(("penalty", "first"), [(0.0, "late"), (1.0, "soon")])
def test_what_ends_late_earns_less(penalty: float, first: str) -> None:
    """Both take 0.11 s: `late` has 90 ms, and a prompt of 4 tokens more, 94 / 90 of what `soon` earns."""
    soon, late = asks("soon", 10, 10, e2e=9.0), asks("late", 14, 10, e2e=0.09)
    assert order(soon, late, penalty=penalty)[0] == first


def test_a_prompt_counts_by_its_ttft_and_its_output_by_its_pace() -> None:
    """10 tokens end in 0.11 s. By 50 ms and 10 ms a token they are in time, by 2 ms a token at 70 ms not; a TTFT of
    5.5 ms is met half."""
    chat = asks("chat", 30, 10, ttft=0.05, tpot=0.01)
    slow, hasty = asks("slow", 30, 10, ttft=0.05, tpot=0.002), asks("hasty", 30, 10, ttft=0.0055, tpot=0.02)
    assert order(slow, hasty, chat) == ["chat", "hasty", "slow"]


def test_requests_of_a_session_earn_together() -> None:
    """Of two that are alike the one whose sibling is short goes first."""
    alone, long = asks("alone", 10, 10, e2e=9.0), asks("long", 10, 10, "s", e2e=9.0)
    assert order(alone, long) == ["alone", "long"]
    assert order(alone, long, asks("sibling", 10, 2, "s", e2e=9.0)) == ["long", "sibling", "alone"]


def test_best_effort_comes_last() -> None:
    assert order(asks("free", 40, 1), asks("late", 5, 50, e2e=0.001)) == ["late", "free"]


def test_the_window_of_like_lengths_with_most_density_stays() -> None:
    """Two seats. Lengths 20 and 21 earn 12 tokens a step each, 22 and 90 less; then 22 has but 6 left and earns 26."""
    policy = load("jitserve", EAGER | {"max_num_seqs": 2})
    waiting = [asks("a", 20, 5, e2e=9.0), asks("b", 21, 5, e2e=9.0)]
    plan = policy.plan(seen(waiting, [runs("like", 22, 600, e2e=9.0), runs("long", 90, 600, e2e=9.0)]))
    assert (plan.preempt, work(plan)) == (("like", "long"), {"a": 20, "b": 21})
    plan = policy.plan(seen(waiting[:1], [runs("like", 22, 6, e2e=9.0), runs("long", 90, 600, e2e=9.0)]))
    assert (plan.preempt, work(plan)) == (("long",), {"like": 1, "a": 20})


def test_no_more_than_three_give_up_their_kv_at_once_and_only_at_a_choice() -> None:
    waiting = [asks(f"w{i}", 20, 5, e2e=9.0) for i in range(4)]
    running = [runs(f"r{i}", 90, 600, e2e=9.0) for i in range(4)]
    policy = load("jitserve", EAGER | {"max_num_seqs": 4, "schedule_interval": 2})
    assert policy.plan(seen(waiting, running)).preempt == ()
    plan = policy.plan(seen(waiting, running))
    assert (plan.preempt, work(plan)) == (("r0", "r1", "r2"), {"r3": 1, "w0": 20, "w1": 20, "w2": 20})


@pytest.mark.parametrize(("tpot", "started"), [(0.05, ["a"]), (0.01, [])])
def test_three_seats_stay_free_while_steps_are_longer_than_the_tightest_tpot(tpot: float, started: list[str]) -> None:
    """A step of the decode and one token more takes 12 ms."""
    policy = load("jitserve", {"max_num_seqs": 4})
    plan = policy.plan(seen([asks("a", 5, 5, e2e=9.0)], [runs("r", 21, 5, ttft=1.0, tpot=tpot)]))
    assert list(work(plan)) == ["r", *started]


def test_its_lengths_are_upper_bounds_unless_a_router_says_otherwise() -> None:
    assert default_lengths("jitserve") == default_lengths("jitserve", "least_loaded") == "quantile"
    assert default_lengths("jitserve", "rubato") == "conditional_mean"
