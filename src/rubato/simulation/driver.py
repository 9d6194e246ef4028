"""A cluster of counted hosts, driven from one step completion, arrival or plan to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from math import inf
from typing import Any, cast

from rubato.core.clock import ARRIVAL, COMPLETION, PLAN, HandClock
from rubato.core.request import Request
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost, HostMaker
from rubato.fleet.event_bus import Listener
from rubato.policies import load
from rubato.simulation.fast_host import EventQueue, FastHost

Maker = Callable[..., FastHost]  # as LeanHost takes them, but for what a cluster gives a host


class _Timer:
    """A callback among the hosts of an agenda."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def plan(self, version: int) -> None:
        if self._callback is not None:
            self._callback()

    def cancel(self) -> None:
        self._callback = None


class _Clock(HandClock):
    """The time of an agenda, whose callbacks are called with its plans: for a router that says when to ask it again."""

    def __init__(self, agenda: EventQueue) -> None:
        super().__init__()
        self._agenda = agenda

    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        if rank != PLAN:
            raise RuntimeError("on this clock callbacks have the rank of plans")
        timer: Any = _Timer(callback)
        heappush(self._agenda.heap, (max(when, self.time), rank, next(self._agenda.count), timer, 0))
        return cast(asyncio.TimerHandle, timer)


def drive(
    requests: Iterable[Request],
    replicas: int,
    make: Maker,
    ready: Callable[[Cluster], None],
    **given: Any,
) -> None:
    """Offer requests, ascending in arrival, to a cluster of hosts that `make` gives, and run them to their ends.

    make: (number of the replica, the rest by name). ready: called with the cluster before the first. given: as
    `cluster_of` takes. Raises RuntimeError if some request never ends, and whatever a policy raised.
    """
    agenda = EventQueue()
    clock = _Clock(agenda)
    heap, count = agenda.heap, agenda.count
    hosts: list[FastHost] = []

    def maker(number: int) -> HostMaker:
        def host(id: str, *, emit: Listener, lost: HostLost, policy: str, settings: Mapping[str, object] | None,
                 options: Mapping[str, Any]) -> FastHost:  # fmt: skip
            made = make(
                number, id=id, scheduler=load(policy, settings), clock=clock, emit=emit, agenda=agenda, policy=policy,
                lengths=options["lengths"], rule=options["rule"],
            )  # fmt: skip
            hosts.append(made)
            return made

        return host

    cluster = cluster_of([maker(i) for i in range(replicas)], clock, **given)
    ready(cluster)
    arriving = iter(requests)
    coming = next(arriving, None)
    arrival = inf if coming is None else coming.arrival
    while heap or coming is not None:
        if coming is not None and (
            not heap or arrival < heap[0][0] or (arrival == heap[0][0] and heap[0][1] > ARRIVAL)
        ):
            clock.time = max(clock.time, arrival)
            cluster.offer(coming)
            coming = next(arriving, None)
            arrival = inf if coming is None else coming.arrival
            continue
        when, rank, _, host, version = heappop(heap)
        clock.time = when
        if rank == COMPLETION:
            if host.complete(version):
                if arrival <= when or (heap and heap[0][0] <= when):
                    heappush(heap, (when, PLAN, next(count), host, version))
                else:
                    host.plan(version)
        else:
            host.plan(version)
    for host in hosts:
        host.log.clear()  # a host is in cycles: what it holds would stay until the next search for such
    if cluster.error is not None:
        raise cluster.error
    if cluster.in_flight:
        raise RuntimeError(f"virtual time stands still: {cluster.in_flight} requests are left and nothing will happen")
