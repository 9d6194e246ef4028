"""What a Router may do, each by a router of a few lines: simulated, and over two replicas on the wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any, ClassVar, cast
from unittest.mock import ANY

import pytest

from rubato.core.clock import WallClock
from rubato.core.events import Assigned, Demoted, Event, Finished, Offered, Placed, Stepped, Tokens
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.length_prediction import RunningMean
from rubato.core.plan import Plan, Role, Shape, Work
from rubato.fleet.cluster import Cluster
from rubato.fleet.local_host import LocalHost
from rubato.policies import load
from rubato.policies.vllm import Scheduler
from rubato.policy_kit.fair_share import FairShare
from tests.fleet.routers import CLOCKS, LIMITS, ends, moved, out, places, serve, started
from tests.kit import request

each_clock = pytest.mark.parametrize("clock", CLOCKS)


class Toy:
    """What every router has."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def observe(self, events: Sequence[Event]) -> None: ...


class Places(Toy):
    """Places what comes."""

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        return Dispatch({s.id: "r0" for s in held})


# --------------------------------------------------------------------------- when it is asked


@dataclass
class OneAStep(Toy):
    """Holds what comes, and lets one go whenever a step has ended."""

    wants: ClassVar[frozenset[str]] = frozenset({"step"})
    free: bool = True
    asked: list[float] = field(default_factory=list)

    def observe(self, events: Sequence[Event]) -> None:
        self.free |= any(isinstance(e, Stepped) for e in events)

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        if not self.free:
            self.asked.append(now)
            return Dispatch()
        self.free = False
        return Dispatch({held[0].id: "r0"})


@each_clock
def test_one_request_leaves_as_each_step_ends(clock: str) -> None:
    router = OneAStep()
    events = serve(clock, router, [request(f"q{i}", 4) for i in range(6)])
    told = [e for e in events if isinstance(e, Placed) or (isinstance(e, Stepped) and e.id == "r0")]
    at = [i for i, e in enumerate(told) if isinstance(e, Placed)]
    assert started(events) == [f"q{i}" for i in range(6)]
    assert all(b - a == 2 for a, b in pairwise(at)), "one step between two placements"
    if clock == "simulated":
        assert all(told[i].at == told[i - 1].at for i in at[1:])


def test_it_is_asked_once_an_instant() -> None:
    """Six arrivals, and steps of two replicas that end together: of the asks that place nothing, one each time."""
    router = OneAStep()
    both = [replace(request(f"q{i}", 4), group="") for i in range(6)]
    serve("simulated", router, both)
    assert len(router.asked) == len(set(router.asked)) > 3


def test_a_router_that_does_not_want_steps_is_not_asked_at_them() -> None:
    class Waits(Toy):
        asked = 0

        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            """One at a time."""
            self.asked += 1
            return Dispatch({} if fleet[0].count else {held[0].id: "r0"})

    router = Waits()
    events = serve("simulated", router, [request(f"q{i}", 4, most=30) for i in range(3)], replicas=1)
    assert sum(isinstance(e, Stepped) for e in events) > 80
    assert router.asked < 12  # at arrivals and ends, and once more after each placement


@dataclass
class Paced(Toy):
    """Batches of three, 0.1 ms apart."""

    next: float = -inf

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        if now < self.next:
            return Dispatch(wake_at=self.next)
        self.next = now + 1e-4
        return Dispatch({s.id: "r0" for s in held[:3]}, wake_at=self.next)


@each_clock
def test_batch_k_leaves_after_batch_k_minus_1(clock: str) -> None:
    """All that arrives together: the first goes alone, for it is placed as it comes."""
    events = serve(clock, Paced(), [request(f"q{i}", 4) for i in range(10)])
    at = {e.id: e.at for e in events if isinstance(e, Placed)}
    batches = [["q0"], ["q1", "q2", "q3"], ["q4", "q5", "q6"], ["q7", "q8", "q9"]]
    if clock == "live":  # the event loop's timers are as late as they are
        assert all(b - a == 0.0 or b - a >= 1e-4 for a, b in pairwise(at.values()))
        return
    assert [{at[id] for id in batch} for batch in batches] == [{0.0}, {1e-4}, {2e-4}, {2e-4 + 1e-4}]


def test_a_later_dispatch_replaces_the_time_of_an_earlier_one() -> None:
    asked: list[float] = []

    class Changes(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            asked.append(now)
            if now < 1.0:
                return Dispatch(wake_at=5.0 if len(asked) == 1 else 1.0)
            return Dispatch({s.id: "r0" for s in held})

    serve("simulated", Changes(), [request("a"), request("b", arrival=0.5)])
    assert asked == [0.0, 0.5, 1.0]


def test_shares_and_a_router_wake_each_other_up() -> None:
    """A tenant's debt is paid back while the router waits for a time of its own: neither loses the other's time."""
    requests = [replace(request(f"q{i}", 60, ttft=0.2, tpot=0.02), tenant="ab"[i % 2]) for i in range(8)]
    events = serve("simulated", Paced(), requests, fair=FairShare(window=1))
    assert {e.outcome for e in ends(events).values()} == {"completed"}


# --------------------------------------------------------------------------- what it sees


@each_clock
def test_held_requests_are_shown_as_a_replica_shows_them(clock: str) -> None:
    """due, predicted and length, also of one that comes back with tokens."""
    seen: list[tuple[str, float, float | None, int, int]] = []
    lengths = RunningMean()

    class Looks(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            for s in held:
                seen.append((s.id, s.due - s.request.arrival, s.predicted, s.length, s.pending))
            tight = any(s.id == "c" for s in held)
            replica = "r1" if any(s.request.handoff for s in held) else "r0"
            return Dispatch({s.id: replica for s in held}, recall={"r0": "best_effort"} if tight else {})

    after_a = (lambda e: isinstance(e, Finished) and e.id == "a", request("b", 10, most=150))
    during_b = (out("b", 5), request("c", 20, ttft=0.2, tpot=0.05))
    events = serve(clock, Looks(), [request("a", 10, most=4)], later=[after_a, during_b], lengths=lengths)
    assert seen[:3] == [("a", inf, None, 10, 10), ("b", inf, 4.0, 10, 10), ("c", pytest.approx(0.2), 4.0, 20, 20)]
    id, _, predicted, length, pending = seen[3]
    assert (id, predicted, pending) == ("b", 1.0, length)
    assert 10 + 5 <= length < 10 + 150
    assert places(events, "b") == ["r0", "r1"]
    assert ends(events)["b"].output == 150
    assert lengths._sums == {"default": (3, 4 + 150 + 16)}  # each learnt once


def test_the_batch_in_flight_is_shown() -> None:
    """b arrives while a's prompt runs: 20 tokens in 4 ms."""
    seen: list[tuple[Shape, list[tuple[str, int, int]], float]] = []

    class Looks(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            view = fleet[0]
            running = [(s.id, s.in_flight, s.pending) for s in view.running]
            seen.append((view.in_flight, running, round(view.busy_until, 6)))
            return Dispatch({s.id: "r0" for s in held})

    requests = [request("a", 20, most=3), request("b", 5, most=1, arrival=0.001), request("c", 5, arrival=1.0)]
    serve("simulated", Looks(), requests)
    assert seen == [
        (Shape(), [], 0.0),
        (Shape().plus(20, 0), [("a", 20, 20)], 0.004),
        (Shape(), [], 0.0087),  # idle since a's third token; the step before also had b
    ]


# --------------------------------------------------------------------------- what it says


@each_clock
def test_roles_change_while_requests_are_served_and_a_placement_says_why(clock: str) -> None:
    """r1 is turned to what comes; the request that has begun there goes on, and is planned by the new role."""
    seen: list[tuple[str, str]] = []

    class Reads(Scheduler):
        def plan(self, view: View) -> Plan:
            seen.append((view.id, view.role.tier))
            return super().plan(view)

    class Turns(Toy):
        def roles(self, replicas: Sequence[str]) -> dict[str, Role]:
            return {id: Role(tier="loose") for id in replicas}

        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            to = {s.id: "r1" for s in held}
            why = {s.id: f"r1 is for {s.request.tier}" for s in held}
            return Dispatch(to, assign={"r1": Role(tier=held[-1].request.tier)}, why=why)

    first, second = request("a", 10, most=40, tier="first"), request("b", 10, most=4, tier="second")
    events = serve(clock, Turns(), [first], later=[(out("a", 5), second)], scheduler=Reads)
    roles = [(e.id, e.role.tier) for e in events if isinstance(e, Assigned)]
    assert roles == [("r0", "loose"), ("r1", "loose"), ("r1", "first"), ("r1", "second")]
    assert [tier for id, tier in seen if id == "r1"] == sorted(tier for id, tier in seen if id == "r1")
    assert {tier for id, tier in seen if id == "r1"} == {"first", "second"}
    assert [e.why for e in events if isinstance(e, Placed)] == ["r1 is for first", "r1 is for second"]
    assert places(events, "a") == ["r1"]


@dataclass
class TightFirst(Toy):
    """A tight request takes all waiting work from its replica; that waits until no tight one is there."""

    needs: ClassVar[frozenset[str]] = frozenset({"recall"})

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        tight = {s.id: "r0" for s in held if not s.best_effort}
        if tight:
            return Dispatch(tight, recall={"r0": "waiting"})
        view = fleet[0]
        busy = any(not s.best_effort for s in [*view.waiting, *view.running])
        return Dispatch({} if busy else {s.id: "r0" for s in held})


@each_clock
def test_waiting_work_is_taken_back_for_a_tight_request(clock: str) -> None:
    requests = [request(f"e{i}", 20, most=20) for i in range(4)]
    later = [(out("e0", 3), request("tight", 20, ttft=0.5))]
    events = serve(clock, TightFirst(), requests, later=later, limits=replace(LIMITS, max_running=1))
    assert started(events) == ["e0", "tight", "e1", "e2", "e3"]
    assert moved(events) == [(f"e{i}", "recalled", 0) for i in (1, 2, 3)]
    assert {e.outcome for e in ends(events).values()} == {"completed"}
    assert [places(events, id) for id in ("e0", "tight", "e1")] == [["r0"], ["r0"], ["r0", "r0"]]


@each_clock
def test_running_best_effort_work_is_taken_back_and_goes_on_elsewhere(clock: str) -> None:
    """After the step that it is in, with its tokens and without its KV; a tight one that runs there stays."""

    class Claims(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            claimed = any(s.request.tier == "claims" for s in held)
            to = {s.id: "r1" if s.request.handoff else "r0" for s in held}
            return Dispatch(to, recall={"r0": "best_effort"} if claimed else {})

    requests = [request("stays", 10, ttft=1.0, most=60), request("goes", 10, most=60)]
    events = serve(clock, Claims(), requests, later=[(out("goes", 5), request("claims", 10, ttft=1.0, tier="claims"))])
    assert moved(events) == [("goes", "recalled", 0)]
    assert [places(events, id) for id in ("stays", "goes", "claims")] == [["r0"], ["r0", "r1"], ["r0"]]
    assert {(e.outcome, e.output) for e in ends(events).values()} == {("completed", 60), ("completed", 16)}


@each_clock
def test_who_cannot_be_in_time_is_demoted(clock: str) -> None:
    """Whose first token is due before its prompt alone is through; its replica's scheduler sees it as demoted."""
    shown: dict[str, bool] = {}

    class Demotes(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            late = [s.id for s in held if now + fleet[0].latency.step_time(Shape().plus(s.pending, 0)) > s.due]
            return Dispatch({s.id: "r1" for s in held}, demote=late)

    class Watches:
        needs: ClassVar[frozenset[str]] = frozenset()

        def __init__(self) -> None:
            self.inner = load("vllm")

        def observe(self, events: Sequence[Event]) -> None: ...

        def plan(self, view: View) -> Plan:
            shown.update({s.id: s.demoted for s in [*view.waiting, *view.running]})
            return self.inner.plan(view)

    requests = [request("good", 20, ttft=5.0), request("late", 40, ttft=0.001)]
    events = serve(clock, Demotes(), requests, scheduler=Watches)
    assert [e.id for e in events if isinstance(e, Demoted)] == ["late"]
    assert shown == {"good": False, "late": True}
    assert {id: (e.outcome, e.best_effort) for id, e in ends(events).items()} == {
        "good": ("completed", False), "late": ("completed", True),
    }  # fmt: skip


@each_clock
def test_a_replica_queues_requests_as_it_was_given_them(clock: str) -> None:
    """Shortest first, over requests that came longest first."""

    class Shortest(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            if len(held) < 4 and not fleet[0].count:
                return Dispatch(wake_at=now + 1.0)  # a fifth of what an arrival takes to come
            return Dispatch({s.id: "r0" for s in sorted(held, key=lambda s: s.length)})

    requests = [request(f"{n}", n, arrival=i * 1e-4) for i, n in enumerate((60, 40, 20, 10))]
    events = serve(clock, Shortest(), requests, limits=replace(LIMITS, max_running=1))
    assert started(events) == ["10", "20", "40", "60"]


# --------------------------------------------------------------------------- a scheduler that gives up KV


class Escalates:
    """On r0 each request is handed on after three tokens, without its KV, in the plan that starts the next one."""

    needs: ClassVar[frozenset[str]] = frozenset({"handoff"})

    def observe(self, events: Sequence[Event]) -> None: ...

    def plan(self, view: View) -> Plan:
        if view.id != "r0":
            return load("vllm").plan(view)
        ready = [s for s in view.running if s.output >= 3]
        work = [Work(s.id, s.pending) for s in view.running if s not in ready]
        if not work and view.waiting:
            work = [Work(view.waiting[0].id, view.waiting[0].pending)]
        ids = frozenset(s.id for s in ready)
        return Plan(tuple(work), handoff=dict.fromkeys(ids, "offloaded"), without_kv=ids)


@each_clock
def test_a_running_request_is_handed_on_without_kv_in_one_plan(clock: str) -> None:
    """KV and slot are the next one's in the same step: no step of r0 lies between the two."""

    class Up(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            return Dispatch({s.id: "r1" if s.request.handoff else "r0" for s in held})

    requests = [request(id, 30, most=8) for id in "abc"]
    limits = replace(LIMITS, kv_blocks=5, max_running=1)
    events = serve(clock, Up(), requests, scheduler=Escalates, limits=limits)
    assert moved(events) == [(id, "offloaded", 0) for id in "abc"]
    for id in "abc":
        assert places(events, id) == ["r0", "r1"]
        assert (ends(events)[id].outcome, ends(events)[id].output) == ("completed", 8)
    steps = [e for e in events if isinstance(e, Stepped) and e.id == "r0"]
    assert len(steps) == 9  # three each, none in between


# --------------------------------------------------------------------------- what it must not say


@dataclass
class Wrong(Toy):
    """The first so many times, what it says is impossible."""

    times: int
    what: Dispatch

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self.times -= 1
        return self.what if self.times >= 0 else Dispatch({s.id: "r0" for s in held})


@each_clock
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (Dispatch({"nobody": "r0"}), "place names 'nobody', which is not among the 1 held"),
        (Dispatch(), "all of 1 requests are held though the 2 replicas have none"),
    ],
)
def test_a_bad_dispatch_fails_what_it_was_about_and_the_next_are_served(clock: str, what: Dispatch, says: str) -> None:
    events = serve(clock, Wrong(1, what), [request("a"), request("b", arrival=0.01)])
    assert {id: e.outcome for id, e in ends(events).items()} == {"a": "failed", "b": "completed"}
    reason = ends(events)["a"].reason
    assert "PlanError: policy 'tests.fleet.test_router', router, t=" in reason
    assert says in reason


def test_what_runs_goes_on_while_a_router_fails_until_it_is_given_up() -> None:
    """Then the cluster is dead, and says why to all that come."""
    found: list[Cluster] = []
    first = request("first", most=100)
    rest = [request(f"q{i}", arrival=0.01 * (1 + i)) for i in range(5)]

    class Fails(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            if held[0].id != "first":
                raise KeyError("a router's own")
            return Dispatch({"first": "r0"})

    events = serve("simulated", Fails(), [first, *rest], setup=found.append)
    assert ends(events)["first"].outcome == "completed"
    reasons = [ends(events)[r.id].reason for r in rest]
    assert all("router 'tests.fleet.test_router', t=0.0" in reason for reason in reasons[:3])
    assert all('KeyError: "a router\'s own"' in reason for reason in reasons[:3])
    assert all("3 dispatches in a row failed; the last: router 'tests" in reason for reason in reasons[3:])
    assert found[0].dead.is_set()
    assert "3 dispatches in a row" in str(found[0].error)


def test_holding_all_is_no_error_while_something_will_happen() -> None:
    """While a request runs, or the last step of one that was cancelled."""

    class WhenIdle(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            free = not any(v.count or v.in_flight.seqs for v in fleet)
            return Dispatch({s.id: "r0" for s in held} if free else {})

    acts = [(0.006, lambda cluster: cluster.cancel("a"))]
    requests = [request("a", 20, most=100), request("b", 20, arrival=0.001)]
    events = serve("simulated", WhenIdle(), requests, acts=acts)
    assert {id: e.outcome for id, e in ends(events).items()} == {"a": "cancelled", "b": "completed"}


def test_what_a_router_asks_for_must_be_there() -> None:
    class Plain(LocalHost):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.supports -= {"recall"}

    class Odd(Toy):
        wants: ClassVar[frozenset[str]] = frozenset({"steps"})

    with pytest.raises(ValueError, match=r"router 'tests.fleet.test_router' wants steps; known is step"):
        serve("simulated", Odd(), [request("a")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"needs recall, which replica 'r0' lacks \(it supports chunked, handoff, "):
        serve("simulated", TightFirst(), [request("a")], host=Plain)


@pytest.mark.parametrize("kind", [Offered, Placed, Finished])
def test_a_router_that_fails_to_observe_costs_no_request_its_end(
    kind: type[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported as a listener's failure is, by name; on a virtual clock the run ends with it."""
    failed: list[Cluster] = []

    class Fails(Places):
        def observe(self, events: Sequence[Event]) -> None:
            if isinstance(events[0], kind):
                raise KeyError(events[0].id)

    offered = [request(f"q{i}") for i in range(3)]
    monkeypatch.setitem(CLOCKS, "live", (WallClock, asyncio.run))  # whose loop logs what fails, as a server's does
    events = serve("live", Fails(), offered, setup=failed.append)  # which checks the books
    assert {end.outcome for end in ends(events).values()} == {"completed"}
    assert failed[0].listener_errors == {"observe of router 'tests.fleet.test_router'": ANY}
    with pytest.raises(KeyError):
        serve("simulated", Fails(), offered)


def test_a_scheduler_that_fails_to_observe_is_named() -> None:
    class Fails:
        needs: ClassVar[frozenset[str]] = frozenset()

        def observe(self, events: Sequence[Event]) -> None:
            raise KeyError("mine")

        def plan(self, view: View) -> Plan:
            return load("vllm").plan(view)

    [end] = ends(serve("simulated", Places(), [request("q0")], scheduler=Fails)).values()
    assert (end.outcome, end.reason) == ("failed", "RuntimeError: policy 'toy' failed to observe: KeyError: 'mine'")


@pytest.mark.parametrize(
    ("dispatch", "said"),
    [
        (None, "place returned NoneType: return a Dispatch"),
        ({"q0": "r0"}, "place returned dict: return a Dispatch"),
        (Dispatch(place=["q0"]), "place is list: give a mapping"),  # type: ignore[arg-type]
        (Dispatch(reject={"q0": ""}), "reject is {'q0': ''}: give a text for each"),
        (Dispatch(demote="q0"), "demote is 'q0': give a collection of request ids"),
        (Dispatch(wake_at="soon"), "wake_at is 'soon': give seconds, or None"),  # type: ignore[arg-type]
        (Dispatch(wake_at=1e-9), "wake_at 1e-09 is not 1e-06 s or more in the future: it would spin"),
    ],
)
def test_a_dispatch_of_another_kind_is_named(dispatch: Any, said: str) -> None:
    class Says(Toy):
        def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
            return cast(Dispatch, dispatch)

    [end] = ends(serve("simulated", Says(), [request("q0")])).values()
    assert end.reason.startswith("PlanError: policy 'tests.fleet.test_router', router, t=0.000000: ")
    assert said in end.reason


def test_a_router_observes_everything_but_tokens() -> None:
    class Remembers(Places):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[type[Event]] = set()

        def observe(self, events: Sequence[Event]) -> None:
            self.seen |= {type(event) for event in events}

    router = Remembers()
    told = {type(event) for event in serve("simulated", router, [request("q0")])}
    assert Tokens in told
    assert router.seen == told - {Tokens}
