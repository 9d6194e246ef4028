"""View in, plan out: one small case a rule of `slos_serve`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest

from rubato import policies
from rubato.core.events import Demoted, Finished, Tokens
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan, Shape
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.policies import PolicyError
from rubato.policies.slos_serve import Scheduler
from rubato.policies.slos_serve.batch_capacity import BatchCapacity
from rubato.policies.slos_serve.demand import Demand, DemandReader, prefill_token_weight, prompt_stage, tightest_tpot
from rubato.policies.slos_serve.scheduler import MAX_DECISIONS
from rubato.policy_kit.batch_builder import blocks_at_end
from rubato.simulation.run_spec import oracle_lengths
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, Seq, request, run_spec, view
from tests.kit.plans import SpelledOut, decode, prompt, seen, work

# A step takes 10 ms and 1 ms a token; 40 blocks of 10 tokens.


def plan(shown: View, **settings: object) -> Plan:
    return SpelledOut("slos_serve", settings).plan(shown)


def test_requests_that_cannot_be_in_time_are_demoted_or_refused_and_the_rest_admitted() -> None:
    able, late, refused = prompt("a", 30, ttft=0.1), prompt("b", 95, ttft=0.1), prompt("c", 99, ttft=0.1, refuse=True)
    made = plan(seen([able, late, refused], []))
    assert made.demote == ("b",)
    assert made.drop == {"c": "rejected-slo-infeasible: the prompt of 99 tokens takes 109 ms here alone; asked 100 ms"}
    assert next(iter(work(made).items())) == ("a", 30)


def test_best_effort_fills_what_is_left_of_the_batch() -> None:
    """No TPOT bounds it: a batch of 100 tokens, the engine's largest, takes 110 ms."""
    made = plan(seen([prompt("patient", 200), prompt("a", 30, ttft=0.5)], []))
    assert work(made) == {"a": 30, "patient": 70}


def test_a_batch_is_as_long_as_the_tightest_tpot() -> None:
    running = [decode("loose", tpot=0.1, due=0.1), decode("tight", tpot=0.04, due=0.04)]
    made = plan(seen([prompt("a", 200, ttft=2.0)], running))
    assert sum(work(made).values()) == 30  # 10 ms + 30 tokens of 1 ms


class Off(Linear):
    """A model that has been off by half of late."""

    spread = 0.5


def test_batches_are_shorter_by_as_much_as_the_model_was_off() -> None:
    """40 ms are 26.7 ms and a half more: 10 ms and 16 tokens."""
    running = [decode("loose", tpot=0.1, due=0.1), decode("tight", tpot=0.04, due=0.04)]
    shown = seen([prompt("a", 200, ttft=2.0)], running, latency=Off())
    assert sum(work(plan(shown)).values()) == 16
    assert sum(work(plan(shown, safety_margin=0.0)).values()) == 30


def test_one_that_comes_from_a_lost_replica_after_its_first_token_is_prefilled_though_nothing_of_it_is_due() -> None:
    moved = replace(prompt("moved", 30, ttft=0.1), length=34, output=4, due=inf)
    assert work(plan(seen([moved], []))) == {"moved": 34}


def test_batches_are_long_until_a_tighter_request_decodes() -> None:
    """30 ms a token is due from 0.3 s on: until then batches are bounded by the loose one."""
    made = plan(seen([prompt("a", 20, ttft=0.3, tpot=0.03)], [decode("loose", tpot=0.1, due=0.1)]))
    assert work(made) == {"loose": 1, "a": 20}
    assert not made.demote


def test_whose_output_does_not_fit_in_memory_is_declined() -> None:
    """40 blocks: 100 + 16 tokens take 12, 300 + 16 take 32."""
    made = plan(seen([prompt("a", 100, ttft=2.0), prompt("b", 300, ttft=9.0)], []))
    assert made.demote == ("b",)
    longer = replace(prompt("b", 250, ttft=9.0), predicted=20.0)
    assert not plan(seen([prompt("a", 100, ttft=2.0), longer], [])).demote


def test_none_of_a_burst_runs_before_it_is_decided() -> None:
    """Those due last wait for the next step: run as best effort they could not be refused any more."""
    burst = [prompt(f"q{i:02}", 2, ttft=2.0 + i, refuse=True) for i in range(MAX_DECISIONS + 3)]
    made = plan(seen(burst, []))
    assert work(made)
    last = {f"q{i:02}" for i in range(MAX_DECISIONS, MAX_DECISIONS + 3)}
    assert not last & {*work(made), *made.drop, *made.demote}


def test_best_effort_gives_up_its_kv_first() -> None:
    patient = replace(decode("patient", 201), request=request("patient", 200))
    tight = prompt("a", 250, ttft=2.0)
    made = plan(seen([tight], [patient], kv_free=5))
    assert made.preempt == ("patient",)
    assert "a" in work(made)


def test_values_decide_whom_to_admit() -> None:
    """60 tokens fit by the deadline: two short prompts, or a long one worth three."""
    short = [prompt("a", 30, ttft=0.1), prompt("b", 30, ttft=0.1)]
    long = prompt("c", 80, ttft=0.1)
    long = replace(long, request=replace(long.request, tier="gold"))
    assert plan(seen([*short, long], [])).demote == ("c",)
    assert plan(seen([*short, long], []), tier_values={"gold": 3.0}).demote == ("a", "b")


def test_one_token_has_no_pace() -> None:
    """No batch is as short as 5 ms, but no request waits for a second token."""
    asked = prompt("a", 30, ttft=0.1, tpot=0.005, refuse=True)
    one = replace(asked, request=replace(asked.request, sampling=Sampling(max_tokens=1)))
    assert plan(seen([asked], [])).drop
    assert work(plan(seen([one], []))) == {"a": 30}


def test_who_is_declined_does_not_shorten_batches() -> None:
    """5 ms a token, and a first token in 15 ms, are more than any batch can do: those of best effort stay as long."""
    patient = prompt("patient", 200)
    for infeasible in (prompt("a", 30, ttft=0.1, tpot=0.005), prompt("a", 30, ttft=0.015)):
        scheduler = Scheduler()
        assert work(scheduler.plan(seen([patient], [])))["patient"] == 100
        made = scheduler.plan(seen([infeasible, patient], []))
        assert made.demote == ("a",)
        assert sum(work(made).values()) == 100


def test_a_declined_request_that_fits_after_all_is_promoted() -> None:
    made = plan(seen([prompt("a", 30, ttft=0.2, demoted=True)], []))
    assert made.promote == ("a",)
    gone = replace(prompt("a", 30, ttft=0.2, demoted=True), missed=True)
    assert not plan(seen([gone], [])).promote


def test_a_decode_behind_counts_in_the_next_tighter_tier() -> None:
    seqs = [
        decode("behind", tpot=0.1, due=0.001),
        decode("tight", tpot=0.05, due=0.05),
        decode("late", tpot=0.05, due=-1),
    ]
    behind, tight, late = DemandReader(0.0, 10).demands(seqs, 0.02)
    assert (behind.due, behind.tpot) == (0.0, 0.05)
    assert (tight.due, tight.tpot) == (0.05, 0.05)
    assert (late.due, late.tpot) == (0.0, pytest.approx(0.04))


def test_a_prompt_that_cannot_be_in_time_any_more_is_given_up() -> None:
    scheduler = Scheduler()
    a = prompt("a", 60, ttft=0.1)
    scheduler.plan(seen([a], []))
    assert set(scheduler.promised_ids) == {"a"}
    made = scheduler.plan(seen([a], [], now=0.05))  # nothing was run, and 70 ms are needed
    assert made.demote == ("a",)
    assert not scheduler.promised_ids


def test_stages() -> None:
    """A promise is for a prompt and the decode-only stages after it, at the tightest TPOT of them."""
    stages = (
        Stage(10, SLO(1.0, 0.1), "</think>"), Stage(0, SLO(tpot=0.05), "tool"), Stage(7, SLO(1.0, 0.2)),
    )  # fmt: skip
    asked = Request("a", stages, 0.0, sampling=Sampling(max_tokens=30))
    thinking = Seq(asked, length=15, cached=14)
    assert (tightest_tpot(thinking), prompt_stage(thinking), blocks_at_end(thinking, 1)) == (0.05, 0, 10 + 7 + 30)
    answering = replace(thinking, stage=1)
    assert (tightest_tpot(answering), prompt_stage(answering)) == (0.05, 0)
    returned = replace(thinking, stage=2, length=40, cached=32)
    assert (tightest_tpot(returned), prompt_stage(returned), blocks_at_end(returned, 1)) == (0.2, 2, 10 + 7 + 30)


def test_a_tools_return_is_decided_anew_and_keeps_its_kv() -> None:
    """The second prompt cannot be done in 50 ms: the round is declined, its KV stays, and nothing starts over."""
    stages = (Stage(20, SLO(1.0, 0.1), "tool"), Stage(80, SLO(0.05, 0.1)))
    asked = Request("a", stages, 0.0, sampling=Sampling(max_tokens=8), on_decline="refuse")
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=500, kv_blocks=40, block_size=10)
    spec = run_spec(Linear(), limits, "slos_serve", lengths=oracle_lengths)
    events = simulate_events([asked], {"a": (5, 3)}, spec)
    [demoted] = [e for e in events if isinstance(e, Demoted)]
    assert demoted.at == [e.at for e in events if isinstance(e, Tokens)][4]
    [end] = [e for e in events if isinstance(e, Finished)]
    assert (end.outcome, end.output, end.best_effort) == ("completed", 8, True)


def test_the_oldest_without_a_promise_is_counted_as_promised_in_time() -> None:
    """A decode without a promise that has waited for 4 s is in the batch before a prompt due after it."""
    patient = replace(decode("patient"), request=request("patient", 20, arrival=-5.0), stage_start=-5.0, output=1)
    assert patient.due == inf
    made = plan(seen([prompt("a", 99, ttft=3.0, tpot=0.05)], [patient]))
    assert next(iter(work(made))) == "patient"


def test_the_oldest_without_a_promise_has_to_wait_for_memory_that_is_promised() -> None:
    """Of 40 blocks the promised decode takes 31 in the end; the patient prompt has room now, not to its own end."""
    promised = replace(decode("p", tpot=0.05, due=0.05), predicted=280.0)
    for predicted, starts in ((270.0, False), (10.0, True)):
        seq = Seq(request("patient", 70, arrival=-5.0), 70, 0, 0, 0, stage_start=-5.0)
        made = plan(seen([replace(seq, predicted=predicted)], [promised], kv_free=38))
        assert ("patient" in work(made)) == starts
        assert not made.preempt


@pytest.mark.parametrize(
    ("fixed", "settings", "tokens"),
    [
        (0.01, {}, 190),
        (0.099, {}, 901),
        (0.099, {"max_batch_seconds": 0.2}, 101),
        (0.099, {"max_batch_seconds": 3}, 999),
    ],
)
def test_a_batch_is_ten_steps_of_one_token_where_these_take_longer_than_200_ms(
    fixed: float, settings: dict[str, object], tokens: int
) -> None:
    """Steps of 100 ms, as on CPUs: half of a batch of 200 ms is what any step costs."""
    shown = seen([prompt("a", 999, ttft=20.0)], [], kv_free=400)
    limits = replace(shown.limits, max_num_batched_tokens=2048)
    made = plan(replace(shown, kv_total=400, limits=limits, latency=Linear(fixed)), **settings)
    assert work(made) == {"a": tokens}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"safety_margin": -0.1}, "0 or more"),
        ({"max_batch_seconds": 0.0}, "seconds, more than 0"),
        ({"max_hops": -2}, "0 hops or more, or -1"),
        ({"promise": "late"}, "promise is 'late': give one of start, arrival"),
        ({"tier_values": {"gold": 0}}, "numbers above 0 by tier"),
        ({"tier_values": {"gold": True}}, "numbers above 0 by tier"),
        ({"tier_values": None}, "numbers above 0 by tier"),
        ({"tier_values": ["gold"]}, "numbers above 0 by tier"),
        ({"safety_margin": "10%"}, "safety_margin is '10%'"),
        ({"safety_margin": inf}, "safety_margin is inf"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        policies.load("slos_serve", settings)


@pytest.mark.parametrize(
    ("promise", "first", "declined"), [("start", 29, ("long",)), ("arrival", 29, ("c", "d")), ("start", 20, ("d",))]
)
def test_an_admission_is_open_until_the_prompt_starts(promise: str, first: int, declined: tuple[str, ...]) -> None:
    """Batches of 40 ms hold 29 tokens beside the decode: four of them the long prompt or the two others. Where the
    first batch has room beside `a` the long one has begun, and what is left of it leaves room for one."""
    policy, running = Scheduler(promise=promise), decode("tight", tpot=0.04, due=0.04)
    a, long = prompt("a", first, ttft=0.06), prompt("long", 80, ttft=0.2)
    made = policy.plan(seen([a, long], [running]))
    begun = 29 - first
    assert work(made) == {"a": first} | ({"long": begun} if begun else {})
    assert made.decode_all
    long, running = replace(long, cached=begun, blocks=-(-begun // 10)), replace(running, due=0.08)
    new = [replace(prompt(id, 40, ttft=0.2), stage_start=0.04) for id in "cd"]
    waiting, runs = ([long, *new], [running]) if not begun else (new, [running, long])
    made = policy.plan(seen(waiting, runs, now=0.04))
    assert made.demote == declined


def test_a_promise_that_cannot_be_kept_any_more_ends_as_its_client_asked() -> None:
    """Both are promised; then a step takes a second."""
    policy = Scheduler()
    waiting = [prompt("a", 20, ttft=0.5, refuse=True), prompt("b", 20, ttft=0.5)]
    assert not policy.plan(seen(waiting, [])).demote
    assert policy.promised_ids == {"a", "b"}
    late = policy.plan(seen(waiting, [], now=1.0))
    assert late.demote == ("b",)
    assert late.drop == {"a": "rejected-slo-late"}


def test_kv_models_are_asked_for_full_lengths() -> None:
    """With KV in the step time, fewer are admitted than tokens alone would let in."""

    def admitted(per_kv: float) -> int:
        new = [prompt(f"q{i}", 20, ttft=0.5, tpot=0.05) for i in range(8)]
        made = Scheduler().plan(view(new, [], latency=Linear(per_kv=per_kv)))  # type: ignore[arg-type]
        return 8 - len(made.demote)

    assert admitted(0.0) == 8
    assert admitted(0.0002) < 8


# --------------------------------------------------------------------------- decodes of long contexts

DEEP = Linear(0.01, 1e-4, 2e-5)  # a decode of 500 tokens takes 10.1 ms, a token of prefill 0.1 ms and a little
ROOM = Limits(max_num_seqs=8, max_num_batched_tokens=1000, max_model_len=4000, kv_blocks=400, block_size=10)


def deep(waiting: list[Seq], running: list[Seq]) -> View:
    return view(waiting, running, kv_free=100, kv_total=400, limits=ROOM, latency=DEEP)


def test_a_token_of_prefill_counts_what_it_costs_beside_a_decodes() -> None:
    assert prefill_token_weight(seen([], [decode("a"), decode("b")])) == 1.0  # a roofline: tokens are tokens
    assert prefill_token_weight(seen([], [])) == 1.0
    prefill_weight = prefill_token_weight(deep([], [decode(id, 500, tpot=0.2, due=1.0) for id in "abcd"]))
    assert prefill_weight == pytest.approx(1.0 / 84, rel=0.2)  # 0.12 ms of 10.1 ms, to the next step of √2


@pytest.mark.parametrize("prefill_weight", [1.0, 0.25, 1.0 / 64])
def test_whatever_a_capacity_counts_as_fitting_fits(prefill_weight: float) -> None:
    """Of any number of decodes, and the chunk that leaves."""
    running = [decode(id, 500, tpot=0.2, due=1.0) for id in "abcd"]
    shown = deep([], running)
    demands = [Demand(s.id, 1.0, 1, 0.2, 50) for s in running]
    capacity = BatchCapacity(shown, running, demands, 0.0, prefill_weight)
    for seconds in (0.015, 0.03, 0.06, 0.2):
        for decodes in range(min(4, capacity.tokens(seconds)) + 1):
            chunk = min(
                ROOM.max_num_batched_tokens - decodes, int((capacity.tokens(seconds) - decodes) / prefill_weight)
            )
            shape = Shape(decodes, decodes, 500 * decodes)
            if chunk:
                shape = shape.plus(chunk, 0)
            assert DEEP.step_time(shape) <= seconds + 1e-9 or decodes + chunk == 0


@pytest.mark.parametrize("prefill_weight", [1.0, 1.0 / 16])
def test_decodes_beside_a_prompt_may_be_the_longest_ones(prefill_weight: float) -> None:
    """One of 1,000 tokens, 30 ms alone, and three of 20: whichever are due by then, they and the chunk are in time."""
    lengths = {"long": 1000, "a": 20, "b": 20, "c": 20}
    running = [decode(id, length, tpot=0.2, due=1.0) for id, length in lengths.items()]
    demands = [Demand(s.id, 1.0, 1, 0.2, s.length // 10) for s in running]
    capacity = BatchCapacity(deep([], running), running, demands, 0.0, prefill_weight)
    assert capacity.tokens(0.029) == capacity.beside(0.029, 1) == 0
    for seconds in (0.02, 0.031, 0.05):
        for decodes in range(1, 5):
            beside = capacity.beside(seconds, decodes)
            chunk = min(ROOM.max_num_batched_tokens - decodes, int((beside - decodes) / prefill_weight))
            kv = sum(sorted(lengths.values(), reverse=True)[:decodes])
            assert beside == 0 or DEEP.step_time(Shape(decodes, decodes, kv).plus(chunk, 0)) <= seconds + 1e-9
    assert capacity.beside(0.05, 4) > 4


def test_decodes_that_are_ahead_wait_for_a_prompt_due_before_a_batch_of_theirs_would_end() -> None:
    """All four decodes take 50 ms and have 1 s; the prompt takes 13 ms and has 30."""
    new = prompt("new", 20, ttft=0.03, tpot=0.4)
    made = plan(deep([new], [decode(id, 500, tpot=0.4, due=1.0) for id in "abcd"]))
    assert work(made)["new"] == 20
    assert len(work(made)) == 2  # one decode fits beside
    assert not made.demote
    assert plan(deep([new], [decode(id, 500, tpot=0.4, due=0.06) for id in "abcd"])).demote == ("new",)


class Launching(Linear):
    """A prompt in the batch, however short, is 3.5 ms more."""

    def step_time(self, shape: Shape) -> float:
        return super().step_time(shape) + (0.0035 if shape.chunks else 0.0)


def test_who_cannot_wait_for_the_next_batch_comes_before_decodes_that_are_ahead_or_were_passed_over() -> None:
    """Batches of 22 ms hold twelve decodes, so three are passed over in the first. The second holds eight tokens, for
    the prompt's six are among them: it is due after 30 ms, one decode after 40, all others after 50 s."""
    served = SpelledOut("slos_serve", {"max_batch_seconds": 0.01})
    ahead = [decode(id, tpot=1.0, due=50.0) for id in "abcdefghijklmno"]
    more = {"limits": replace(seen([], []).limits, max_num_seqs=20), "kv_total": 400, "latency": Launching()}
    assert len(work(served.plan(seen([], ahead, **more)))) == 12
    new = prompt("new", 6, ttft=0.052, tpot=1.0)
    shown = seen([new], [*ahead[:-1], replace(ahead[-1], due=0.062)], now=0.022)
    assert work(served.plan(replace(shown, **more))) == {"new": 6, "o": 1, "m": 1}


@pytest.mark.parametrize(
    ("rule", "output", "taken"), [("windowed", 11, 39), ("windowed", 15, 95), ("deadline", 11, 95), ("mean", 11, 95)]
)
def test_decodes_keep_their_pace_in_each_window_of_ten_that_is_judged(rule: str, output: int, taken: int) -> None:
    """10 ms and 1 ms a token: the prompt's 95 would hold up a decode, far ahead, for 106 ms. Where windows are judged
    it has a token every 50 from the start of its window on, that is now; not if four of these are out already."""
    served, before = SpelledOut("slos_serve"), replace(decode("d", tpot=0.05, due=1.0), output=11)
    served.plan(seen([], [before], slo_rule=rule))
    shown = seen([prompt("a", 95, ttft=1.0)], [replace(before, output=output)])
    assert work(served.plan(replace(shown, slo_rule=rule))) == {"d": 1, "a": taken}


@pytest.mark.parametrize(("tpot", "taken"), [(1.0, "mnoabcdefghi"), (0.025, "abcdefghijkl")])
def test_decodes_that_are_ahead_take_turns_where_a_batch_does_not_hold_all(tpot: float, taken: str) -> None:
    """Batches of 22 ms hold 12. The decodes furthest ahead get no token, but not twice: unless the others need them."""
    served = SpelledOut("slos_serve", {"max_batch_seconds": 0.01})
    dues = dict.fromkeys("abcdefghijkl", tpot) | dict.fromkeys("mno", 50.0)
    for now, expected in ((0.0, "abcdefghijkl"), (0.022, taken)):
        shown = seen([], [decode(id, tpot=tpot, due=due) for id, due in dues.items()], now=now)
        made = served.plan(replace(shown, limits=replace(shown.limits, max_num_seqs=20)))
        assert "".join(work(made)) == expected
        dues = {id: due + tpot * (id in work(made)) for id, due in dues.items()}


def test_nobody_is_passed_over_twice_while_a_batch_holds_half() -> None:
    """Twelve of 15, as many times: those due first always, the six furthest ahead every other time."""
    served = SpelledOut("slos_serve", {"max_batch_seconds": 0.01})
    dues = {id: 10.0 * i for i, id in enumerate("abcdefghijklmno", start=1)}
    batches = []
    for step in range(10):
        shown = seen([], [decode(id, tpot=1.0, due=due) for id, due in dues.items()], now=0.022 * step)
        batches.append(work(served.plan(replace(shown, limits=replace(shown.limits, max_num_seqs=20)))))
        dues = {id: due + (id in batches[-1]) for id, due in dues.items()}
    assert {id: sum(id in batch for batch in batches) for id in dues} == dict.fromkeys("abcdefghi", 10) | dict.fromkeys(
        "jklmno", 5
    )
    assert all(id in one or id in next_ for one, next_ in pairwise(batches) for id in dues)
