"""Ascendra: which requests run, are offloaded or have a ticket; the paper's Fig. 1 from end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato import policies
from rubato.core.events import Event, Finished, HandedOff, Lost, Placed, Preempted, Started, Tokens, Verdict
from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Limits, Plan, Role
from rubato.core.request import SATURATED, SLO, Handoff, Request, Sampling, Stage
from rubato.policies import PolicyError
from rubato.policies.ascendra import HP, LP, Router, Scheduler, deadline
from rubato.simulation.simulate import simulate_events
from tests.conftest import few
from tests.fleet.routers import moved, places, serve
from tests.kit import Linear, Seq, plans, request, run_spec, shown, view
from tests.kit.fleets import Elsewhere, vanishes
from tests.kit.plans import LIMITS, load
from tests.policies.test_properties import Load, loads, run

STEP = Linear(0.0, 0.01)  # 10 ms a token


def decode(id: str, length: int = 21, **given: Any) -> Seq:
    """A running sequence with one token pending."""
    return Seq(request(id, 10), length, length - 1, -(-(length - 1) // 10), output=1, first_token_at=0.0, **given)


def begun(id: str, length: int, cached: int) -> Seq:
    """A running prompt, a part of it in KV."""
    return Seq(request(id, length), length, cached, -(-cached // 10))


def prompt(id: str, length: int, ttft: float | None = None, arrival: float = 0.0, **given: Any) -> Seq:
    return Seq(request(id, length, ttft=ttft, arrival=arrival), length, stage_start=arrival, **given)


def seen(
    kind: str, waiting: Sequence[Seq] = (), running: Sequence[Seq] = (), *, now: float = 0.0, kv_free: int = 40,
    latency: Linear = STEP, limits: Limits = LIMITS,
) -> View:  # fmt: skip
    return view(waiting, running, now=now, kv_free=kv_free, kv_total=40, limits=limits, latency=latency,
                role=Role(kind=kind, group="g0"), supports=Scheduler.needs)  # fmt: skip


def planned(view: View, **settings: Any) -> Plan:
    return load("ascendra", settings).plan(view)


def work(view: View, **settings: Any) -> dict[str, int]:
    return plans.work(planned(view, **settings))


# --------------------------------------------------------------------------- the paper's Fig. 1


def figure_1(
    policy: str, settings: dict[str, object], router: str
) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
    """Replica by replica, and from when to when, of five requests whose prompts take as long as they have tokens."""
    prompts = {"A": (3, 0.0), "B": (1, 0.0), "C": (2, 0.0), "D": (2, 0.0), "E": (2, 1.0)}
    requests = [request(id, n, ttft=5.0, arrival=at, most=1) for id, (n, at) in prompts.items()]
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=4, max_model_len=100, kv_blocks=100, block_size=1)
    spec = run_spec(Linear(0.0, 1.0), limits, policy, settings, router=router, replicas=2)
    events = simulate_events(requests, dict.fromkeys(prompts, (1,)), spec)
    times = {id: [e.at for e in events if isinstance(e, Started | Finished) and e.id == id] for id in prompts}
    return {id: places(events, id) for id in prompts}, times


def latest_start(seq: SeqView, view: View) -> float:
    """Which must start first: a token of a prompt takes a unit."""
    return seq.pending - deadline(seq)


def test_figure_1() -> None:
    where, when = figure_1("ascendra", {"theta": 0.0, "value": f"{__name__}.latest_start"}, "auto")
    assert where == {"A": ["r0"], "B": ["r1"], "C": ["r0", "r1"], "D": ["r0"], "E": ["r1"]}
    assert when == {"A": [0, 3], "B": [0, 1], "C": [3, 5], "D": [3, 5], "E": [1, 3]}


def test_figure_1_first_come_first_served() -> None:
    where, when = figure_1("prefill_first", {"budget": 3}, "round_robin")
    assert where == {"A": ["r0"], "B": ["r1"], "C": ["r0"], "D": ["r1"], "E": ["r0"]}
    assert when["E"] == [5, 7]  # due at 6


# --------------------------------------------------------------------------- low priority


def test_an_lp_runs_decodes_then_whole_prompts_that_are_due_first() -> None:
    waiting = [prompt("late", 10, 9.0), prompt("soon", 10, 2.0), prompt("long", 50, 2.2)]
    plan = work(seen(LP, waiting, [decode("r")]))
    assert list(plan.items()) == [("r", 1), ("soon", 10), ("long", 50), ("late", 10)]


def test_it_stops_at_the_first_that_does_not_fit() -> None:
    waiting = [prompt("a", 60, 1.0), prompt("b", 40, 2.0), prompt("c", 5, 3.0)]
    assert work(seen(LP, waiting)) == {"a": 60}  # strictly: b would fill the batch
    assert work(seen(LP, [prompt("a", 60, 1.0), prompt("b", 39, 2.0)])) == {"a": 60, "b": 39}
    assert work(seen(LP, [prompt("a", 20, 1.0), prompt("b", 5, 2.0)], [decode("r")], kv_free=2)) == {"r": 1}
    assert work(seen(LP, [prompt("a", 20, 1.0), prompt("b", 5, 2.0)], [decode("r", 22)], kv_free=3)) == {
        "r": 1,
        "a": 20,
    }


def test_a_prompt_longer_than_a_batch_goes_in_chunks_with_no_other() -> None:
    waiting = [prompt("a", 250, 8.0), prompt("b", 5, 9.0)]
    assert work(seen(LP, waiting, [decode("r")])) == {"r": 1, "a": 99}
    rest = seen(LP, [prompt("b", 5, 2.0)], [decode("r"), begun("a", 250, 99)], kv_free=28)
    assert work(rest) == {"r": 1, "a": 99}
    last = seen(LP, [prompt("b", 5, 2.0)], [decode("r"), begun("a", 250, 198)], kv_free=18)
    assert work(last) == {"r": 1, "a": 52, "b": 5}


def test_where_nothing_runs_the_first_prompt_starts() -> None:
    """It takes all KV there is, which is not strictly less than there is."""
    assert work(seen(LP, [prompt("a", 95)], kv_free=40, limits=replace(LIMITS, max_num_batched_tokens=95))) == {"a": 95}
    assert work(seen(LP, [prompt("a", 400), prompt("b", 1)], kv_free=40)) == {"a": 100}


def test_a_prompt_must_be_through_before_the_next_token_is_due() -> None:
    """In 0.55 s, of which the decodes take 0.02; a prompt token takes 0.01."""

    def started(length: int, late: float = inf) -> bool:
        running = [decode("r", due=10.55), decode("s", due=late)]
        return "a" in work(seen(LP, [prompt("a", length, 99.0)], running, now=10.0))

    assert (started(52), started(54), started(54, late=9.9)) == (True, False, False)
    alone = seen(LP, [prompt("a", 54, 99.0)], [decode("s", due=9.9)], now=10.0)
    assert work(alone) == {"s": 1, "a": 54}, "a request that is late already is not waited for"


def test_an_lp_runs_128_at_most() -> None:
    limits = replace(LIMITS, max_num_seqs=200, max_num_batched_tokens=1000)
    running = [Seq(request(f"r{i}", 1), 2, 1, 1, output=1) for i in range(127)]
    plan = work(seen(LP, [prompt("a", 5), prompt("b", 5)], running, limits=limits))
    assert (len(plan), "a" in plan, "b" in plan) == (128, True, False)
    fixed = work(seen(HP, [prompt("a", 5), prompt("b", 5)], running, limits=limits), elastic=False)
    assert fixed == {"a": 5}
    assert len(work(seen(LP, [prompt("a", 5), prompt("b", 5)], running, limits=limits), batch_size=129)) == 129


def test_who_lacks_kv_takes_it_from_the_one_started_last_and_nobody_starts() -> None:
    for kind in (LP, HP):
        waiting = [prompt("a", 5)] if kind == LP else []
        plan = planned(seen(kind, waiting, [decode("r"), decode("s")], kv_free=0))
        assert (plan.preempt, [w.seq for w in plan.work]) == (("s",), ["r"])


def test_who_cannot_be_in_time_any_more_goes_last_but_before_best_effort() -> None:
    """At 10 s; a prompt token takes 10 ms."""
    late, hopeless, able = prompt("late", 5, 9.0), prompt("hopeless", 20, 10.19), prompt("able", 20, 10.21)
    waiting = [prompt("free", 5), late, hopeless, able]
    waiting[0].demoted = True
    for value in ("edf", "sjf"):
        assert next(iter(work(seen(LP, waiting, now=10.0), value=value))) == "able"
    assert list(work(seen(LP, waiting, now=10.0))) == ["able"], "who joins would make it late"
    assert list(work(seen(LP, waiting[:3], now=10.0))) == ["late", "hopeless", "free"]
    resumed = prompt("resumed", 5, 9.0, first_token_at=8.0, output=2)
    assert next(iter(work(seen(LP, [able, resumed], now=10.0)))) == "resumed", "its first token is out"


def test_a_prompt_counts_what_it_adds_to_the_step() -> None:
    """A step takes 0.1 s and 10 ms a token, and must end in 0.55 s: 44 tokens beside a decode, in one prompt or two."""
    latency = Linear(0.1, 0.01)

    def started(*lengths: int) -> list[int]:
        waiting = [prompt(f"q{i}", n, 99.0 + i) for i, n in enumerate(lengths)]
        plan = work(seen(LP, waiting, [decode("r", due=10.55)], now=10.0, latency=latency))
        return [n for id, n in plan.items() if id != "r"]

    assert (started(43), started(45), started(22, 21), started(22, 23)) == ([43], [], [22, 21], [22])


def test_a_prompt_must_not_make_a_mean_tbt_late() -> None:
    """The first token came at 0, the next is due at 9 by its deadline and at 0.5 by the mean."""
    running = [decode("r", due=9.0)]
    running[0].request = replace(running[0].request, stages=(Stage(10, SLO(ttft=8.5, tpot=0.5)),))
    assert [len(work(seen(LP, [prompt("a", n, 99.0)], running))) for n in (48, 50)] == [2, 1]


def by_id(seq: SeqView, view: View) -> float:
    """The last letter first."""
    return float(ord(seq.id))


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("edf", "bcda"),  # due at 0.9, 1.0 and 1.05, then the one without a TTFT
        ("sjf", "cdab"),
        ("ljf", "bdac"),
        ("fcfs", "bacd"),
        ("tests.policies.test_ascendra:by_id", "dcba"),
        ("tests.policies.test_ascendra.by_id", "dcba"),
    ],
)
def test_values(value: str, order: str) -> None:
    a = prompt("a", 20, None, arrival=0.1)
    b = prompt("b", 30, 0.9, arrival=0.0)
    c = prompt("c", 5, 0.7, arrival=0.3)
    d = prompt("d", 20, 0.75, arrival=0.3)
    best_effort = prompt("z", 1)
    a.request = replace(a.request, stages=(Stage(20, SLO(tpot=1.0)),))
    plan = work(seen(LP, [best_effort, a, b, c, d]), value=value)
    assert "".join(plan) == order + "z"


def no_number(seq: SeqView, view: View) -> float:
    return float("nan")


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="no_number' of request 'a' is nan: return a number, the highest first"):
        planned(seen(LP, [prompt("a", 5)]), value="tests.policies.test_ascendra:no_number")


def test_of_equal_values_the_later_goes_first_but_who_has_no_ttft_waits_its_turn() -> None:
    limits = replace(LIMITS, max_num_seqs=2)
    assert list(work(seen(LP, [prompt(id, 5, 1.0) for id in "abc"], limits=limits))) == ["c", "b"]
    assert list(work(seen(LP, [prompt(id, 5) for id in "abc"], limits=limits))) == ["a", "b"]


# --------------------------------------------------------------------------- offload


def offloaded(waiting: Sequence[Seq], running: Sequence[Seq] = (), kind: str = LP, **given: Any) -> list[str]:
    """At 10 s a batch of 90 tokens is chosen, which takes 0.9 s."""
    settings = {"theta": 0.0, "hp_tokens": 50, "value": "fcfs"} | given
    shown = seen(kind, [prompt("first", 90, 99.0, arrival=-1.0), *waiting], running, now=10.0)
    return list(planned(shown, **settings).handoff)


def test_who_would_be_late_after_this_batch_is_offloaded_unless_late_anywhere() -> None:
    def due(seconds: float) -> Seq:
        """In so many seconds; its prompt takes 0.25 s."""
        return prompt("a", 25, seconds + 10.0)

    assert [offloaded([due(s)]) for s in (0.24, 0.26, 1.14, 1.16)] == [[], ["a"], ["a"], []]
    assert [offloaded([due(s)], theta=1.0) for s in (1.64, 1.66)] == [["a"], []]  # beside 50 tokens there
    assert [offloaded([due(s)], theta=0.5, hp_tokens=2048) for s in (1.64, 1.66)] == [["a"], []]  # 100 are a batch


def test_the_rule_is_strict() -> None:
    exact = Linear(0.0, 2.0**-7)
    limits = replace(LIMITS, max_num_batched_tokens=65)
    first = prompt("first", 64, 99.0, arrival=-1.0)  # half a second

    def handed(due: float, now: float = 10.0) -> list[str]:
        shown = seen(LP, [first, prompt("a", 32, due)], now=now, latency=exact, limits=limits)
        return list(planned(shown, theta=0.0, value="fcfs").handoff)

    assert (handed(10.75), handed(10.749), handed(10.25), handed(10.249)) == ([], ["a"], ["a"], [])


def test_offload_is_for_prompts_that_have_not_begun_and_were_not_offloaded_before() -> None:
    late = prompt("a", 25, 11.0)
    assert offloaded([late]) == ["a"]
    assert offloaded([prompt("a", 25, 11.0, first_token_at=9.0, output=3)]) == []
    assert offloaded([prompt("a", 25)]) == []
    assert offloaded([prompt("a", 25, 11.0, demoted=True)]) == []
    back = prompt("a", 25, 11.0)
    for reason, now in (("offloaded", []), ("recalled", ["a"])):
        back.request = replace(back.request, handoff=Handoff("r9", reason, 9.0))  # type: ignore[arg-type]
        assert offloaded([back]) == now
    assert offloaded([late], kind="") == []
    assert offloaded([late], kind=HP) == []


def test_no_hand_off_where_there_is_nobody_to_hand_it_to() -> None:
    shown = seen(LP, [prompt("first", 90, 99.0, arrival=-1.0), prompt("a", 25, 11.0)], now=10.0)
    assert not policies.load("ascendra").plan(replace(shown, supports=frozenset())).handoff


def test_who_waits_beyond_its_ttft_may_be_dropped_unless_it_has_begun() -> None:
    begun = prompt("begun", 20, 5.0)
    begun.length += 3
    best_effort = prompt("free", 5, None)
    for kind in (LP, HP):
        shown = seen(kind, [prompt("late", 20, 9.0), begun, prompt("now", 20, 10.0), best_effort], now=10.0)
        assert planned(shown, drop=True).drop == {"late": SATURATED}
        assert not planned(shown).drop
    assert planned(seen(LP, [prompt("late", 20, 9.0)], now=10.0), drop=True).work == ()


# --------------------------------------------------------------------------- high priority


def test_an_hp_runs_prompts_before_decodes_in_the_order_of_its_queue() -> None:
    waiting = [prompt("a", 60, 9.0), prompt("b", 40, 1.0), prompt("c", 5, 1.0)]
    assert list(work(seen(HP, waiting, [decode("r")])).items()) == [("a", 60), ("b", 40)]
    assert work(seen(HP, waiting, [decode("r")]), hp_tokens=70) == {"a": 60}
    assert work(seen(HP, waiting[:1], [decode("r")]), hp_tokens=50) == {"a": 50}  # longer than a step: in chunks
    assert work(seen(HP, waiting[2:], [decode("r"), begun("a", 120, 50)]), hp_tokens=50) == {"a": 50}
    assert work(seen(HP, waiting[2:], [decode("r"), begun("a", 60, 50)]), hp_tokens=50) == {"a": 10, "c": 5}
    assert work(seen(HP, [], [decode("r"), decode("s")])) == {"r": 1, "s": 1}
    assert list(work(seen(HP, [prompt("free", 5), prompt("a", 5, 1.0)]))) == ["a", "free"]


def test_an_elastic_hp_keeps_kv_for_the_running_ones_and_a_tenth() -> None:
    """40 blocks; r, with 20 tokens in KV, will have so many more."""

    def starts(predicted: float, elastic: bool = True) -> bool:
        shown = seen(HP, [prompt("a", 10, 1.0)], [decode("r", 21, predicted=predicted)], kv_free=38)
        return "a" in work(shown, elastic=elastic)

    assert [starts(n) for n in (300.0, 328.0, 330.0, 379.0)] == [True, True, False, False]
    assert starts(379.0, elastic=False)


def test_each_prompt_that_it_starts_counts() -> None:
    waiting = [prompt(id, 10, 1.0, predicted=190.0) for id in "abc"]  # 20 blocks each to their ends
    assert work(seen(HP, waiting)) == {"a": 10, "b": 10}


@few
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=12), running=st.integers(0, 6),
    tokens=st.integers(1, 120), kv_free=st.integers(0, 28), elastic=st.booleans(),
)  # fmt: skip
def test_an_hp_is_first_come_first_served(
    lengths: list[int], running: int, tokens: int, kv_free: int, elastic: bool
) -> None:
    waiting = [prompt(f"q{i}", n, 1.0 + n % 7) for i, n in enumerate(lengths)]
    free = kv_free + 12 - 2 * running if running else 40
    shown = seen(HP, waiting, [decode(f"r{i}") for i in range(running)], kv_free=free)
    plan = work(shown, hp_tokens=tokens, elastic=elastic)
    started = [id for id in plan if id.startswith("q")]
    assert started == [f"q{i}" for i in range(len(started))]
    assert not started or len(plan) == len(started), "prompts alone"
    assert all(plan[f"q{i}"] == n for i, n in enumerate(lengths[: len(started)]) if len(started) > 1)


# --------------------------------------------------------------------------- the router


def kinds(groups: str, replicas: int) -> str:
    roles = Router(groups).roles([f"r{i}" for i in range(replicas)])
    parts: dict[str, str] = {}
    for role in roles.values():
        parts[role.group] = parts.get(role.group, "") + role.kind[0]
    assert list(parts) == [f"g{i}" for i in range(len(parts))]
    return " ".join(parts.values())


@pytest.mark.parametrize(
    ("groups", "replicas", "found"),
    [
        ("2L1H", 3, "llh"), ("2L1H", 2, "lh"), ("2L1H", 4, "lllh"), ("2L1H", 5, "llh lh"), ("2L1H", 9, "llh llh llh"),
        ("1L1H", 2, "lh"), ("1L1H", 5, "lh llh"), ("1L2H", 3, "lhh"), ("1L2H", 5, "lhh lh"), ("3l3h", 4, "llhh"),
    ],
)  # fmt: skip
def test_groups(groups: str, replicas: int, found: str) -> None:
    assert kinds(groups, replicas) == found


def test_a_fleet_of_one_and_nonsense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 replicas, one LP and one HP: there is 1"):
        Router().roles(["r0"])
    for groups in ("", "2L", "L1H", "0L1H", "1H2L", "2L1H1", "many"):
        with pytest.raises(PolicyError, match=f"groups is '{groups}'.* as 2L1H"):
            policies.load_router("ascendra", {"groups": groups})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"value": "efd"}, "'efd' is no value function: did you mean 'edf'.*package.module:function"),
        ({"value": "no_such_module:f"}, "'no_such_module:f' cannot be loaded: ModuleNotFoundError"),
        ({"value": "math:nothing"}, "cannot be loaded: AttributeError: module 'math' has no attribute 'nothing'"),
        ({"value": "math.pi"}, "'math.pi' is no function"),
        ({"theta": 1.5}, r"theta 1.5.* a share in \[0, 1\]"),
        ({"hp_tokens": 0}, "hp_tokens 0"),
        ({"batch_size": 0}, "batch_size 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        policies.load("ascendra", settings)


def fleet(*kinds: str, group: str = "g0", first: int = 0) -> list[View]:
    """Idle replicas r0, r1, ..."""
    return [view(id=f"r{first + i}", role=Role(kind=kind, group=group)) for i, kind in enumerate(kinds)]


def placed(router: Router, views: Sequence[View], *requests: Request) -> list[str]:
    return list(router.place(shown(*requests), views, 0.0).place.values())


def test_lps_in_turn_and_a_ticket_after_the_first() -> None:
    router, views = Router(), fleet(LP, LP, HP)
    names = iter("abcdefghij")
    assert placed(router, views, request("1")) == ["r0"]
    assert placed(router, views, *[request(next(names)) for _ in range(4)]) == ["r2", "r1", "r0", "r1"]
    router.observe([Started(1.0, "a")])
    assert placed(router, views, request("x"), request("y")) == ["r2", "r0"]


def test_one_ticket_also_while_the_placement_is_in_flight() -> None:
    """The HP's view stays as it was before anything was placed there."""
    router, views = Router(), fleet(LP, HP)
    views[0] = replace(views[0], running=[decode("x")])
    placed(router, views, request("0"))
    assert placed(router, views, request("a")) == ["r1"]
    stale = [views[0], replace(views[1], now=1.0, as_of=0.0)]
    assert placed(router, stale, request("b")) == ["r0"]
    waits = [views[0], replace(views[1], waiting=[Seq(request("a"))])]
    assert placed(router, waits, request("c")) == ["r0"]
    assert placed(router, stale, request("d")) == ["r0"]
    runs = [views[0], replace(views[1], running=[Seq(request("a"), 10, 0, in_flight=10)])]
    assert placed(router, runs, request("e")) == ["r1"]


@pytest.mark.parametrize(("length", "goes_to"), [(21, "r1"), (381, "r0")])
def test_an_hp_that_starts_no_prompt_for_want_of_kv_issues_no_ticket(length: int, goes_to: str) -> None:
    """Of 40 blocks of 10 tokens 4 are to stay free."""
    router, low = Router(), [replace(fleet(LP)[0], running=[decode("x")])]
    high = replace(seen(HP, [], [decode("runs", length)]), id="r1")
    placed(router, [*low, high], request("0"))
    assert placed(router, [*low, high], request("a")) == [goes_to]


@pytest.mark.parametrize(("runs", "due", "goes_to"), [(1, 9.0, "r1"), (2, 9.0, "r0"), (1, 0.11, "r1"), (1, 0.09, "r0")])
def test_a_ticket_counts_while_the_hp_runs_no_more_than_an_lp_and_can_stall_its_decodes(
    runs: int, due: float, goes_to: str
) -> None:
    """The prompt takes 0.1 s; due: when the HP's next tokens are, for their mean TBT."""
    router = Router()
    low = replace(seen(LP, [], [decode("x")]), id="r0")
    high = replace(seen(HP, [], [decode(f"h{i}") for i in range(runs)]), id="r1")
    for seq in high.running:
        seq.request = replace(seq.request, stages=(Stage(10, SLO(tpot=due)),))  # type: ignore[misc]
    placed(router, [low, high], request("0"))
    assert placed(router, [low, high], request("a", 10)) == [goes_to]


@pytest.mark.parametrize("event", ["started", "finished", "lost", "handed off"])
def test_an_event_shows_that_the_prompt_waits_there_no_more(event: str) -> None:
    router, views = Router(), fleet(LP, HP)
    placed(router, views, request("0"))
    assert placed(router, views, request("a"), request("b")) == ["r1", "r0"]
    ended: dict[str, Event] = {
        "started": Started(1.0, "a"), "lost": Lost(1.0, "a", "r1"), "handed off": HandedOff(1.0, "a", request("a")),
        "finished": Finished(1.0, "a", "cancelled", "gone", Verdict(False, "deadline")),
    }  # fmt: skip
    router.observe([ended[event]])
    assert placed(router, views, request("c")) == ["r1"]


def test_a_prompt_part_of_the_way_is_waited_for_and_one_in_its_last_step_is_not() -> None:
    router = Router()
    low, high = fleet(LP, HP)
    low = replace(low, running=[decode("x")])
    placed(router, [low, high], request("0"))
    part = replace(high, running=[Seq(request("a", 60), 60, 0, in_flight=50)])
    assert placed(router, [low, part], request("b")) == ["r0"]
    last = replace(high, running=[Seq(request("a", 60), 60, 50, 5, in_flight=10)])
    assert placed(router, [low, last], request("c")) == ["r1"]


def test_offloads_go_to_the_hps_of_their_group_in_turn() -> None:
    def handed(id: str, source: str) -> Request:
        return replace(request(id), handoff=Handoff(source, "offloaded", 0.0))

    router = Router("1L2H")
    views = [*fleet(LP, HP, HP), *fleet(LP, HP, group="g1", first=3)]
    router.roles(["r0", "r1", "r2", "r3", "r4"])
    assert placed(router, views, *[handed(f"q{i}", "r0") for i in range(4)]) == ["r1", "r2", "r1", "r2"]
    assert placed(router, views, handed("x", "r3")) == ["r4"]
    assert placed(router, [v for v in views if v.id != "r0"], handed("y", "r0")) == ["r1"]  # its LP is lost
    without = [v for v in views if v.id not in ("r1", "r2")]
    assert placed(router, without, handed("z", "r0")) == ["r0"]  # as a new one
    recalled = replace(request("w"), handoff=Handoff("r0", "recalled", 0.0))
    assert placed(router, views[3:], recalled) == ["r3"]  # as a new one


def test_an_offload_goes_to_an_hp_only_where_it_can_be_in_time_after_what_is_there() -> None:
    """Its prompt takes 0.2 s, that of w 0.5 s, that of p 0.3 s, of which a third is in the step that runs to 0.1 s."""
    busy = [begun("p", 30, 0)]
    busy[0].in_flight = 10
    low = replace(seen(LP), id="r0")
    high = replace(seen(HP, [prompt("w", 50, 9.0)], busy), id="r1", busy_until=0.1)

    def goes_to(ttft: float, hp: View, *more: Request) -> list[str]:
        router = Router("1L1H")
        router.roles(["r0", "r1"])
        offload = replace(request("a", 20, ttft=ttft), handoff=Handoff("r0", "offloaded", 0.0))
        return placed(router, [low, hp], offload, *more)

    assert [goes_to(ttft, high) for ttft in (0.99, 1.01)] == [["r0"], ["r1"]]
    twin = replace(request("b", 20, ttft=1.01), handoff=Handoff("r0", "offloaded", 0.0))
    assert goes_to(1.01, high, twin) == ["r1", "r0"], "what is placed there in the same call counts"
    assert goes_to(9.0, replace(high, running=[decode("full", 381)])) == ["r0"], "no KV for it there"


def test_groups_in_turn_and_what_is_left_of_one_serves_on() -> None:
    router = Router("1L1H")
    views = [*fleet(LP, HP), *fleet(LP, HP, group="g1", first=2)]
    assert placed(router, views, *[request(f"q{i}") for i in range(6)]) == ["r0", "r2", "r1", "r3", "r0", "r2"]
    assert placed(Router(), fleet(HP, HP), *[request(f"q{i}") for i in range(3)]) == ["r0", "r1", "r0"]
    assert placed(Router(), fleet(LP, LP), *[request(f"q{i}") for i in range(3)]) == ["r0", "r1", "r0"]
    assert placed(Router(), fleet("", "", group=""), *[request(f"q{i}") for i in range(3)]) == ["r0", "r1", "r0"]


# --------------------------------------------------------------------------- together


@pytest.mark.parametrize("gone", [(0,), (2,), (0, 1), (2, 0), (1, 2)])
def test_lost_replicas_break_nothing(gone: tuple[int, ...]) -> None:
    requests = [request(f"q{i}", 20 + i, ttft=0.02, arrival=0.001 * i, most=20) for i in range(40)]
    acts = [(0.01 + 0.01 * n, vanishes(i)) for n, i in enumerate(gone)]
    events = serve(
        "simulated", policies.load_router("ascendra"), requests, scheduler=lambda: policies.load("ascendra"),
        acts=acts, replicas=3, host=Elsewhere,
    )  # fmt: skip
    assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}


def first_come(events: Sequence[Event], hps: set[str], requests: dict[str, Request]) -> None:
    """On an HP prompts start in the order in which they were placed there, best effort apart, and a new request comes
    only where none waits. Siblings of a group are placed together and wait for each other."""
    queue: dict[str, list[str]] = {id: [] for id in hps}
    for event in events:
        simple = event.id in requests and not (requests[event.id].group or requests[event.id].best_effort)
        if isinstance(event, Placed) and event.replica in hps and simple:
            queue[event.replica].append(event.id)
        elif isinstance(event, Started | Finished | HandedOff):
            for waiting in queue.values():
                if event.id in waiting:
                    assert not isinstance(event, Started) or waiting[0] == event.id
                    waiting.remove(event.id)


def one_ticket(events: Sequence[Event], hps: set[str]) -> None:
    """A request that no LP handed on is placed on an HP only when no other is placed there and has not begun."""
    waits: dict[str, set[str]] = {id: set() for id in hps}
    handed: set[str] = set()
    for event in events:
        if isinstance(event, Placed) and event.replica in hps:
            assert event.id in handed or not waits[event.replica]
            waits[event.replica].add(event.id)
        elif isinstance(event, Started | Finished | HandedOff):
            for there in waits.values():
                there.discard(event.id)
            if isinstance(event, HandedOff):
                handed.add(event.id)


def before_prefill(events: Sequence[Event]) -> None:
    """What is handed off runs not, and its client has had no token of the stage."""
    running: set[str] = set()
    out: dict[str, bool] = {}
    for event in events:
        if isinstance(event, Started):
            running.add(event.id)
        elif isinstance(event, Preempted | Finished):
            running.discard(event.id)
        elif isinstance(event, Tokens):
            out[event.id] = not event.stage_done
            if event.stage_done:
                running.discard(event.id)  # it may wait for a tool
        elif isinstance(event, HandedOff):
            assert event.request.handoff is not None
            assert event.request.handoff.cached == 0
            assert event.id not in running
            assert not out.get(event.id)


@st.composite
def busy(draw: st.DrawFn) -> Load:
    """More than three replicas can serve in time, with KV for a few."""
    gap = draw(st.sampled_from([0.0, 0.01, 0.02]))
    slos = st.sampled_from([SLO(), SLO(ttft=0.1), SLO(ttft=0.2, tpot=0.02), SLO(ttft=0.3)])
    requests = [
        Request(f"q{i}", (Stage(draw(st.integers(1, 60)), draw(slos)),), gap * i, sampling=Sampling(max_tokens=8))
        for i in range(draw(st.integers(10, 40)))
    ]
    blocks = draw(st.sampled_from([9, 15, 60]))
    limits = Limits(
        max_num_seqs=8,
        max_num_batched_tokens=draw(st.sampled_from([50, 100])),
        max_model_len=100,
        kv_blocks=blocks,
        block_size=8,
    )
    return Load(tuple(requests), dict.fromkeys((r.id for r in requests), (8,)), limits)


@few
@given(load=busy() | loads(), theta=st.sampled_from([0.0, 1.0]), groups=st.sampled_from(["2L1H", "1L2H", "1L1H"]))
def test_whatever_the_load(load: Load, theta: float, groups: str) -> None:
    events = run(load, "ascendra", settings={"theta": theta, "hp_tokens": 40}, router_settings={"groups": groups})
    hps = {id for id, role in Router(groups).roles(["r0", "r1", "r2"]).items() if role.kind == HP}
    requests = {r.id: r for r in load.requests}
    first_come(events, hps, requests)
    if not any(r.group for r in load.requests):
        one_ticket(events, hps)
    before_prefill(events)


def test_under_load_prompts_are_offloaded_once_and_in_time() -> None:
    """A prompt is due 2 to 4 steps of its own length after it came."""
    requests = [request(f"q{i}", 60, ttft=0.02 + 0.005 * (i % 4), arrival=0.0025 * i, most=4) for i in range(60)]
    spec = run_spec(Linear(0.002, 0.0001), LIMITS, "ascendra", replicas=3)
    events = simulate_events(requests, {}, spec)
    ids = [id for id, reason, cached in moved(events) if (reason, cached) == ("offloaded", 0)]
    assert len(ids) == len(set(ids)) == len(moved(events)) > 3
    where = [places(events, id) for id in ids]
    assert sum(at[-1] == "r2" for at in where) > 3
    assert all(at[-1] in ("r2", at[0]) for at in where), "one that is late there, too, goes back"


def test_it_serves_on_one_replica_under_another_router() -> None:
    requests = [request(f"q{i}", 30, ttft=0.03, arrival=0.002 * i, most=4) for i in range(20)]
    spec = run_spec(Linear(0.002, 0.0001), LIMITS, "ascendra", router="round_robin")
    events = simulate_events(requests, {}, spec)
    assert not moved(events)
    assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}
