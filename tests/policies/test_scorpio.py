"""View in, plan out: each rule of `scorpio`. A step takes 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nextafter

import pytest

from rubato.core.events import Finished, Verdict
from rubato.core.plan import Shape
from rubato.core.request import SLO
from tests.kit import Linear
from tests.kit.plans import decode, load, prompt, seen, work

EAGER = {"ttft_reserve": 0.0, "inefficiency": 1.0}


def test_whole_prompts_go_by_deadline_before_decodes() -> None:
    waiting = [prompt("late", 60, ttft=3.0), prompt("none", 10), prompt("soon", 30, ttft=1.0)]
    plan = load("scorpio").plan(seen(waiting, [decode("r", tpot=1.0)]))
    assert list(work(plan).items()) == [("soon", 30), ("late", 60), ("none", 10)]
    assert work(load("scorpio", {"budget": 80}).plan(seen(waiting, [decode("r", tpot=1.0)]))) == {"soon": 30}


def test_mixed_takes_chunks_beside_decodes() -> None:
    plan = load("scorpio", {"budget": 50, "mixed": True}).plan(seen([prompt("a", 60, ttft=1.0)], [decode("r")]))
    assert work(plan) == {"r": 1, "a": 49}


@pytest.mark.parametrize("refuse", [True, False])
@pytest.mark.parametrize("reserve", [0.0, 0.05])
def test_a_first_token_that_cannot_be_in_time_is_refused_from_the_very_instant(refuse: bool, reserve: float) -> None:
    """By the prefill of all before it and its own; what is refused is not before those that come after."""
    first = Linear().step_time(Shape(50, 2, 50, 0, 0, 0, 2, 50)) + reserve
    policy = load("scorpio", {"ttft_reserve": reserve})
    before, after = prompt("before", 20, ttft=first / 1.1), prompt("after", 20, ttft=first * 1.01)
    kept = policy.plan(seen([after, prompt("x", 30, ttft=first, refuse=refuse), before], []))
    assert (list(work(kept)), kept.drop) == (["before", "x", "after"], {})
    assert kept.demote == ("after",)  # 70 tokens are before its first
    late = policy.plan(seen([after, prompt("x", 30, ttft=nextafter(first, 0.0), refuse=refuse), before], []))
    assert list(work(late)) == ["before", "after", *(() if refuse else ("x",))]
    assert late.drop == ({"x": "rejected-slo-late"} if refuse else {})
    assert late.demote == (() if refuse else ("x",))


def test_one_that_has_begun_is_not_refused() -> None:
    begun = prompt("a", 40, ttft=0.001, refuse=True)
    begun.first_token_at, begun.output = 0.0, 1
    plan = load("scorpio").plan(seen([begun], [], now=1.0))
    assert (work(plan), plan.drop, plan.demote) == ({"a": 40}, {}, ())


def test_a_loose_decode_runs_when_it_has_earned_a_credit() -> None:
    """At 0.4 a step: in steps 3, 5, 8 and 10. One without a TPOT goes at the pace of the loosest."""
    policy = load("scorpio")
    view_ = seen([], [decode("tight", tpot=0.02), decode("loose", tpot=0.05), decode("none")])
    ran = [sorted(work(policy.plan(view_))) for _ in range(10)]
    assert [at for at, ids in enumerate(ran, 1) if "loose" in ids] == [3, 5, 8, 10]
    assert all(("none" in ids) == ("loose" in ids) and "tight" in ids for ids in ran)
    policy.observe([Finished(0.0, "loose", "completed", Verdict(True, "deadline"), 1)])
    assert not policy.inner._credit.keys() - {"none"}  # type: ignore[attr-defined]


def test_a_plan_repeats_only_while_no_stage_to_come_has_another_tpot() -> None:
    alike, changes = decode("a", tpot=0.05), decode("b", tpot=0.05)
    (stage,) = changes.request.stages
    assert load("scorpio").plan(seen([], [alike, changes])).repeat_steps > 0
    later = replace(stage, prompt=0, slo=SLO(tpot=0.02))
    changes.request = replace(changes.request, stages=(replace(stage, ends="</think>"), later))
    assert load("scorpio").plan(seen([], [alike, changes])).repeat_steps == 0


def test_ten_tenths_are_a_credit() -> None:
    policy = load("scorpio")
    view_ = seen([], [decode("tight", tpot=0.02), decode("loose", tpot=0.2)])
    assert [len(work(policy.plan(view_))) for _ in range(10)] == [1] * 9 + [2]


@pytest.mark.parametrize(
    ("tpots", "inefficiency", "admits"),
    [
        ([0.02] * 3 + [0.06] * 3, 1.25, True),  # 3 + 3/3 + 1/3 requests, so 5: 15 ms are 18.75 of 20
        ([0.02] * 6, 1.25, False),  # 6 + 1/3: 17 ms are 21.25
        ([0.02] * 6, nextafter(20 / 17, 0.0), True),
        ([0.02] * 6, 20 / 17, False),  # as long as the TPOT is too long
        ([inf], 1e9, True),
    ],
)
def test_admission_is_by_virtual_batch_size(tpots: list[float], inefficiency: float, admits: bool) -> None:
    running = [decode(f"r{i}", 11, **({"tpot": t} if t < inf else {})) for i, t in enumerate(tpots)]
    one = prompt("a", 10, ttft=1.0, **({"tpot": 0.06} if inf not in tpots else {}))
    plan = load("scorpio", {"inefficiency": inefficiency}).plan(seen([one, prompt("b", 1, ttft=2.0)], running))
    assert ("a" in work(plan)) == admits
    assert admits or "b" not in work(plan)  # nor does any behind it start


def test_the_first_starts_though_its_tpot_is_shorter_than_a_step() -> None:
    assert work(load("scorpio").plan(seen([prompt("a", 10, ttft=1.0, tpot=0.001)], []))) == {"a": 10}


def test_it_counts_half_the_output_to_come() -> None:
    """A step of two reads 2 × (length 21 + half of 10) tokens, at 1 ms each: with the decode's 12 ms, 64 ms."""
    one = prompt("a", 21, ttft=1.0, tpot=0.0641)
    one.predicted = 10.0
    view_ = seen([one], [decode("r", 21, tpot=0.0641)])
    object.__setattr__(view_, "latency", Linear(per_kv=0.001))
    assert work(load("scorpio", EAGER).plan(view_)) == {"a": 21}
    one.predicted = 12.0
    assert work(load("scorpio", EAGER).plan(view_)) == {"r": 1}


def test_a_decode_takes_kv_from_those_started_after_it() -> None:
    plan = load("scorpio").plan(seen([prompt("w", 5)], [decode("r"), decode("s")], kv_free=0))
    assert (plan.preempt, work(plan)) == (("s",), {"r": 1})


def test_the_oldest_without_a_deadline_gets_a_turn() -> None:
    """Sixteen tokens in one step of sixteen, though its start would break the TPOT of the one that runs."""
    policy = load("scorpio")
    view_ = seen([prompt("old", 40)], [decode("r", tpot=0.001)])
    assert [work(policy.plan(view_)).get("old", 0) for _ in range(16)] == [0] * 15 + [16]
