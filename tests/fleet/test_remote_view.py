"""The fold over a replica's events agrees with the replica, whatever happens there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.core.events import Event, Finished, HandedOff, Offered, Placed, Started, Stepped, Tokens
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Shape
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Handoff, Progress, Request, Stage
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.remote_view import RemoteReplica
from rubato.wire.replica_report import KVUsage, ReplicaReport, shift_event, shift_report, shift_request
from tests.kit import Linear, request
from tests.policies.test_properties import Load, instant, loads, spec_for

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=50, block_size=8)


def told(view: View) -> dict[str, tuple[object, ...]]:
    return {
        s.id: (
            where,
            s.stage,
            s.output,
            s.length,
            s.first_token_at,
            s.missed,
            s.demoted,
            s.best_effort,
            s.due,
            s.tried,
            s.acceptance,
        )
        for where, seqs in (("waiting", view.waiting), ("running", view.running), ("moving", view.moving))
        for s in seqs
    }


def kv(view: View) -> dict[str, tuple[int, int, int, int]]:
    return {s.id: (s.cached, s.blocks, s.own_blocks, s.in_flight) for s in [*view.running, *view.moving]}


def compare(load: Load, policy: str) -> int:
    """Run a load on local hosts and fold their events into mirrors; returns how many states were compared."""
    compared = 0

    async def main() -> None:
        nonlocal compared
        clock = VirtualClock()
        setup = spec_for(policy, load.limits)
        given = {"lengths": load.truth, "noise": 0.1, "link": setup.link, "drafter": setup.drafter}
        engines = [Engine(Linear(), load.limits, clock, **given) for _ in range(setup.replicas)]  # type: ignore[arg-type]
        models = [Linear() for _ in engines]
        options = ClusterOptions(PolicyChoice(policy), ReplicaOptions(prefix_cache=load.prefix_cache))
        cluster = local_cluster(engines, models, clock, options)
        await cluster.start()
        replicas = {id: host.replica for id, host in cluster.hosts.items()}  # type: ignore[attr-defined]
        mirrors = {id: RemoteReplica(id, load.limits, Linear(), r.supports, 0.0) for id, r in replicas.items()}
        for id, mirror in mirrors.items():
            mirror.assign(replicas[id].role)
        outboxes: dict[str, list[Event]] = {id: [] for id in mirrors}
        asked = {r.id: r for r in load.requests}
        where: dict[str, str] = {}

        def listen(event: Event) -> None:
            """As each host would tell its own."""
            assert not (isinstance(event, Finished) and event.outcome == "failed"), event
            if isinstance(event, Placed):
                where[event.id] = event.replica
                if any(isinstance(e, HandedOff) and e.id == event.id for e in outboxes[event.replica]):
                    hear(event.replica)  # back where it was: its controller had heard of the hand-off before
                mirrors[event.replica].submit(asked[event.id], event.at)
            elif isinstance(event, Stepped):
                outboxes[event.id].append(event)
            elif event.id in where:
                outboxes[where[event.id]].append(event)
            if isinstance(event, HandedOff):
                asked[event.id] = event.request

        def hear(id: str) -> None:
            """What a report at this moment would say."""
            replica = replicas[id]
            told_now, outboxes[id] = outboxes[id], []
            mirrors[id].apply(
                ReplicaReport(
                    clock.now(),
                    tuple(told_now),
                    replica.kv.free,
                    replica.busy_until,
                    kv(replica.view(clock.now())),
                    in_flight=replica.shape,
                )
            )

        def report(id: str) -> None:
            """At any moment: what a step brought is told before the next moment."""
            nonlocal compared
            there = replicas[id].view(clock.now())
            hear(id)
            mirror = mirrors[id]
            here = mirror.view(clock.now())
            grouped = {r.id for r in load.requests if r.group}  # held behind the first of a group: not shown there
            missing = told(here).keys() - told(there).keys()
            assert missing <= grouped
            assert {i: v for i, v in told(here).items() if i not in missing} == told(there)
            assert (kv(here), here.kv_free) == (kv(there), there.kv_free)
            assert (here.role, here.limits, here.in_flight) == (there.role, there.limits, there.in_flight)
            assert here.steps == there.steps
            assert [s.id for s in here.waiting if s.id not in missing] == [s.id for s in there.waiting]
            compared += 1

        cluster.listen(listen)
        for r in load.requests:
            clock.call_at(r.arrival, ARRIVAL, lambda r=r: cluster.offer(r))  # type: ignore[misc]
        while cluster.offered < len(load.requests) or cluster.in_flight:
            await clock.sleep_until(clock.now() + 0.0137, ARRIVAL)
            for id in mirrors:
                report(id)
        for host in cluster.hosts.values():
            await host.drain()
        for id, mirror in mirrors.items():
            report(id)
            assert mirror.is_empty
        await cluster.close()

    run_virtual(main())
    return compared


@given(load=loads(), policy=st.sampled_from(["vllm", "edf", "prefill_first", "distserve", "ascendra", "vllm_spec"]))
def test_a_mirror_shows_what_the_replica_shows(load: Load, policy: str) -> None:
    assert compare(instant(load), policy) > 0  # a replica elsewhere refuses who waits for a tool


def test_what_was_received_moves_with_a_request() -> None:
    stages = (Stage(5, SLO(ttft=1.0), "</think>", (1, 2, 3, 4, 5)), Stage(0, SLO(tpot=0.1)))
    mirror = RemoteReplica("r0", Engine(Linear(), LIMITS, VirtualClock()).limits, Linear(), frozenset(), 0.0)
    mirror.submit(Request("a", stages, 0.0), 0.0)
    mirror.submit(request("untouched"), 0.0)
    events = (
        Tokens(0.5, "a", 1, "x", (7,)),
        Tokens(0.6, "a", 1, "</think>", (8,), stage_done=True),
        Tokens(0.7, "a", 1, "y", (9,), stage=1),
    )
    mirror.apply(ReplicaReport(0.7, events, 10, 0.7, {}))
    left = {r.id: r.progress for r in mirror.unfinished_requests(0.7)}
    assert left == {"a": Progress((0.0, 0.6), ((0.5, 0.6), (0.7,)), (7, 8, 9)), "untouched": None}


def test_what_was_waited_elsewhere_moves_with_a_request_that_has_no_output_yet() -> None:
    mirror = RemoteReplica("r0", Engine(Linear(), LIMITS, VirtualClock()).limits, Linear(), frozenset(), 0.0)
    waited = Progress((0.0,), ((),), delays={"queue": 0.5})
    mirror.submit(replace(request("a"), progress=waited, handoff=Handoff("r1", "offloaded", 0.5)), 0.6)
    (left,) = mirror.unfinished_requests(0.6)
    assert left.progress == waited
    assert (left.handoff, left.losses) == (Handoff("r1", "offloaded", 0.5), 1)  # what policies know of it stays


def test_a_request_outside_the_reported_batch_may_be_to_blame_for_a_loss_once_that_batch_is_over() -> None:
    mirror = RemoteReplica("r0", LIMITS, Linear(), frozenset(), 0.0)
    for id in ("runs", "waits", "new"):
        mirror.submit(request(id), 0.0)
    events = (Offered(0.0, "runs", request("runs")), Offered(0.0, "waits", request("waits")), Started(0.1, "runs"))
    batch = Shape(tokens=5, seqs=1, kv=5)
    mirror.apply(ReplicaReport(0.1, events, 10, 0.5, {"runs": KVUsage(0, 1, 1, 5)}, in_flight=batch))
    assert {r.id: r.losses for r in mirror.unfinished_requests(0.4)} == {"runs": 1, "waits": 0, "new": 1}
    assert {r.id: r.losses for r in mirror.unfinished_requests(0.6)} == {"runs": 1, "waits": 1, "new": 1}
    mirror.apply(ReplicaReport(0.6, (), 10, 0.6, {"runs": KVUsage(5, 1, 1, 0)}))
    assert {r.id: r.losses for r in mirror.unfinished_requests(0.6)} == {
        "runs": 1,
        "waits": 1,
        "new": 1,
    }  # no batch is known


def test_times_in_another_clock() -> None:
    asked = Request("a", (Stage(5),), 1.0, progress=Progress((1.0,), ((2.0, 3.0),), (7, 8)))
    moved = shift_request(asked, 10.0)
    assert (moved.arrival, moved.progress) == (11.0, Progress((11.0,), ((12.0, 13.0),), (7, 8)))
    assert shift_event(Offered(1.0, "a", asked), 10.0) == Offered(11.0, "a", moved)
    report = ReplicaReport(5.0, (Tokens(4.0, "a", 1),), 3, 6.0, {"a": (1, 1, 1, 0)}, None)
    handed = replace(asked, handoff=Handoff("r0", "prefilled", 3.0, 7))
    there = replace(moved, handoff=Handoff("r0", "prefilled", 13.0, 7))
    assert shift_event(HandedOff(3.0, "a", handed), 10.0) == HandedOff(13.0, "a", there)
    assert shift_report(report, -1.0) == ReplicaReport(4.0, (Tokens(3.0, "a", 1),), 3, 5.0, {"a": (1, 1, 1, 0)}, None)


def test_free_kv_that_was_read_counts_until_a_report_says_it() -> None:
    mirror = RemoteReplica("r0", LIMITS, Linear(), frozenset(), 0.0)
    for id in ("before", "after", "waits"):
        mirror.submit(Request(id, (Stage(17),), 0.0), 0.0)
    mirror.fold(Started(0.1, "before"))
    mirror.set_kv_free(4)
    assert mirror.view(0.2).kv_free == 4
    mirror.fold(Started(0.3, "after"))
    assert mirror.view(0.4).kv_free == 1  # 17 tokens are 3 blocks of 8
    mirror.fold(Tokens(0.5, "after", 8))
    assert mirror.view(0.5).kv_free == 0
    mirror.set_kv_free(40)
    assert mirror.view(0.5).kv_free == 40
    mirror.fold(Started(0.6, "waits"))
    mirror.apply(ReplicaReport(0.7, (), 30, 0.7, {}))
    assert mirror.view(0.7).kv_free == 30
