"""View in, plan out: one small case a policy's every rule."""

from __future__ import annotations

import importlib
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from rubato import policies
from rubato.core.events import Finished, HandedOff, Verdict
from rubato.core.interfaces import View
from rubato.core.plan import Plan, Role, Sample, Shape, Tree, Work
from rubato.latency import affine
from rubato.policies import PolicyError, describe, load_router, names
from rubato.policies.distserve import Router
from rubato.policy_kit.refusals import known_output, why_infeasible
from tests.kit import Seq, request, shown, view
from tests.kit.plans import LIMITS, SpelledOut, decode, fleet, load, moved, prompt, seen, work


def test_vllm_fills_the_budget_with_decodes_then_the_oldest_prompts() -> None:
    plan = load("vllm", {"budget": 50}).plan(seen([prompt("a", 30), prompt("b", 30)], [decode("r")]))
    assert list(work(plan).items()) == [("r", 1), ("a", 30), ("b", 19)]


def test_vllm_takes_kv_from_the_one_started_last() -> None:
    plan = load("vllm").plan(seen([prompt("w", 5)], [decode("r"), decode("s")], kv_free=0))
    assert plan.preempt == ("s",)
    assert work(plan) == {"r": 1}  # and admits none in a step that preempted


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({}, []),
        ({"max_num_queued_reqs": 4}, []),
        ({"max_num_queued_reqs": 3}, ["b"]),
        ({"max_num_queued_reqs": 1}, ["a", "b"]),  # not what runs, nor what has had tokens and was preempted
        ({"max_num_queued_tokens": 41}, []),
        ({"max_num_queued_tokens": 40}, ["b"]),  # the limit is reached by what came before
        ({"max_num_queued_tokens": 1}, ["a", "b"]),
    ],
)
def test_vllm_refuses_who_comes_when_the_queue_is_full(limits: dict[str, object], refused: list[str]) -> None:
    back = Seq(request("back", 10), 15)
    plan = load("vllm", limits).plan(seen([back, prompt("a", 30), prompt("b", 30)], [decode("r")]))
    assert plan.drop == dict.fromkeys(refused, "rejected-saturated")
    assert work(plan).keys() == {"r", "back", "a", "b"} - set(refused)


def test_prefill_first_stalls_decodes_and_takes_whole_prompts() -> None:
    policy = load("prefill_first", {"budget": 50})
    assert work(policy.plan(seen([prompt("a", 30), prompt("b", 30)], [decode("r")]))) == {"a": 30}
    assert work(policy.plan(seen([], [decode("r"), decode("s")]))) == {"r": 1, "s": 1}


def test_prefill_first_runs_a_prompt_longer_than_a_batch_alone() -> None:
    assert work(load("prefill_first", {"budget": 50}).plan(seen([prompt("a", 80)], [decode("r")]))) == {"a": 50}


def test_sarathis_budget_keeps_the_tightest_tpot() -> None:
    """10 ms + 1 ms a token within 50 ms: 40 tokens, one of them the decode's."""
    plan = load("sarathi", {"min_chunk": 1}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.05)]))
    assert work(plan) == {"r": 1, "a": 39}
    plan = load("sarathi", {"budget": 20}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.05)]))
    assert work(plan) == {"r": 1, "a": 19}


def test_sarathi_goes_on_with_prefill_though_decodes_fill_the_tpot() -> None:
    plan = load("sarathi", {"min_chunk": 7}).plan(seen([prompt("a", 90)], [decode("r", tpot=0.005)]))
    assert work(plan) == {"r": 1, "a": 7}


def test_sarathi_holds_small_chunks_beside_decodes_for_a_while() -> None:
    policy = load("sarathi", {"budget": 64, "min_prefill_chunk_tokens": 40})
    alone, small, enough = [prompt("a", 30)], [prompt("a", 30), prompt("b", 9)], [prompt("a", 30), prompt("b", 10)]
    assert work(policy.plan(seen(alone, []))) == {"a": 30}
    assert work(policy.plan(seen(small, [decode("r")]))) == {"r": 1}
    assert work(policy.plan(seen(enough, [decode("r")]))) == {"r": 1, "a": 30, "b": 10}
    steps = [work(policy.plan(seen(small, [decode("r")]))) for _ in range(10)]
    assert steps == [{"r": 1}] * 8 + [{"r": 1, "a": 30, "b": 9}, {"r": 1}]


EDF = {"safety_margin": 0.0, "deadline_reserve": 0.0, "max_ttft_share": 1e9}


def test_edf_ends_the_step_before_the_tightest_due_token() -> None:
    """The decode is due in 30 ms: 10 ms + 20 tokens, one of them its own."""
    view_ = seen([prompt("a", 60, ttft=1.0)], [decode("r", ttft=1.0, tpot=0.5, due=0.03)])
    assert work(load("edf", EDF).plan(view_)) == {"r": 1, "a": 19}


@pytest.mark.parametrize(
    ("due", "longest", "chunk"),
    [
        (2.0, 0.3, 13),  # 30 % of 20 ms is less than the decode takes: twice 10 ms + 2 tokens, one of them the decode's
        (2.0, 1.5, 19),  # 30 ms are more than that: the TTFT decides
        (0.017, 0.3, 6),  # and the decode's own deadline always holds
    ],
)
def test_edf_prefills_beside_decodes_that_take_longer_than_a_tight_ttft_allows(
    due: float, longest: float, chunk: int
) -> None:
    view_ = seen([prompt("a", 60, ttft=1.0)], [decode("r", ttft=0.02, tpot=0.5, due=due)])
    assert work(load("edf", EDF | {"max_ttft_share": longest}).plan(view_)) == {"r": 1, "a": chunk}


def test_edf_prefills_where_nobody_decodes_and_a_step_costs_more_than_a_tight_ttft_allows() -> None:
    """Twice what one token takes, 11 ms, though the share of another's TTFT leaves it none, or one."""
    for longest in (0.3, 0.55):  # 6 ms: not even a token; 11 ms: one
        policy = load("edf", EDF | {"max_ttft_share": longest})
        policy.plan(seen([prompt("tight", 5, ttft=0.02)], []))
        assert work(policy.plan(seen([prompt("a", 60, ttft=1.0)], []))) == {"a": 12}


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
    why = "the prompt of 100 tokens takes 110 ms here alone; asked 50 ms"
    assert plan.drop == {"a": f"rejected-slo-infeasible: {why}"}
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


def test_edf_sets_the_longest_aside_unless_its_tier_would_fall_behind() -> None:
    """Two prompts of which one can be in time; the longer goes, but for a tier that has lost more than the others."""

    def kept(lost: int, outcome: str = "completed") -> dict[str, int]:
        policy = load("edf", EDF)
        for i in range(20):
            for tier, misses in (("long", lost), ("other", 0)):
                seq = Seq(request(f"{tier}{i}", 10, ttft=1.0, tier=tier), 10, due=1.0)
                policy.plan(seen([seq], []))
                verdict = Verdict(i >= misses, "deadline")
                policy.observe([Finished(0.0, seq.id, outcome, "stop", verdict)])  # type: ignore[arg-type]
        long = Seq(request("x", 60, ttft=0.1, tier="long"), 60, due=0.1)
        short = Seq(request("o", 50, ttft=0.1, tier="other"), 50, due=0.1)
        plan = policy.plan(seen([long, short], []))
        return {id: n for id, n in work(plan).items() if id not in plan.demote}

    assert set(kept(0)) == {"o"}
    assert set(kept(8)) == {"x"}
    assert set(kept(8, "cancelled")) == {"o"}  # what clients took back is no loss


def test_edf_keeps_a_bounded_number_of_tiers_and_drops_only_the_long_unseen() -> None:
    """Inside vLLM a tier's name is a client's free text: here 2,000 of them, one a request, beside one that comes back
    every 50 requests and one request that is in flight throughout."""
    policy = policies.load("edf", EDF)
    first = Seq(request("first", 10, ttft=9.0, tier="once"), 10, due=9.0)
    policy.plan(seen([first], []))
    for i in range(2000):
        tier = "again" if i % 50 == 0 else f"tier{i}"
        policy.plan(seen([Seq(request(f"r{i}", 10, ttft=9.0, tier=tier), 10, due=9.0)], []))
        policy.observe([Finished(0.0, f"r{i}", "completed", "stop", Verdict(i % 2 == 0, "deadline"))])
    offered, lost = policy._requests.losses._offered, policy._requests.losses._lost  # type: ignore[attr-defined]
    assert len(offered) < 800
    assert offered.keys() == lost.keys()
    assert {"again", "tier1999"} < offered.keys()
    first.missed = True
    policy.plan(seen([first], []))  # its loss, and its end, name a tier that has been dropped
    policy.observe([Finished(0.0, "first", "completed", "stop", Verdict(False, "deadline"))])
    assert "once" not in offered


def test_edf_prompts_wait_when_one_more_decode_would_break_the_tightest_tpot() -> None:
    running = [decode(f"r{i}", ttft=1.0, tpot=0.013, due=5.0) for i in range(3)]  # 10 ms + 3 tokens: 13 ms
    plan = load("edf", EDF).plan(seen([prompt("a", 10, ttft=4.0, tpot=0.013)], running))
    assert "a" not in work(plan)


def test_edf_tries_again_when_its_model_has_forgotten_a_slow_spell() -> None:
    """A refused request runs no step: a model that saw a slow machine must not refuse on an idle one for ever."""
    model = affine.Model(k=(1e-3, 1e-3), b=(0.01, 0.01))
    for _ in range(8):
        model.update(Sample(Shape(10, 1, 10), 0.06))  # three times as long as it says
    policy = load("edf", EDF)

    def asked(id: str, idle: float, ttft: float) -> Plan:
        seq = Seq(request(id, 100, ttft=ttft, refuse=True, arrival=idle), 100, due=idle + ttft)
        model.idle(idle)
        return policy.plan(replace(seen([seq], [], now=idle), latency=model))

    def reason(takes: float, asked: int) -> str:
        return f"rejected-slo-infeasible: the prompt of 100 tokens takes {takes} ms here alone; asked {asked} ms"

    assert asked("a", 1.0, ttft=0.2).drop == {"a": reason(330, 200)}
    assert work(asked("b", 20.0, ttft=0.2)) == {"b": 100}
    assert asked("c", 20.0, ttft=0.1).drop == {"c": reason(113.8, 100)}


@pytest.mark.parametrize(
    ("slo", "predicted", "refused"),
    [
        ({"ttft": 0.05, "tpot": 0.005}, None, True),  # a step alone takes 11 ms
        ({"ttft": 1.0, "tpot": 0.005}, None, False),  # so do 16 of them, 196 ms with the prompt: by the deadlines
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


WHOLE = "20 tokens of prompt and 16 of output take 195 ms here alone; asked 150 ms"


@pytest.mark.parametrize("policy", ["edf", "rubato", "qoserve", "scorpio"])
@pytest.mark.parametrize(
    ("slo", "known", "why"),
    [  # 10 ms and 1 ms a token: a prompt of 20 takes 30 ms, a decode 11 ms; at most 16 tokens of output
        ({"ttft": 0.025}, {}, "the prompt of 20 tokens takes 30 ms here alone; asked 25 ms"),
        ({"ttft": 0.5, "tpot": 0.003}, {}, None),  # all 16 are out when the first is due
        ({"ttft": 0.1, "tpot": 0.003}, {}, "a token takes 11 ms here alone; asked 3 ms"),
        ({"ttft": 0.1, "tpot": 0.003}, {"predicted": 8.0}, None),  # 107 ms, and 121 are there
        ({"ttft": 0.1, "tpot": 0.003}, {"predicted": 12.0}, "a token takes 11 ms here alone; asked 3 ms"),
        ({"e2e": 0.15}, {}, None),  # it may be short
        ({"e2e": 0.15}, {"predicted": 8.0}, None),
        ({"e2e": 0.15}, {"predicted": 16.0}, WHOLE),
        ({"e2e": 0.15}, {"fixed": True}, WHOLE),
        ({"e2e": 0.15}, {"fixed": True, "predicted": 2.0}, WHOLE),
        ({"e2e": 0.025}, {}, "20 tokens of prompt take 30 ms here alone; asked 25 ms"),
    ],
)
def test_what_cannot_be_met_alone_is_refused_with_the_numbers(
    policy: str, slo: dict[str, float], known: dict[str, Any], why: str | None
) -> None:
    """Where the client asked for that; else it is served, and where it can be met alone it is admitted."""
    one = request("a", 20, refuse=True, **slo)
    if known.get("fixed"):
        one = replace(one, sampling=replace(one.sampling, ignore_eos=True))
    due = min(slo.get("ttft", inf), slo.get("e2e", inf))
    asked = Seq(one, 20, due=due, predicted=known.get("predicted"))
    drop = load(policy).plan(seen([asked], [])).drop
    if why is None:  # qoserve takes the longest output for sure, and so the e2e for late
        assert drop in ({}, {"a": "rejected-slo-late"} if policy == "qoserve" else {})
    else:
        assert drop == {"a": f"rejected-slo-infeasible: {why}"}
    patient = replace(asked, request=replace(one, on_decline="best_effort"))
    assert "a" in work(load(policy).plan(seen([patient], [])))


def test_nothing_is_claimed_of_a_token_where_the_engine_drafts() -> None:
    asked = Seq(request("a", 20, ttft=0.1, tpot=0.003, refuse=True), 20, due=0.1)
    view_ = seen([asked], [])
    assert why_infeasible(asked, view_) is not None
    assert why_infeasible(asked, replace(view_, supports=frozenset({"draft"}))) is None


def test_one_request_in_32_is_not_judged_by_its_predicted_length() -> None:
    """Else a mean that has once grown too long would refuse each request that could correct it."""
    asked = [Seq(request(f"q{i}", 20, e2e=0.15, refuse=True), 20, predicted=16.0) for i in range(3200)]
    assert 70 < sum(known_output(one) is None for one in asked) < 130


def test_priority_goes_by_ttft_then_tpot_then_e2e_then_arrival() -> None:
    waiting = [
        Seq(request("free", 10), 10),
        Seq(request("e2e", 10, e2e=0.1), 10),
        Seq(request("tpot", 10, tpot=0.1), 10),
        Seq(request("later", 10, ttft=1.0, arrival=0.2), 10),
        Seq(request("sooner", 10, ttft=1.0, arrival=0.1), 10),
        Seq(request("paced", 10, ttft=1.0, tpot=0.5, arrival=0.3), 10),
        Seq(request("tight", 10, ttft=0.5, arrival=0.4), 10),
    ]
    plan = load("priority", {"budget": 62}).plan(seen(waiting, []))
    assert list(work(plan).items()) == [
        ("tight", 10), ("paced", 10), ("sooner", 10), ("later", 10), ("tpot", 10), ("e2e", 10), ("free", 2),
    ]  # fmt: skip


def test_prefill_first_preempts_where_later_prompts_have_taken_all_kv() -> None:
    """Two tool loops, each back with a prompt that lacks memory: the one started last gives up its own."""
    running = [Seq(request(id, 30), 30, 20, 2) for id in "ab"]
    plan = SpelledOut("prefill_first").plan(view([], running, kv_free=0, kv_total=4, limits=LIMITS))
    assert (work(plan), plan.preempt) == ({"a": 10}, ("b",))


def test_priority_pauses_the_looser_when_tokens_lack_and_leaves_them_their_kv() -> None:
    plan = load("priority", {"budget": 60}).plan(seen([prompt("a", 60, ttft=1.0)], [decode("free")]))
    assert work(plan) == {"a": 60}
    assert plan.preempt == ()


def test_priority_takes_kv_from_the_loosest_for_one_that_waits() -> None:
    """A prompt of 15 tokens lacks two blocks: both of the best-effort one, none of the one in between."""
    running = [decode("free"), decode("mid", ttft=2.0), decode("tight", ttft=1.0)]
    plan = load("priority").plan(seen([prompt("a", 15, ttft=1.0)], running, kv_free=2))
    assert plan.preempt == ("free",)
    assert work(plan) == {"tight": 1, "a": 15, "mid": 1}


def test_priority_takes_no_kv_for_one_that_waits_from_its_own_priority_nor_in_vain() -> None:
    plan = load("priority").plan(seen([prompt("a", 30, ttft=1.0)], [decode("r", ttft=1.0)], kv_free=1))
    assert plan.preempt == ()
    assert work(plan) == {"r": 1}
    plan = load("priority").plan(seen([prompt("a", 60, ttft=1.0)], [decode("free")], kv_free=1))
    assert plan.preempt == ()
    assert work(plan) == {"free": 1}


def test_priority_gives_up_its_own_kv_when_nobody_is_looser() -> None:
    older, younger = decode("older", ttft=1.0), decode("younger", ttft=1.0)
    plan = load("priority").plan(seen([prompt("w", 5)], [younger, older], kv_free=0))
    assert plan.preempt == ("younger",)
    assert work(plan) == {"older": 1}  # and what waits behind does not get what was given back


def test_priority_gives_the_starved_a_turn_and_lets_it_keep_its_kv() -> None:
    policy = load("priority", {"budget": 20, "turn_every": 2, "turn_tokens": 3, "max_wait": 1.0})
    tight = prompt("tight", 20, ttft=0.5)
    waiting, busy = Seq(request("free", 10), 10), seen([tight, Seq(request("free", 10), 10)], [], now=2.0)
    assert [work(policy.plan(busy)) for _ in range(4)] == [{"tight": 20}, {"free": 3, "tight": 17}] * 2
    assert work(policy.plan(seen([tight, waiting], [], now=0.5))) == {"tight": 20}  # it has not waited for long yet
    held = decode("free")
    assert policy.plan(seen([prompt("a", 11, ttft=0.5)], [held], kv_free=1, now=0.5)).preempt == ("free",)
    assert policy.plan(seen([prompt("a", 11, ttft=0.5)], [held], kv_free=1, now=2.0)).preempt == ()


def test_round_robin_takes_turns() -> None:
    router = load_router("round_robin")
    held = [request(id, 10) for id in "abc"]
    assert router.place(shown(*held), fleet(0, 0), 0.0).place == {"a": "r0", "b": "r1", "c": "r0"}
    assert router.place(shown(request("d", 10)), fleet(0, 0), 0.0).place == {"d": "r1"}


def test_least_loaded_counts_what_it_has_just_placed() -> None:
    router = load_router("least_loaded", {"per_request": 0})
    held = [request(id, 50) for id in "abc"]
    assert router.place(shown(*held), fleet(80, 0), 0.0).place == {"a": "r1", "b": "r1", "c": "r0"}


PREFILL, DECODE = Role("prefill"), Role("decode")


def test_distserve_prefills_whole_prompts_in_order_and_hands_them_off() -> None:
    done, begun = decode("done"), Seq(request("begun", 60), 60, 20, 2)
    waiting = [prompt("a", 60), prompt("b", 30), prompt("c", 20), prompt("d", 5)]
    policy = load("distserve")
    plan = policy.plan(replace(seen(waiting, [done]), role=PREFILL))
    assert plan.handoff == {"done": "prefilled"}
    assert work(plan) == {"a": 60, "b": 30}  # c does not fit, and none passes it
    plan = policy.plan(replace(seen([prompt("long", 120)], []), role=PREFILL))
    assert work(plan) == {"long": 100}
    plan = policy.plan(replace(seen(waiting, [begun]), role=PREFILL))
    assert work(plan) == {"begun": 40}
    plan = load("distserve", {"budget": 25}).plan(replace(seen(waiting[1:], []), role=PREFILL))
    assert work(plan) == {"b": 25}
    short = replace(seen(waiting, [], kv_free=5), role=PREFILL, moving=[done])
    assert policy.plan(short) == Plan()  # it waits for what leaves


def test_distserve_decodes_all_and_sends_back_who_needs_a_prefill() -> None:
    running = [decode("r"), Seq(request("tool", 10), 40, 20, 2), decode("s")]
    plan = load("distserve").plan(replace(seen([prompt("lost", 30)], running), role=DECODE))
    assert (work(plan), plan.preempt, plan.handoff) == ({"r": 1, "s": 1}, ("tool",), {"lost": "declined"})
    plan = load("distserve").plan(replace(seen([], [decode("r"), decode("s")], kv_free=0), role=DECODE))
    assert (work(plan), plan.preempt) == ({"r": 1}, ("s",))
    with pytest.raises(ValueError, match="under a router that divides them"):
        load("distserve").plan(seen([], [decode("r")]))


def pools(prefill: list[int], decode: list[int]) -> list[View]:
    """Prefill replicas with this much pending, decode replicas with this much KV free, of 40 blocks."""
    busy = [replace(seen([prompt(f"p{n}", n)] if n else [], []), id=f"p{i}", role=PREFILL)
            for i, n in enumerate(prefill)]  # fmt: skip
    return busy + [replace(seen([], [], kv_free=n), id=f"d{i}", role=DECODE) for i, n in enumerate(decode)]


def test_distserve_places_by_pending_tokens_and_then_by_free_kv() -> None:
    router = load_router("distserve", {"watermark": 0.1})
    held = [request("a", 50), moved("b", 60), request("c", 50), moved("d", 60), moved("e", 250), moved("f", 10)]
    dispatch = router.place(shown(*held), pools([30, 0], [20, 25]), 0.0)
    assert dispatch.place == {"a": "p1", "c": "p0", "b": "d1", "d": "d0"}  # e finds no room, and f does not pass it
    assert dispatch.reject == {}
    free = router.place(shown(moved("e", 380)), pools([0], [40]), 0.0)
    assert free.place == {"e": "d0"}  # alone it may take what is kept free beside others
    assert router.place(shown(request("g", 390)), pools([0], [40]), 0.0).reject == {"g": "rejected-exceeds-kv"}
    assert "none is left to prefill" in router.place(shown(request("h", 5)), pools([], [40]), 0.0).reject["h"]


def test_distserve_gives_a_replica_that_has_come_the_part_that_lacks() -> None:
    router = load_router("distserve", {"prefill": 1, "decode": 2})
    held = shown(request("a", 50), moved("b", 60))
    for views, phase, place in (
        (pools([0], []), "decode", {"a": "p0", "b": "new"}),
        (pools([], [40]), "prefill", {"a": "new", "b": "d0"}),
        (pools([0], [20]), "decode", {"a": "p0", "b": "new"}),
        (pools([0], [20, 20]), "decode", {"a": "p0", "b": "new"}),
        (pools([9], [20, 20, 20]), "prefill", {"a": "new", "b": "d0"}),
    ):
        views.append(replace(pools([], [40])[0], id="new", role=Role()))
        dispatch = router.place(held, views, 0.0)
        assert (dispatch.assign, dispatch.place) == ({"new": Role(phase)}, place)  # type: ignore[arg-type]


def test_distserve_takes_whom_it_can_hold_to_the_end() -> None:
    """40 blocks of 10, of which one that runs holds 2 and takes 30 in the end: 110 and 16 tokens more do not fit."""
    fleet = pools([0], [40])
    fleet[1] = replace(fleet[1], running=[replace(decode("r"), predicted=279.0)], kv_free=38)
    assert load_router("distserve").place(shown(moved("a", 110)), fleet, 0.0).place == {"a": "d0"}
    whole = load_router("distserve", {"reserve_kv": True})
    assert whole.place(shown(moved("a", 110)), fleet, 0.0).place == {}
    assert whole.place(shown(moved("b", 80)), fleet, 0.0).place == {"b": "d0"}


@pytest.mark.parametrize(
    ("settings", "replicas", "prefill"),
    [((1, 1), 2, 1), ((2, 1), 3, 2), ((1, 2), 3, 1), ((1, 1), 5, 2), ((9, 1), 2, 1), ((1, 9), 4, 1), ((2, 1), 6, 4)],
)
def test_distserve_divides_the_fleet(settings: tuple[int, int], replicas: int, prefill: int) -> None:
    router = Router(*settings)
    roles = router.roles([f"r{i}" for i in range(replicas)])
    assert [role.phase for role in roles.values()] == ["prefill"] * prefill + ["decode"] * (replicas - prefill)
    with pytest.raises(ValueError, match="at least 2 replicas"):
        router.roles(["r0"])


def chained(id: str, n: int) -> Seq:
    seq = decode(id)
    seq.draft = Tree(tuple(range(-1, n - 1)), (0.5,) * n)
    return seq


def test_vllm_spec_verifies_every_chain_and_drafts_for_all_who_sample() -> None:
    policy = load("vllm_spec", {"n": 3, "budget": 12})
    plan = policy.plan(seen([prompt("a", 4), prompt("b", 30)], [chained("r", 3), decode("s")]))
    assert plan.work == (
        Work("r", 1, (0, 1, 2), (3, 1)), Work("s", 1, (), (3, 1)), Work("a", 4, (), (3, 1)), Work("b", 3),
    )  # fmt: skip
    plan = policy.plan(seen([], [chained("q", 9), chained("r", 9)]))
    assert plan.work == (Work("q", 1, tuple(range(9)), (3, 1)), Work("r", 1, (0,), (3, 1)))  # what the budget leaves


def test_vllm_spec_takes_kv_for_drafted_tokens() -> None:
    plan = load("vllm_spec").plan(seen([], [chained("r", 4), decode("s", 21)], kv_free=0))
    assert plan.work == (Work("r", 1, (0, 1, 2, 3), (4, 1)),)
    assert plan.preempt == ("s",)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("vlm", {}, "unknown policy 'vlm': did you mean 'vllm'"),
        ("edf", {"saftey_margin": 0.1}, "has no setting 'saftey_margin': did you mean 'safety_margin'"),
        ("edf", {"turn_every": "often"}, "setting turn_every is 'often'; give a whole number"),
        ("edf", {"turn_every": 1}, "turn_every 1 must be at least 2"),
        ("distserve", {"budget": -1}, "budget is -1: give the tokens of a prefill batch"),
        ("vllm_spec", {"n": 0}, "budget 2048, n 0: give at least 1"),
        ("priority", {"max_wait": -1.0}, "max_wait -1.0: give >= 1 token and >= 0 seconds"),
        ("round_robin", {}, "has no Scheduler; it defines Router"),
        ("no.such.module", {}, "unknown policy|cannot be imported"),
    ],
)
def test_what_is_wrong_is_named(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        load(name, settings)


def test_every_policy_says_what_it_is_what_for_and_where_it_comes_from() -> None:
    described = list(describe())
    assert {name for name, *_ in described} == set(names())
    for name, _, about, source, _ in described:
        assert about.endswith((".", "once.")), name
        assert len(source) > 10, name
        doc = importlib.import_module(f"rubato.policies.{name}").__doc__ or ""
        assert doc.split("\n\n")[1].startswith("For "), f"{name}: the second paragraph says what it is for"


def test_edf_keeps_nothing_of_a_request_that_goes_on_elsewhere() -> None:
    policy: Any = policies.load("edf")
    seq = Seq(request("a", 4000, ttft=0.1, arrival=0.0), 4000, due=0.1)
    policy.plan(seen([seq], []))
    assert (policy._requests.losses.tiers, policy._requests.losses.set_aside) == ({"a": seq.request.tier}, {"a"})
    policy.observe((HandedOff(0.0, "a", seq.request),))
    assert (policy._requests.losses.tiers, policy._requests.losses.set_aside) == ({}, set())
