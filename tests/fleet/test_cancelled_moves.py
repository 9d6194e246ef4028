"""A hand-off that is cut at any moment: by a client that leaves, or an engine or a replica that is lost.

Each case runs a small load once, notes when something happens, and runs it again once for each request or replica and
each of these moments: before and after all that happens at that instant, half-way to the next one, and from within the
report of the event itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import ARRIVAL, COMPLETION, SCALE, VirtualClock, run_virtual
from rubato.core.events import Event, Finished, HandedOff, Placed, Transferred
from rubato.core.plan import KV, Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.simulated import KVLink
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.policy_kit.fair_share import FairShare
from tests.conftest import PROFILE, few
from tests.kit import Linear, fleets, integrity, request
from tests.kit.fleets import breaks, cancels

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=16, block_size=8)
LINK = KVLink(kv_bytes=100, bandwidth=100_000, latency=0.05)  # 20 tokens: 0.05 + 0.02 s
READ = 0.01  # seconds that reading KV takes
AFTER = SCALE + 1  # a rank after all that happens at an instant
RUNAWAY = 2000  # events; the runs here have about 100


class Breaks(fleets.Breaks):
    """Reading KV takes time, too."""

    async def export_kv(self, blocks: Sequence[int], tokens: int) -> KV:
        await self._clock.sleep_until(self._clock.now() + READ, COMPLETION)
        return await super().export_kv(blocks, tokens)


@dataclass(frozen=True)
class Case:
    policy: str
    requests: tuple[Request, ...]
    replicas: int = 3
    settings: Any = None  # of the router

    @property
    def ids(self) -> list[str]:
        return [r.id for r in self.requests]


Act = Callable[[Cluster], None]
Nth = tuple[int, Act]  # done as this event is reported
At = tuple[float, int, Act]  # done at this time, of this rank


def group(*ids: str, tpot: float | None = None) -> list[Request]:
    stage = Stage(20, SLO(ttft=1.0, tpot=tpot), token_ids=tuple(range(20)))
    return [Request(id, (stage,), 0.005, group="g", sampling=Sampling(6)) for id in ids]


def two_stages(id: str, tpot: float | None = None) -> Request:
    stages = (Stage(20, SLO(ttft=1.0, tpot=tpot), "tool"), Stage(10, SLO(ttft=1.0, tpot=tpot)))
    return Request(id, stages, 0.02, sampling=Sampling(max_tokens=8))


CASES = {
    # r0 prefills, r1 decodes; KV for about three, so that some wait for it
    "distserve": Case(
        "distserve",
        (request("big", 80, most=20), *group("g0", "g1"), two_stages("t"), request("a", 33, arrival=0.1, most=8)),
        replicas=2,
        settings={"prefill": 1, "decode": 1},
    ),
    "ascendra": Case(  # hands off without KV: who would be late here goes to r2
        "ascendra",
        (request("a", 60, ttft=1.0, most=8), request("b", 60, ttft=1.0, most=8),
         *(request(id, 40, ttft=0.2, arrival=0.001, most=8) for id in "cdefgh")),
    ),
    "polyserve": Case(
        "polyserve",
        (request("big", 60, ttft=1.0, tpot=0.05, most=20), *group("g0", "g1", tpot=0.05), two_stages("t", 0.1),
         request("a", 30, ttft=0.5, tpot=0.03, arrival=0.1, most=8), request("late", 20, ttft=0.01, arrival=0.1)),
        settings={"mode": "pd"},
    ),
    "rubato": Case(
        "rubato",
        (request("big", 60, ttft=1.0, tpot=0.05, most=20), *group("g0", "g1", tpot=0.05), two_stages("t", 0.1),
         request("a", 30, ttft=0.5, tpot=0.03, arrival=0.1, most=8), request("late", 20, ttft=0.01, arrival=0.1)),
        settings={"mode": "pd"},
    ),
}  # fmt: skip


def served(case: Case, at: Sequence[At] = (), nth: Sequence[Nth] = (), fair: bool = False) -> list[Event]:
    """The events of the case with these acts; after every request has ended once, and nothing is left of any."""
    events: list[Event] = []
    acts = dict(nth)

    async def main() -> None:
        clock = VirtualClock()
        engines = [Breaks(Linear(), LIMITS, clock, link=LINK) for _ in range(case.replicas)]
        cluster = local_cluster(
            engines, [Linear() for _ in engines], clock,
            ClusterOptions(
                PolicyChoice(case.policy, router_settings=case.settings), fair=FairShare(window=2) if fair else None
            ),
        )  # fmt: skip

        def told(event: Event) -> None:
            events.append(event)
            assert len(events) < RUNAWAY, "events without end"
            if act := acts.pop(len(events) - 1, None):
                act(cluster)

        cluster.listen(told)
        cluster.listen(lambda _: integrity.check_cluster(cluster))
        await cluster.start()
        for when, rank, act in at:
            clock.call_at(when, rank, lambda act=act: act(cluster))
        for each in sorted(case.requests, key=lambda r: r.arrival):
            await clock.sleep_until(each.arrival, ARRIVAL)
            cluster.offer(each)
        await cluster.drain()
        for host in [*cluster.hosts.values()]:  # one may be lost meanwhile
            await host.drain()
        await asyncio.sleep(0)  # what was cancelled last
        assert_nothing_left(cluster)
        await cluster.close()

    run_virtual(main())
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(r.id for r in case.requests)
    return events


def assert_nothing_left(cluster: Cluster) -> None:
    table = cluster._requests
    left = [table.unplaced, table.with_kv, table.placements, table.groups, cluster._transfers._tasks]
    assert not any([*left, cluster._cancel_reasons, cluster._request_listeners])
    integrity.check_cluster(cluster)
    for host in cluster.hosts.values():
        replica = host.replica  # type: ignore[attr-defined]
        assert replica.kv.free == LIMITS.kv_blocks
        assert (dict(replica.migrating_out), dict(replica.migrating_in), replica.seqs) == ({}, {}, {})
        host._forget_gone(replica)  # type: ignore[attr-defined]  # as before the next step
        assert host.engine._seqs == {}  # type: ignore[attr-defined]


@cache
def undisturbed(name: str) -> tuple[Event, ...]:
    return tuple(served(CASES[name]))


def moments(name: str) -> list[tuple[float, int]]:
    """When something happens, and between; and the rank before and after all else there."""
    times = sorted({e.at for e in undisturbed(name)})
    found = [(t, rank) for t in times for rank in (COMPLETION - 1, AFTER)]
    return found + [((a + b) / 2, ARRIVAL) for a, b in pairwise(times)]


def outcomes(events: Sequence[Event]) -> dict[str, str]:
    return {e.id: e.outcome for e in events if isinstance(e, Finished)}


MOVES = (Placed, HandedOff, Transferred)
QUICK = 41 if PROFILE == "quick" else 23  # of so many moments one is tried but in `make test-full`
EVERY = [pytest.param(QUICK, id="few"), pytest.param(1, marks=pytest.mark.full)]


@pytest.mark.parametrize("name", CASES)
def test_these_loads_are_handed_off(name: str) -> None:
    events = undisturbed(name)
    assert set(outcomes(events).values()) == {"completed"}
    moved = {e.id for e in events if isinstance(e, HandedOff)}
    with_kv = {e.id for e in events if isinstance(e, Transferred)}
    assert len(moved) > 1
    assert with_kv == (set() if name == "ascendra" else moved)
    assert ({"g0", "g1"} <= moved) == (name != "ascendra")


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", CASES)
def test_a_client_may_leave_at_any_moment(name: str, every: int) -> None:
    case = CASES[name]
    cuts = [(id, moment) for id in case.ids for moment in moments(name)]
    for id, (when, rank) in cuts[::every]:
        ended = outcomes(served(case, [(when, rank, cancels(id))]))
        assert ended.pop(id) in ("cancelled", "completed")
        assert set(ended.values()) == {"completed"}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", CASES)
def test_a_request_may_be_cancelled_by_who_is_told_of_an_event(name: str, every: int) -> None:
    """Of its own moves always, of other events now and then."""
    case = CASES[name]
    events = undisturbed(name)
    cuts = [(id, n) for id in case.ids for n in range(len(events))]
    for at, (id, n) in enumerate(cuts):
        if at % every == 0 or (isinstance(events[n], MOVES) and events[n].id == id):
            ended = outcomes(served(case, nth=[(n, cancels(id))]))
            assert ended.pop(id) in ("cancelled", "completed")
            assert set(ended.values()) == {"completed"}


@pytest.mark.parametrize("every", [pytest.param(2 * QUICK, id="few"), pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("dead", [False, True], ids=["afresh", "lost"])
@pytest.mark.parametrize("name", CASES)
def test_an_engine_may_fail_at_any_moment(name: str, dead: bool, every: int) -> None:
    """Where KV comes from or goes to; and begin afresh, or not."""
    case = CASES[name]
    cuts = [(replica, moment) for replica in range(case.replicas) for moment in moments(name)]
    for replica, (when, rank) in cuts[::every]:
        served(case, [(when, rank, breaks(replica, dead=dead))])


@pytest.mark.parametrize("name", CASES)
@few
@given(data=st.data())
def test_clients_may_leave_while_engines_fail(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    when = st.sampled_from(moments(name))
    cut = st.sampled_from(case.ids).map(cancels)
    broken = st.builds(lambda n, dead: breaks(n, dead=dead), st.integers(0, case.replicas - 1), st.booleans())
    acts = data.draw(st.lists(st.tuples(when, cut | broken), min_size=2, max_size=6))
    nth = data.draw(st.lists(st.tuples(st.integers(0, len(undisturbed(name)) - 1), cut), max_size=2))
    served(case, [(*moment, act) for moment, act in acts], nth, fair=data.draw(st.booleans()))
