"""Drives a cluster of simulated hosts from one step completion, arrival or plan to the next, without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop
from math import inf

from rubato.core.clock import ARRIVAL, COMPLETION, PLAN
from rubato.core.events import Event, HandedOff
from rubato.core.request import Request
from rubato.engines.simulated import Engine
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.event_bus import Listener
from rubato.policies import load
from rubato.simulation.queue_clock import QueueClock
from rubato.simulation.run_spec import RunSpec, Truth
from rubato.simulation.simulated_host import HostOptions, SimulatedHost
from rubato.simulation.step_times import StepTimes


def drive(
    requests: Iterable[Request],
    truth: Truth,
    spec: RunSpec,
    host_options: HostOptions,
    ready: Callable[[Cluster], None],
    *,
    seed: int = 0,
    causes: bool = True,
) -> None:
    """Offers requests to a cluster of simulated hosts, and runs them to their ends.

    Args:
        requests: ascending in arrival.
        ready: called with the cluster before the first request.

    Raises:
        RuntimeError: some request never ends. Whatever a policy raised is raised, too.
    """
    clock = QueueClock()
    hosts: list[SimulatedHost] = []
    options = spec.cluster_options(truth, causes)
    choice, machine, models = spec.choice, spec.hardware, spec.scheduler_models()

    def new_host(id: str, emit: Listener, lost: HostLost) -> SimulatedHost:
        number = len(hosts)
        engine = Engine(
            machine.model, machine.limits, clock, lengths=truth, link=spec.link, drafter=spec.drafter,
            start_seconds=spec.start_seconds if number >= spec.replicas else 0.0,
        )  # fmt: skip
        host = SimulatedHost(
            id, engine, load(choice.policy, choice.settings), next(models),
            StepTimes(machine.model, spec.noise, seed + number), clock, emit=emit, policy=choice.policy, targets=truth,
            replica_options=options.replica, host_options=host_options, learns=spec.learns,
            every_step=lambda: cluster.wants_steps,
        )  # fmt: skip
        hosts.append(host)
        return host

    def follow(handed_off: Event) -> None:
        clock.call_at(clock.time, PLAN, report_steps)

    def report_steps() -> None:
        """Makes all hosts report steps if a handed-off request has no place yet: the end of a step may bring one."""
        if cluster.wants_steps:
            for host in hosts:
                host.report_steps()

    extra_host = new_host if spec.autoscaler is not None else None
    cluster = cluster_of([new_host] * spec.replicas, clock, options, extra_host)
    ready(cluster)
    cluster.listen(follow, HandedOff)
    cluster.begin()
    _run(cluster, clock, requests)
    for host in hosts:
        host.clear()
    if cluster.error is not None:
        raise cluster.error
    if cluster.in_flight:
        raise RuntimeError(f"virtual time stands still: {cluster.in_flight} requests are left and nothing will happen")


def _run(cluster: Cluster, clock: QueueClock, requests: Iterable[Request]) -> None:
    """Offers each request at its arrival and calls the clock's entries, in order of time and rank, until both are used
    up.
    """
    heap, add = clock.heap, clock.add
    arriving = iter(requests)
    coming = next(arriving, None)
    arrival = inf if coming is None else coming.arrival
    while heap or coming is not None:
        if coming is not None and (
            not heap or arrival < heap[0][0] or (arrival == heap[0][0] and heap[0][1] >= ARRIVAL)
        ):
            clock.time = max(clock.time, arrival)
            cluster.offer(coming)
            coming = next(arriving, None)
            arrival = inf if coming is None else coming.arrival
        else:
            when, rank, _, _, called, version = heappop(heap)
            clock.time = when
            if rank != COMPLETION:
                called.plan(version)
            elif called.complete(version):
                if arrival <= when or (heap and heap[0][0] <= when):
                    add(when, PLAN, called, version)
                else:
                    called.plan(version)
        if clock.spawned:
            clock.begin_spawned()
