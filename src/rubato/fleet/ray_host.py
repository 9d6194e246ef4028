"""Replicas in Ray actors: each a whole `LocalHost` with its engine, in a process of its own, on any node of a cluster.

Commands go to an actor in numbered batches, reports come back by long polling. A dead actor is noticed by the poll that
waits for it; a frozen one by its silence, and it is killed; its requests go to the others with the tokens that had
arrived.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rubato.core.clock import PLAN, Clock, WallClock, unix_time
from rubato.core.events import Event
from rubato.core.interfaces import Engine, LatencyModel, View
from rubato.core.plan import Limits, Recall, Role
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.event_bus import Listener
from rubato.fleet.local_host import LocalHost
from rubato.fleet.remote_view import (
    KVUsage,
    NoKVTransfer,
    RemoteReplica,
    ReplicaReport,
    shift_report,
    shift_request,
)
from rubato.policies import load

log = logging.getLogger(__name__)

Command = tuple[str, tuple[Any, ...]]  # of a `Host`: submit, cancel, assign or recall, and what it is called with
NO_KV_TRANSFER = "KV does not move between Ray actors yet: run policies that move it with `fleet: local`"
EngineParts = tuple[Engine, LatencyModel]

HEARTBEAT_S = 1.0  # a replica reports at least this often
# Seconds without a report after which a replica is lost. Steps run in threads beside the event loop that reports, so
# only what holds Python's lock (a compilation, an import) can delay a report: for less than 10 s.
MAX_SILENCE_S = 10.0
CLOSE_S = 2.0  # for a replica to end by itself: SIGTERM must not take long


class HostLostError(Exception):
    """A replica's process is gone, or its engine is beyond recovery."""


class _Actor:
    """The replica's side. Every method runs on the actor's one event loop."""

    def __init__(
        self, id: str, make: Callable[[Clock], EngineParts], choice: PolicyChoice, options: ReplicaOptions,
        step_timeout: float | None,
    ) -> None:  # fmt: skip
        self._clock = WallClock()
        engine, latency = make(self._clock)
        self._engine = engine
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._error: str | None = None
        self._batches_done = 0  # batches of commands carried out
        self._turn = asyncio.Condition()
        self._host = LocalHost(
            id,
            engine,
            load(choice.policy, choice.settings),
            latency,
            self._clock,
            emit=self._emit,
            lost=self._lose_host,
            policy=choice.policy,
            options=options,
            kv_transfer=False,
            step_timeout=step_timeout,
        )

    async def start(self) -> tuple[Limits, frozenset[str], LatencyModel]:
        """Limits, capabilities, and what steps take as far as is known."""
        await self._host.start()
        return self._engine.limits, self._host.supports, self._host.latency

    async def clocks(self) -> tuple[float, float]:
        """What this clock and Unix time show now."""
        return self._clock.now(), unix_time()

    async def do(self, number: int, commands: Sequence[Command]) -> None:
        """Carry out batch `number` after the one before it, in whatever order they arrive."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._batches_done == number)
            for name, arguments in commands:
                getattr(self._host, name)(*arguments)
            self._batches_done += 1
            self._turn.notify_all()
        self._news.set()

    async def report(self) -> ReplicaReport:
        """The events since the last call, as soon as there is one, or after HEARTBEAT_S seconds."""
        timer = self._clock.call_at(self._clock.now() + HEARTBEAT_S, PLAN, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
        events, self._events = self._events, []
        replica = self._host.replica
        assert replica is not None, "reports are asked for after start"
        holding = [*replica.running.values(), *replica.migrating_out.values(), *replica.migrating_in.values()]
        kv_usage = {s.id: KVUsage(s.cached, s.blocks, s.own_blocks, s.in_flight) for s in holding if not s.ended}
        return ReplicaReport(
            as_of=self._clock.now(),
            events=tuple(events),
            kv_free=replica.kv.free,
            busy_until=replica.busy_until,
            kv_usage=kv_usage,
            error=self._error,
            in_flight=replica.shape,
        )

    async def close(self) -> None:
        await self._host.close()
        self._news.set()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def _lose_host(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self._news.set()


class RayHost(NoKVTransfer):
    """One replica in a Ray actor (`interfaces.Host`).

    Args:
        make: called in the actor with its clock; returns the engine and latency model.
        emit: as every host's.
        lost: as every host's.
        options: the actor's length predictor is a copy that learns from its own requests; this one learns from all.
        step_timeout: seconds, as in `local_host.LocalHost`.
        resources: Ray's actor options, e.g. {"num_gpus": 1}.

    Raises:
        ValueError: the policy moves KV.
    """

    cooldown_until = 0.0
    why_no_kv = NO_KV_TRANSFER

    def __init__(
        self,
        id: str,
        make: Callable[[Clock], EngineParts],
        clock: Clock,
        *,
        emit: Listener,
        lost: HostLost,
        choice: PolicyChoice,
        options: ReplicaOptions,
        step_timeout: float | None = None,
        resources: Mapping[str, Any] | None = None,
    ) -> None:
        if "kv_transfer" in load(choice.policy, choice.settings).needs:
            raise ValueError(f"policy {choice.policy!r} needs kv_transfer. {NO_KV_TRANSFER}")
        self.id = id
        self.clock = clock
        self._emit = emit
        self._lose_host = lost
        actor_class = ray.remote(**{"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000, **(resources or {})})(
            _Actor
        )
        self.actor: Any = actor_class.remote(id, make, choice, options, step_timeout)
        self._lengths = options.lengths
        self._remote: RemoteReplica | None = None
        self._ahead = 0.0  # what the actor's clock shows more than this one
        self._outbox: list[Command] = []
        self._batches_sent = 0
        self._is_gone = False
        self._silence_s = 0.0  # seconds without a report
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()

    async def start(self) -> None:
        limits, supports, latency = await self.actor.start.remote()
        self._ahead = await self._measure_ahead()
        self._remote = RemoteReplica(self.id, limits, latency, supports, self.clock.now(), self._lengths)
        self._spawn(self._listen(self._remote))
        self._spawn(self._watch())

    def submit(self, request: Request) -> None:
        """Raises ValueError for a request that is to wait for a tool: should this process die meanwhile, no other
        would know of the wait."""
        if request.uses_tools:
            raise ValueError(f"request {request.id!r} waits for a tool, which only a replica in this process does")
        self._started_remote().submit(request, self.clock.now())
        self._send("submit", shift_request(request, self._ahead))

    def cancel(self, id: str, reason: str) -> None:
        self._send("cancel", id, reason)

    def view(self) -> View:
        return self._started_remote().view(self.clock.now())

    def assign(self, role: Role) -> None:
        self._started_remote().assign(role)
        self._send("assign", role)

    def recall(self, kind: Recall) -> None:
        self._send("recall", kind)

    async def drain(self) -> None:
        while not self._started_remote().is_empty and not self._is_gone:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Ends the actor's requests as failed, reports that, and ends the actor. An actor that takes longer than
        CLOSE_S seconds is lost."""
        if not self._is_gone:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self.actor.close.remote()
                    await self.drain()  # the last report is on its way
            except TimeoutError:
                self._die(HostLostError(f"replica {self.id} did not close within {CLOSE_S:g} s"))
            except RayError as error:
                self._die(HostLostError(f"replica {self.id} ended before it was closed ({type(error).__name__})"))
        self._is_gone = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ray.kill(self.actor)

    # ----------------------------------------------------------------- parts

    async def _measure_ahead(self) -> float:
        """Seconds by which the actor's clock is ahead of this one.

        The answer was given between sending and receipt, which bounds the offset. Within these bounds Unix time (one on
        a machine, kept by NTP between nodes) gives the offset exactly; outside them the machines' Unix times differ or
        one was set meanwhile.
        """
        sent_at = self.clock.now()
        theirs, their_unix = await self.actor.clocks.remote()
        received_at = self.clock.now()
        ahead: float = (theirs - their_unix) - (received_at - unix_time())
        least: float = theirs - received_at
        most: float = theirs - sent_at
        return ahead if least <= ahead <= most else (least + most) / 2

    async def _listen(self, remote: RemoteReplica) -> None:
        while not self._is_gone:
            try:
                report = await self.actor.report.remote()
                if self._is_gone:  # it was lost meanwhile: its requests are elsewhere
                    return
                self._silence_s = 0.0
                self._hear(remote, shift_report(report, -self._ahead))
            except RayError as error:
                self._die(HostLostError(f"the process of replica {self.id} is gone ({type(error).__name__})"))
            except Exception as error:  # deaf to its replica this host is of no use: its requests must not hang
                log.exception("replica %s: its report could not be used", self.id)
                self._die(HostLostError(f"{type(error).__name__}: {error}"))

    async def _watch(self) -> None:
        """Notice silence. Silence is counted in turns of this loop, not by a clock: a process that was itself stopped,
        or busy, heard nothing meanwhile, and would take all its replicas for lost."""
        while not self._is_gone:
            await self.clock.sleep_until(self.clock.now() + HEARTBEAT_S, PLAN)
            self._silence_s += HEARTBEAT_S
            if self._silence_s >= MAX_SILENCE_S:
                self._die(HostLostError(f"replica {self.id} has not reported for {MAX_SILENCE_S:g} s"))

    def _hear(self, remote: RemoteReplica, report: ReplicaReport) -> None:
        remote.apply(report)  # first: the cluster may place a request here again on its hand-off
        for event in report.events:
            self._emit(event)
        if remote.is_empty:
            self._idle.set()
        if report.error is not None:
            self._die(HostLostError(report.error))

    def _die(self, error: HostLostError) -> None:
        if self._is_gone:
            return
        self._is_gone = True
        self._idle.set()
        self._lose_host(self.id, error, self._started_remote().unfinished_requests(self.clock.now()))
        # It must not go on with them. This only informs Ray, which also kills a stopped process after 5 s.
        ray.kill(self.actor)

    def _send(self, name: str, *arguments: Any) -> None:
        """Send it in one message with all else of this turn of the loop."""
        if self._is_gone:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((name, arguments))

    def _flush(self) -> None:
        commands, self._outbox = self._outbox, []
        self._spawn(self._deliver(self._batches_sent, commands))
        self._batches_sent += 1

    async def _deliver(self, number: int, commands: Sequence[Command]) -> None:
        try:
            await self.actor.do.remote(number, commands)
        except RayError as error:  # the listener notices the same, and moves the requests
            log.warning("replica %s did not take %d commands: %s", self.id, len(commands), type(error).__name__)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _started_remote(self) -> RemoteReplica:
        if self._remote is None:
            raise RuntimeError(f"host {self.id!r} is not started: await start() first")
        return self._remote


def ray_cluster(
    make: Sequence[Callable[[Clock], EngineParts]], clock: Clock, options: ClusterOptions, *,
    resources: Mapping[str, Any] | None = None, step_timeout: float | None = None,
) -> Cluster:  # fmt: skip
    """A cluster of Ray actors, one for each of `make`; `ray.init` has been called. Raises as `build.cluster_of`."""

    def host(make: Callable[[Clock], EngineParts], id: str, emit: Listener, lost: HostLost) -> RayHost:
        return RayHost(
            id, make, clock, emit=emit, lost=lost, choice=options.choice, options=options.replica,
            step_timeout=step_timeout, resources=resources,
        )  # fmt: skip

    return cluster_of([functools.partial(host, each) for each in make], clock, options)
