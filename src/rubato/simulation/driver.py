"""A cluster of simulated hosts, driven from one step completion, arrival or plan to the next, without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from heapq import heappop
from math import inf
from typing import Any

from rubato.core.clock import ARRIVAL, COMPLETION, PLAN, HandClock, Handle
from rubato.core.events import Event, HandedOff
from rubato.core.interfaces import Host
from rubato.core.request import Request
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost, HostMaker
from rubato.fleet.event_bus import Listener
from rubato.policies import load
from rubato.simulation.simulated_host import EventQueue, SimulatedHost

Maker = Callable[..., SimulatedHost]  # as it takes them, but for what a cluster gives a host


class _Timer:
    """A callback among the hosts of a queue."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def plan(self, version: int) -> None:
        if self._callback is not None:
            self._callback()

    def complete(self, version: int) -> bool:
        self.plan(version)
        return False

    def cancel(self) -> None:
        self._callback = None


class _Task:
    """A coroutine that waits for nothing but times."""

    def __init__(self, clock: QueueClock, main: Coroutine[tuple[float, int], None, None]) -> None:
        self._clock = clock
        self._main = main

    def plan(self, version: int) -> None:
        """On to where it waits again."""
        clock, self._clock.task = self._clock, self
        try:
            when, rank = self._main.send(None)
        except StopIteration:
            return
        finally:
            clock.task = None
        clock.queue.add(max(when, clock.time), rank, self, 0)

    def complete(self, version: int) -> bool:
        self.plan(version)
        return False

    def cancel(self) -> None:
        self._main.close()
        self._main = _nothing()


class _Until:
    """What a coroutine waits for."""

    def __init__(self, when: float, rank: int) -> None:
        self._at = (when, rank)

    def __await__(self) -> Generator[tuple[float, int], None, None]:
        yield self._at


async def _nothing() -> None: ...


class QueueClock(HandClock):
    """The time of a queue, in which callbacks and coroutines stand beside hosts."""

    def __init__(self, queue: EventQueue) -> None:
        super().__init__()
        self.queue = queue
        self.task: _Task | None = None  # that runs now
        self.spawned: list[_Task] = []  # that have yet to begin

    def call_at(self, when: float, rank: int, callback: Callable[[], None]) -> Handle:
        timer = _Timer(callback)
        self.queue.add(max(when, self.time), rank, timer, 0)
        return timer

    async def sleep_until(self, when: float, rank: int) -> None:
        await _Until(when, rank)

    def spawn(self, main: Coroutine[Any, Any, None], name: str) -> Handle:
        task = _Task(self, main)
        self.spawned.append(task)
        return task

    def current_task(self) -> Handle | None:
        return self.task

    def begin_spawned(self) -> None:
        """As an event loop does between two timers."""
        while self.spawned:
            self.spawned.pop(0).plan(0)


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
    queue = EventQueue()
    clock = QueueClock(queue)
    hosts: list[SimulatedHost] = []

    def maker(number: int) -> HostMaker:
        def host(id: str, *, emit: Listener, lost: HostLost, policy: str, settings: Mapping[str, object] | None,
                 options: Mapping[str, Any]) -> SimulatedHost:  # fmt: skip
            made = make(
                number, id=id, scheduler=load(policy, settings), clock=clock, emit=emit, queue=queue, policy=policy,
                every_step=lambda: cluster.wants_steps, **options,
            )  # fmt: skip
            hosts.append(made)
            return made

        return host

    def follow(event: Event) -> None:
        if isinstance(event, HandedOff) and cluster.wants_steps:  # it waits for what the end of a step may bring
            for host in hosts:
                host.hear()

    def spare(id: str, **more: Any) -> Host:
        return maker(len(hosts))(id, **more)

    further = spare if given.get("autoscaler") is not None else None
    cluster = cluster_of([maker(i) for i in range(replicas)], clock, spare=further, **given)
    ready(cluster)
    cluster.listen(follow)
    cluster.begin()
    _run(cluster, clock, requests)
    for host in hosts:
        host.clear()
    if cluster.error is not None:
        raise cluster.error
    if cluster.in_flight:
        raise RuntimeError(f"virtual time stands still: {cluster.in_flight} requests are left and nothing will happen")


def _run(cluster: Cluster, clock: QueueClock, requests: Iterable[Request]) -> None:
    queue = clock.queue
    heap, add = queue.heap, queue.add
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
