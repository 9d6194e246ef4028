"""Requests that replicas hand to each other, with KV or without: books, memory, and whatever may happen on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from rubato.core.clock import VirtualClock
from rubato.core.event_log import decode, encode, without_content
from rubato.core.events import Event, Finished, HandedOff, Lost, Placed, Started, Stepped, Tokens, Transferred
from rubato.core.interfaces import SeqView
from rubato.core.plan import Emitted, Limits, Plan, StepResult, Work
from rubato.core.request import SLO, Handoff, Progress, Request, Sampling, Stage
from rubato.engines.simulated import KVLink
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.policy_kit.fair_share import FairShare
from rubato.replica import handoff
from rubato.replica.plan_check import PlanError
from rubato.replica.replica import Replica
from rubato.simulation.simulate import simulate_events
from tests.kit import Linear, integrity, request, run_spec, run_step
from tests.kit.clusters import offer, play
from tests.kit.fleets import Act, Breaks, breaks, cancels
from tests.policies.test_properties import Load, loads, run

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=25, block_size=8)
LINK = KVLink(kv_bytes=100, bandwidth=20_000, latency=0.4)  # 20 tokens: 0.4 + 0.1 s


# --------------------------------------------------------------------------- the books of one replica


def replica(**changes: object) -> Replica:
    supports = frozenset({"handoff", "kv_transfer"})
    return Replica("r0", replace(LIMITS, **changes), Linear(), supports=supports)  # type: ignore[arg-type]


def test_kv_stays_until_it_has_left() -> None:
    r = replica()
    r.submit(request("a", 20, ttft=1.0), 0.0)
    run_step(r, Plan((Work("a", 20),)), 0.0, 0.1)
    (event,) = run_step(r, Plan(handoff={"a": "prefilled"}), 0.1, 0.1)
    assert isinstance(event, HandedOff)
    assert event.request.handoff == Handoff("r0", "prefilled", 0.1, cached=20)
    assert event.request.progress == Progress((0.0,), ((0.1,),), (7,))
    here = r.view(0.1)
    assert (list(here.running), [s.id for s in here.moving], here.kv_free, r.empty, r.idle) == (
        [],
        ["a"],
        22,
        False,
        True,
    )
    assert r.cancel("a", 0.2, "not its any more") == []
    assert handoff.release(r, "a")
    assert not handoff.release(r, "a")
    assert (r.kv.free, r.empty, r.take_gone_ids()) == (25, True, ["a"])
    integrity.check(r)


def test_kv_is_held_before_it_comes() -> None:
    r = replica(kv_blocks=4)
    progress = Progress((0.0,), ((0.1,),), (7,), delays={"queue": 0.05})
    moved = replace(request("a", 20, ttft=1.0, most=10), progress=progress, handoff=Handoff("r9", "prefilled", 0.1, 20))
    assert handoff.reserve(r, moved, 0.2) == []
    here = r.view(0.2)
    assert (len(here.waiting), len(here.running), len(here.moving), here.kv_free) == (0, 0, 1, 1)
    assert handoff.reserve(r, replace(moved, id="b"), 0.2) is None  # the memory lacks
    integrity.check(r)
    assert handoff.arrive(r, "a", 2000, 0.6) == [Transferred(0.6, "a", "r0", "r9", 20, 2000)]
    (seq,) = r.view(0.6).running
    assert (seq.pending, seq.cached, seq.length, seq.output, seq.first_token_at) == (1, 20, 21, 1, 0.1)
    assert r.delays(r.running["a"]) == {"queue": 0.05, "transfer": pytest.approx(0.5)}
    assert run_step(r, Plan((Work("a", 1),)), 0.6, 0.7) == [Tokens(0.7, "a", 1, "x", (7,))]


def test_what_could_never_run_is_refused_also_when_it_brings_its_kv() -> None:
    r = replica(kv_blocks=3)
    moved = replace(request("a", 20, most=10), handoff=Handoff("r9", "prefilled", 0.1, 20))
    events = handoff.reserve(r, moved, 0.2)
    assert events is not None
    assert [(e.outcome, e.reason) for e in events if isinstance(e, Finished)] == [("refused", "rejected-exceeds-kv")]
    assert r.empty


def test_one_that_waits_goes_without_kv_and_leaves_its_group() -> None:
    r = replica()
    ids = tuple(range(20))
    for id in ("a", "b"):
        asked = Request(id, (Stage(20, SLO(ttft=1.0), token_ids=ids),), 0.0, group="g", sampling=Sampling(10))
        r.submit(asked, 0.0)
    (event,) = run_step(r, Plan(handoff={"a": "declined"}), 0.5, 0.5)
    assert isinstance(event, HandedOff)
    assert event.request.handoff == Handoff("r0", "declined", 0.5)
    assert event.request.group == ""
    assert event.request.progress == Progress((0.0,), ((),), delays={"queue": 0.5})
    assert [s.id for s in r.view(0.5).waiting] == ["b"]  # no longer held behind the first
    r.submit(event.request, 0.6)
    (again,) = run_step(r, Plan(handoff={"a": "offloaded"}), 0.6, 0.6)
    assert isinstance(again, HandedOff)
    assert again.request.handoff == Handoff("r0", "offloaded", 0.6, hops=2)


def test_a_servers_failures_are_counted_apart_from_what_schedulers_hand_on() -> None:
    """A server's retries are bounded by the first, the replicas that may decline by the second."""
    handoff, counts = None, []
    for reason in ("declined", "declined", "failed", "declined", "failed"):
        handoff = Handoff.after(handoff, "r0", reason, 0.5)
        counts.append((handoff.hops, handoff.failures))
    assert counts == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]


def test_slots_of_what_moves_are_taken() -> None:
    r = replica(max_running=2)
    for id in "abc":
        r.submit(request(id, 8), 0.0)
    run_step(r, Plan((Work("a", 8), Work("b", 8))), 0.0, 0.1)
    run_step(r, Plan(handoff={"a": "prefilled"}), 0.1, 0.1)
    with pytest.raises(PlanError, match="1 started beside 1 that run on, the engine holds 1 at once"):
        r.apply(Plan((Work("c", 8),)), 0.1, "test")
    assert handoff.reserve(r, replace(request("d"), handoff=Handoff("r9", "prefilled", 0.1, 8)), 0.1) is None
    handoff.release(r, "a")
    run_step(r, Plan((Work("c", 8),)), 0.1, 0.2)


@pytest.mark.parametrize(
    ("plan", "supports", "says"),
    [
        (
            Plan(handoff={"a": "prefilled"}),
            {"handoff", "kv_transfer"},
            "calls 'a' prefilled, and it has 12 tokens pend",
        ),
        (Plan(handoff={"w": "prefilled"}), {"handoff", "kv_transfer"}, "calls 'w' prefilled"),
        (Plan(handoff={"w": "declined"}), set(), "this replica has no other to hand it to"),
        (Plan(handoff={"a": "offloaded"}), {"handoff"}, "whose KV this engine cannot export: name it in without_kv"),
        (Plan((Work("w", 1),), handoff={"w": "declined"}), {"handoff"}, "the same plan preempts, drops or hands off"),
        (
            Plan(preempt=("a",), handoff={"a": "declined"}),
            {"handoff", "kv_transfer"},
            "the same plan preempts or drops",
        ),
        (Plan(handoff={"x": "declined"}), {"handoff"}, "handoff names 'x', which is neither waiting nor running"),
        (Plan(without_kv=frozenset("a")), {"handoff"}, "without_kv names 'a', which handoff does not"),
        (Plan(handoff={"a": "recalled"}), {"handoff"}, "calls 'a' recalled, which is the router's word"),
        (
            Plan((Work("w", 20),), handoff={"a": "offloaded"}),
            {"handoff", "kv_transfer"},
            "1 started beside 1 that run on, the engine holds 1 at once",
        ),
    ],
)
def test_impossible_hand_off_is_refused(plan: Plan, supports: set[str], says: str) -> None:
    r = Replica("r0", replace(LIMITS, max_running=1), Linear(), supports=frozenset(supports))
    for id in "aw":
        r.submit(request(id, 20), 0.0)
    run_step(r, Plan((Work("a", 8),)), 0.0, 0.1)
    with pytest.raises(PlanError, match=says):
        r.apply(plan, 0.1, "test")


def test_one_that_runs_leaves_without_kv_in_the_plan_that_reuses_its_memory() -> None:
    """Also where the engine cannot export KV: 3 blocks and one slot, in which the next one starts."""
    r = Replica("r0", replace(LIMITS, kv_blocks=3, max_running=1), Linear(), supports=frozenset({"handoff"}))
    for id in "ab":
        r.submit(request(id, 16, most=8), 0.0)
    run_step(r, Plan((Work("a", 16),)), 0.0, 0.1)
    leaves = Plan((Work("b", 16),), handoff={"a": "offloaded"}, without_kv=frozenset("a"))
    events = run_step(r, leaves, 0.1, 0.2)
    (left,) = [e for e in events if isinstance(e, HandedOff)]
    assert left.request.handoff == Handoff("r0", "offloaded", 0.1)
    assert left.request.progress == Progress((0.0,), ((0.1,),), (7,))
    assert ([*r.running], [*r.migrating_out], r.take_gone_ids()) == (["b"], [], ["a"])
    with pytest.raises(PlanError, match="calls 'b' prefilled, and without_kv gives up its KV"):
        r.apply(Plan(handoff={"b": "prefilled"}, without_kv=frozenset("b")), 0.3, "test")


def test_what_is_recalled_is_what_was_there_then() -> None:
    """In the order of the queue; those held behind the first of their group, too; not what is moving or comes later."""
    r = replica(max_running=2)
    ids = tuple(range(20))
    for id in ("runs", "waits", "back"):
        r.submit(request(id, 8), 0.0)
    for id in ("first", "second"):
        asked = Request(id, (Stage(20, SLO(ttft=1.0), token_ids=ids),), 0.0, group="g", sampling=Sampling(10))
        r.submit(asked, 0.0)
    run_step(r, Plan((Work("runs", 8), Work("back", 8))), 0.0, 0.1)
    run_step(r, Plan((Work("runs", 1),), preempt=("back",)), 0.1, 0.2)
    batch, _ = r.apply(Plan((Work("runs", 1),)), 0.2, "test")
    assert handoff.recall(r, "waiting")
    r.submit(request("later", 8), 0.25)
    r.commit(batch, StepResult({"runs": Emitted(1)}, 0.1), 0.3)
    events = handoff.hand_back(r, 0.3)
    assert [e.id for e in events] == ["waits", "back", "first", "second"]
    integrity.check(r)
    assert ([s.id for s in r.waiting], [*r.running]) == (["later"], ["runs"])
    assert handoff.recall(r, "best_effort")
    assert [e.id for e in handoff.hand_back(r, 0.3)] == ["runs", "later"]
    assert (r.empty, r.kv.free) == (True, LIMITS.kv_blocks)
    assert (handoff.recall(r, "waiting"), handoff.hand_back(r, 0.4)) == (False, [])


# --------------------------------------------------------------------------- between the replicas of a cluster


def scenario(acts: list[tuple[float, Act]], ratio: tuple[int, int], links: Sequence[KVLink] | None = None,
             fair: FairShare | None = None) -> list[Event]:  # fmt: skip
    """The events of a cluster under distserve to which this happens."""

    def build(clock: VirtualClock) -> Cluster:
        engines = [Breaks(Linear(), LIMITS, clock, link=link) for link in links or [LINK] * sum(ratio)]
        choice = PolicyChoice("distserve", router_settings={"prefill": ratio[0], "decode": ratio[1]})
        return local_cluster(engines, [Linear() for _ in engines], clock, ClusterOptions(choice, fair=fair))

    return play(build, acts)[1]


def of(events: Sequence[Event], kind: type[Event], id: str) -> list[Event]:
    return [e for e in events if isinstance(e, kind) and e.id == id]


def end(events: Sequence[Event], id: str) -> Finished:
    (last,) = of(events, Finished, id)
    assert isinstance(last, Finished)
    return last


def path(events: Sequence[Event], id: str) -> list[str]:
    return [e.replica for e in events if isinstance(e, Placed) and e.id == id]


def test_request_is_prefilled_here_and_decoded_there() -> None:
    """Prefill 0.03 s, transfer 0.5, then 15 decodes of 0.011."""
    events = scenario([(0.0, offer(request("a", 20, ttft=0.1, tpot=0.02)))], (1, 1))
    assert path(events, "a") == ["r0", "r1"]
    assert of(events, Transferred, "a") == [Transferred(0.53, "a", "r1", "r0", 20, 2000)]
    assert sum(e.tokens for e in of(events, Tokens, "a")) == 16  # type: ignore[attr-defined]
    last = end(events, "a")
    assert (last.outcome, last.output, last.verdict.cause) == ("completed", 16, "transfer")
    assert last.at == pytest.approx(0.53 + 15 * 0.011)
    assert [e.id for e in events if isinstance(e, Stepped)] == ["r0"] + ["r1"] * 15
    for event in events:
        assert decode(encode(event)) == event
        encode(without_content(event))


def test_one_token_needs_no_second_replica() -> None:
    events = scenario([(0.0, offer(request("a", 20, most=1)))], (1, 1))
    assert path(events, "a") == ["r0"]
    assert end(events, "a").outcome == "completed"


def test_a_client_that_leaves_in_the_middle_of_a_transfer_frees_both_ends() -> None:
    free: list[int] = []

    def look(cluster: Cluster) -> None:
        free.extend(host.view().kv_free for host in cluster.hosts.values())

    events = scenario(
        [(0.0, offer(request("a", 20))), (0.2, look), (0.3, cancels("a")), (0.3, look), (0.9, look)], (1, 1)
    )
    assert free == [22, 22, 25, 25, 25, 25]
    last = end(events, "a")
    assert (last.outcome, last.at, last.output) == ("cancelled", 0.3, 1)
    assert not of(events, Transferred, "a")


@pytest.mark.parametrize("nth", [1, 2])
def test_a_client_that_leaves_as_it_is_told_of_its_placement(nth: int) -> None:
    """Where it is to prefill, and where its KV is to go."""
    placed: list[Event] = []

    def leave(cluster: Cluster, event: Event) -> None:
        if isinstance(event, Placed) and event.id == "a":
            placed.append(event)
            if len(placed) == nth:
                cluster.cancel("a")

    requests = [request("a", 20, most=10), request("b", 20, most=10)]
    spec = run_spec(Linear(), LIMITS, "distserve", replicas=2, link=LINK)
    events = simulate_events(requests, {"a": [10], "b": [10]}, spec, watch=leave)
    assert {e.id: e.outcome for e in events if isinstance(e, Finished)} == {"a": "cancelled", "b": "completed"}
    assert len(placed) == nth


def test_a_client_that_leaves_after_the_target_began_afresh() -> None:
    """Its Finished does not depend on whom it is on the way to."""
    x = request("x", 20, most=150)
    acts = [(0.0, offer(x)), (0.8, offer(request("a", 20))), (1.0, breaks(1)), (1.1, cancels("a"))]
    events = scenario(acts, (1, 1))
    assert (end(events, "a").outcome, end(events, "a").at) == ("cancelled", 1.1)


def test_closing_in_the_middle_of_a_transfer_ends_it_once() -> None:
    closing: list[asyncio.Task[None]] = []

    def close(cluster: Cluster) -> None:
        closing.append(asyncio.ensure_future(cluster.close()))

    events = scenario([(0.0, offer(request("a", 20))), (0.2, close)], (1, 1))
    assert end(events, "a").at == 0.2
    assert closing[0].done()


FULL = request("full", 100, most=90)  # with 190 tokens, 24 of 25 blocks


def test_who_finds_no_memory_waits_for_it_where_it_was_prefilled() -> None:
    events = scenario([(0.0, offer(FULL)), (1.2, offer(request("a", 90)))], (1, 1))
    (start,) = of(events, Transferred, "a")
    assert isinstance(start, Transferred)
    assert start.at > end(events, "full").at  # 13 + 12 blocks, and watermark or growth: not beside it
    assert {end(events, id).outcome for id in ("full", "a")} == {"completed"}


def test_a_client_that_leaves_while_its_kv_waits_for_memory() -> None:
    events = scenario([(0.0, offer(FULL)), (1.2, offer(request("a", 98))), (1.4, cancels("a"))], (1, 1))
    last = end(events, "a")
    assert (last.outcome, last.at, last.output) == ("cancelled", 1.4, 1)
    assert last.verdict.ttft == pytest.approx(1.2 + 0.118)
    assert end(events, "full").outcome == "completed"


def test_when_the_source_is_lost_the_request_is_prefilled_elsewhere() -> None:
    acts = [(0.0, offer(request("a", 20))), (0.1, breaks(0, dead=True)), (0.1, offer(request("b", 20)))]
    events = scenario(acts, (2, 1))
    assert path(events, "a") == ["r0", "r2", "r1", "r2"]
    assert of(events, Lost, "a") == [Lost(0.1, "a", "r0")]
    assert [e.resumed for e in of(events, Started, "a")] == [False, True]  # type: ignore[attr-defined]
    assert (end(events, "a").outcome, end(events, "a").output) == ("completed", 16)
    assert end(events, "b").outcome == "failed"


def test_when_the_target_is_lost_the_kv_goes_to_another() -> None:
    x, y = request("x", 20, most=150), request("y", 40, most=150)
    acts = [(0.0, offer(x)), (0.1, offer(y)), (0.8, offer(request("a", 20))), (1.0, breaks(1, dead=True))]
    events = scenario(acts, (1, 2))
    assert path(events, "x") == ["r0", "r1"]
    assert path(events, "a") == ["r0", "r1", "r2"]
    assert len(of(events, Lost, "a")) == 1
    assert len(of(events, Started, "a")) == 1  # prefilled once
    assert [end(events, id).outcome for id in "xya"] == ["failed", "completed", "completed"]


def test_with_nobody_left_to_decode_it_ends() -> None:
    x = request("x", 20, most=150)
    acts = [(0.0, offer(x)), (0.8, offer(request("a", 20))), (1.0, breaks(1, dead=True)), (3.0, offer(request("late")))]
    events = scenario(acts, (1, 1))
    assert (end(events, "a").outcome, end(events, "a").output) == ("refused", 1)
    assert end(events, "late").reason == "rejected-no-replica: none is left to decode"


def test_a_target_that_begins_afresh_is_sent_the_kv_again() -> None:
    x = request("x", 20, most=150)
    events = scenario([(0.0, offer(x)), (0.8, offer(request("a", 20))), (1.0, breaks(1))], (1, 1))
    assert path(events, "a") == ["r0", "r1", "r1"]
    assert len(of(events, Started, "a")) == 1
    assert [end(events, id).outcome for id in "xa"] == ["failed", "completed"]


def test_kv_that_its_replica_lost_while_it_waited_is_computed_again() -> None:
    acts = [(0.0, offer(FULL)), (1.2, offer(request("a", 98))), (1.4, breaks(0)), (1.4, offer(request("b", 20)))]
    events = scenario(acts, (1, 1))
    assert [e.resumed for e in of(events, Started, "a")] == [False, True]  # type: ignore[attr-defined]
    assert [end(events, id).outcome for id in ("full", "a", "b")] == ["completed", "completed", "failed"]
    assert end(events, "a").output == 16


def test_kv_that_the_target_cannot_take_is_an_error_of_the_request() -> None:
    links = [LINK, replace(LINK, kv_bytes=99)]
    events = scenario([(0.0, offer(request("a", 20)))], (1, 1), links)
    last = end(events, "a")
    assert last.outcome == "failed"
    assert "its KV could not be moved from r0 to r1: KV of 20 tokens, simulated (100,)" in last.reason


def test_fair_shares_are_not_asked_twice() -> None:
    requests = [request(f"q{i}", 20) for i in range(12)]
    events = scenario([(0.0, offer(*requests))], (1, 1), fair=FairShare(window=2))
    assert {e.outcome for e in events if isinstance(e, Finished)} == {"completed"}


def test_what_is_placed_back_where_its_kv_is_ends() -> None:
    class Back:
        needs = frozenset[str]()

        def observe(self, events: object) -> None: ...
        def place(self, held: Sequence[SeqView], fleet: object, now: float) -> object:
            from rubato.core.interfaces import Dispatch

            return Dispatch({s.id: "r0" for s in held})

        def roles(self, replicas: Sequence[str]) -> object:
            from rubato.policies.distserve import Router

            return Router().roles(replicas)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rubato.fleet.build.router_for", lambda *_: Back())
        events = scenario([(0.0, offer(request("a", 20)))], (1, 1))
    assert "place puts 'a' on 'r0', which had handed it off with its KV of 20 tokens" in end(events, "a").reason


def test_transfer_time_is_latency_and_bytes_over_bandwidth() -> None:
    for link, seconds in ((KVLink(), 0.0), (KVLink(10, 1000.0), 0.2), (KVLink(10, 1000.0, 0.05), 0.25)):
        limits = replace(LIMITS, kv_blocks=100)
        spec = run_spec(Linear(), limits, "distserve", replicas=2, link=link)
        (moved,) = [e for e in simulate_events([request("a", 20)], {}, spec) if isinstance(e, Transferred)]
        assert moved.at == pytest.approx(0.03 + seconds)
    with pytest.raises(ValueError, match="above 0"):
        KVLink(bandwidth=0.0)


def test_stages_move_too() -> None:
    """The second stage's prompt is prefilled where prefills are."""
    stages = (Stage(20, SLO(ttft=1.0), "tool"), Stage(10, SLO(ttft=1.0)))
    tool = Request("t", stages, 0.0, sampling=Sampling(max_tokens=20))
    events = simulate_events([tool], {"t": (5, 5)}, run_spec(Linear(), LIMITS, "distserve", replicas=2, link=LINK))
    assert path(events, "t") == ["r0", "r1", "r0", "r1"]
    assert end(events, "t").output == 10
    assert [e.tokens for e in of(events, Transferred, "t")] == [20, 35]  # type: ignore[attr-defined]


@given(load=loads())
def test_each_pool_does_its_part_and_kv_moves_one_way(load: Load) -> None:
    """Of r0, r1 and r2 the last decodes: no chunk of prefill there, no KV from there, and what leaves is what comes."""
    left: dict[str, int] = {}
    for event in run(load, "distserve"):
        if isinstance(event, Stepped) and event.id == "r2":
            assert event.shape.chunk_sq == 0
        elif isinstance(event, HandedOff) and event.request.handoff is not None:
            left[event.id] = event.request.handoff.cached
            assert (event.request.handoff.cached > 0) == (event.request.handoff.source != "r2")
        elif isinstance(event, Transferred):
            assert (event.replica, event.tokens) == ("r2", left.pop(event.id))
