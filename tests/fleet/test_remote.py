"""The fold over a replica's events agrees with the replica, whatever happens there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rubato.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.cluster import local_cluster
from rubato.engines.simulated import Engine
from rubato.fleet.remote import Mirror, Report, shifted, shifted_report, shifted_request
from rubato.interfaces import View
from rubato.types import SLO, Event, Limits, Offered, Placed, Progress, Request, Stage, Tokens
from tests.doubles import Linear, request
from tests.policies.test_properties import Load, loads

LIMITS = Limits(max_seqs=8, max_tokens=64, max_length=200, kv_blocks=50, block=8)


def told(view: View) -> dict[str, tuple[object, ...]]:
    return {
        s.id: (where, s.stage, s.output, s.length, s.first_token_at, s.missed, s.demoted, s.best_effort, s.due)
        for where, seqs in (("waiting", view.waiting), ("running", view.running))
        for s in seqs
    }


def kv(view: View) -> dict[str, tuple[int, int, int]]:
    return {s.id: (s.cached, s.blocks, s.own_blocks) for s in view.running}


def compare(load: Load, policy: str) -> int:
    """Run a load on a local host and fold its events into a mirror; returns how many states were compared."""
    compared = 0

    async def main() -> None:
        nonlocal compared
        clock = VirtualClock()
        engine = Engine(Linear(), load.limits, clock, lengths=load.truth, noise=0.1)
        cluster = local_cluster([engine], [Linear()], clock, policy=policy, prefix_cache=load.prefix_cache)
        await cluster.start()
        replica = cluster.hosts["r0"].replica  # type: ignore[attr-defined]
        mirror = Mirror("r0", load.limits, Linear(), engine.supports, 0.0)
        outbox: list[Event] = []

        def listen(event: Event) -> None:
            nonlocal compared
            if isinstance(event, Placed):
                mirror.submit(next(r for r in load.requests if r.id == event.id), event.at)
                return
            outbox.append(event)

        def report() -> None:
            """At any moment: what a step brought is told before the next moment."""
            nonlocal compared
            held = kv(replica.view(clock.now()))
            mirror.take(Report(clock.now(), tuple(outbox), replica.kv.free, replica.busy_until, held))
            outbox.clear()
            there, here = replica.view(clock.now()), mirror.view(clock.now())
            grouped = {r.id for r in load.requests if r.group}  # held behind the first of a group: not shown there
            missing = told(here).keys() - told(there).keys()
            assert missing <= grouped
            assert {i: v for i, v in told(here).items() if i not in missing} == told(there)
            assert (kv(here), here.kv_free) == (kv(there), there.kv_free)
            compared += 1

        cluster.listen(listen)
        for r in load.requests:
            clock.call_at(r.arrival, ARRIVAL, lambda r=r: cluster.offer(r))  # type: ignore[misc]
        while cluster.offered < len(load.requests) or cluster.in_flight:
            await clock.sleep_until(clock.now() + 0.0137, ARRIVAL)
            report()
        report()
        assert mirror.empty
        await cluster.close()

    run_virtual(main())
    return compared


@given(load=loads(), policy=st.sampled_from(["vllm", "edf", "prefill_first"]))
def test_a_mirror_shows_what_the_replica_shows(load: Load, policy: str) -> None:
    assert compare(load, policy) > 0


def test_what_was_received_moves_with_a_request() -> None:
    stages = (Stage(5, SLO(ttft=1.0), "</think>", (1, 2, 3, 4, 5)), Stage(0, SLO(tpot=0.1)))
    mirror = Mirror("r0", Engine(Linear(), LIMITS, VirtualClock()).limits, Linear(), frozenset(), 0.0)
    mirror.submit(Request("a", stages, 0.0), 0.0)
    mirror.submit(request("untouched"), 0.0)
    events = (
        Tokens(0.5, "a", 1, "x", (7,)),
        Tokens(0.6, "a", 1, "</think>", (8,), stage_done=True),
        Tokens(0.7, "a", 1, "y", (9,), stage=1),
    )
    mirror.take(Report(0.7, events, 10, 0.7, {}))
    left = {r.id: r.progress for r in mirror.left()}
    assert left == {"a": Progress((0.0, 0.6), ((0.5, 0.6), (0.7,)), (7, 8, 9)), "untouched": None}


def test_times_in_another_clock() -> None:
    asked = Request("a", (Stage(5),), 1.0, progress=Progress((1.0,), ((2.0, 3.0),), (7, 8)))
    moved = shifted_request(asked, 10.0)
    assert (moved.arrival, moved.progress) == (11.0, Progress((11.0,), ((12.0, 13.0),), (7, 8)))
    assert shifted(Offered(1.0, "a", asked), 10.0) == Offered(11.0, "a", moved)
    report = Report(5.0, (Tokens(4.0, "a", 1),), 3, 6.0, {"a": (1, 1, 1)}, None)
    assert shifted_report(report, -1.0) == Report(4.0, (Tokens(3.0, "a", 1),), 3, 5.0, {"a": (1, 1, 1)}, None)
