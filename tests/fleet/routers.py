"""A cluster of two replicas with any Router and Scheduler objects, simulated or on the wall clock, for tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rubato.core.clock import ARRIVAL, Clock, VirtualClock, WallClock, run_strict, run_virtual
from rubato.core.events import Event, Finished, HandedOff, Lost, Placed, Started, Tokens
from rubato.core.interfaces import Host, LengthPredictor, Router, Scheduler
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.engines.simulated import Engine, KVLink
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.event_bus import Listener
from rubato.fleet.local_host import LocalHost
from rubato.policies import load
from rubato.policy_kit.fair_share import FairShare
from tests.kit import Linear, integrity

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=50, block_size=8)
STEP = Linear(0.002, 0.0001)  # 2 ms and 0.1 ms a token

Act = tuple[float, Callable[[Cluster], None]]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
CLOCKS: dict[str, tuple[type[Clock], Run]] = {"simulated": (VirtualClock, run_virtual), "live": (WallClock, run_strict)}


def serve(
    clock: str,
    router: Router,
    requests: Sequence[Request],
    *,
    scheduler: Callable[[], Scheduler] = lambda: load("vllm"),
    acts: Sequence[Act] = (),
    later: Sequence[tuple[Callable[[Event], bool], Request]] = (),
    replicas: int = 2,
    limits: Limits = LIMITS,
    lengths: LengthPredictor | None = None,
    host: type[LocalHost] = LocalHost,
    engine: type[Engine] = Engine,
    link: KVLink | None = None,
    fair: FairShare | None = None,
    setup: Callable[[Cluster], None] = lambda cluster: None,
) -> list[Event]:
    """Offer `requests` at their arrivals, do `acts` at their times (both in seconds from the start), offer each of
    `later` once there was such an event, and serve them to their ends.

    Returns all events. The books of cluster and replicas are checked at each of them, and in the end that every request
    has ended once and all KV is free.
    """
    make, run = CLOCKS[clock]
    events: list[Event] = []

    async def main() -> None:
        now = make()

        def make_host(id: str, emit: Listener, lost: HostLost) -> Host:
            given: dict[str, Any] = {} if link is None else {"link": link}
            return host(
                id, engine(STEP, limits, now, **given), scheduler(), STEP, now, emit=emit, lost=lost, policy="toy",
                options=ReplicaOptions(lengths),
            )  # fmt: skip

        cluster = Cluster([make_host] * replicas, router, now, lengths=lengths, fair=fair)
        cluster.listen(events.append)
        cluster.listen(lambda _: integrity.check_cluster(cluster))
        ahead = list(later)
        all_offered = asyncio.Event()

        def follow(event: Event) -> None:
            for at, (happened, request) in enumerate(ahead):
                if happened(event):
                    del ahead[at]
                    now.call_at(now.now(), ARRIVAL, partial(offered(request)[1], cluster))
                    break
            if not ahead and cluster.offered == len(requests) + len(later):
                all_offered.set()

        cluster.listen(follow)
        await cluster.start()
        setup(cluster)
        begin = now.now()
        for at, act in sorted([*map(offered, requests), *acts], key=lambda each: each[0]):
            if begin + at > now.now():
                await now.sleep_until(begin + at, ARRIVAL)
            act(cluster)
        await all_offered.wait()
        await cluster.drain()
        for each in cluster.hosts.values():
            await each.drain()
            view = each.view()
            assert (view.kv_free, view.in_flight.tokens) == (view.kv_total, 0)
        await cluster.close()

    run(main())
    ids = [r.id for r in (*requests, *(request for _, request in later))]
    assert Counter(e.id for e in events if isinstance(e, Finished)) == Counter(ids)
    return events


def offered(request: Request) -> Act:
    return request.arrival, lambda cluster: cluster.offer(replace(request, arrival=cluster.clock.now()))


def out(id: str, tokens: int) -> Callable[[Event], bool]:
    """Once so many tokens of a request are out."""
    came = 0

    def happened(event: Event) -> bool:
        nonlocal came
        came += event.tokens if isinstance(event, Tokens) and event.id == id else 0
        return came >= tokens

    return happened


def ends(events: Sequence[Event]) -> dict[str, Finished]:
    return {e.id: e for e in events if isinstance(e, Finished)}


def places(events: Sequence[Event], id: str) -> list[str]:
    return [e.replica for e in events if isinstance(e, Placed) and e.id == id]


def started(events: Sequence[Event]) -> list[str]:
    return [e.id for e in events if isinstance(e, Started)]


def moved(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """(request, reason, tokens of KV that went along) of each hand-off."""
    handoffs = [(e.id, e.request.handoff) for e in events if isinstance(e, HandedOff)]
    return [(id, handoff.reason, handoff.cached) for id, handoff in handoffs if handoff is not None]


def lost(events: Sequence[Event]) -> list[str]:
    return [e.id for e in events if isinstance(e, Lost)]
