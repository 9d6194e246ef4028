"""The other end of a `LinkSession`: a `LocalHost` that obeys messages and says in reports what has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from rubato.core.clock import PLAN, Clock, WallClock, unix_time
from rubato.core.events import Event
from rubato.core.interfaces import Engine, LatencyModel
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.fleet.cluster_options import PolicyChoice
from rubato.fleet.local_host import LocalHost
from rubato.policies import load
from rubato.wire.messages import HEARTBEAT_S, Assign, Beat, Do, Ping, Recall, ToCore, decode_command
from rubato.wire.replica_report import KVUsage, ReplicaReport

EngineParts = tuple[Engine, LatencyModel]


class Submit(NamedTuple):
    """Gives a request to the host. Its times are in the host's clock."""

    request: Request


class Cancel(NamedTuple):
    """Ends a request early."""

    id: str
    reason: str


ToHost: TypeAlias = ToCore | Submit | Cancel


class LinkedHost:
    """A `LocalHost` with its engine. Every method runs on one event loop.

    Args:
        make: called with the clock; returns the engine and its latency model.
        step_timeout: seconds, as in `LocalHost`.
    """

    def __init__(
        self, id: str, make: Callable[[Clock], EngineParts], choice: PolicyChoice, options: ReplicaOptions,
        step_timeout: float | None,
    ) -> None:  # fmt: skip
        self._clock = WallClock()
        engine, latency = make(self._clock)
        self._events: list[Event] = []
        self._beats: list[Beat] = []
        self._news = asyncio.Event()
        self._error: str | None = None
        self._batches_done = 0
        self._turn = asyncio.Condition()
        self._host = LocalHost(
            id, engine, load(choice.policy, choice.settings), latency, self._clock, emit=self._emit,
            lost=self._lose_host, policy=choice.policy, options=options, kv_transfer=False, step_timeout=step_timeout,
        )  # fmt: skip

    async def start(self) -> tuple[Limits, LatencyModel, frozenset[str]]:
        """Starts the engine; returns its limits, its latency model, and the host's capabilities."""
        await self._host.start()
        return self._host.engine.limits, self._host.latency, self._host.supports

    async def beat(self, asked: float) -> Beat:
        """Returns the answer to a ping that was sent at this time (s, of the other end's clock)."""
        return self._beat(asked)

    async def close(self) -> None:
        await self._host.close()
        self._news.set()

    async def do(self, number: int, batch: Sequence[ToHost]) -> None:
        """Obeys batch `number` of messages after the one before it, in whatever order they arrive."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._batches_done == number)
            for message in batch:
                self._hear(message)
            self._batches_done += 1
            self._turn.notify_all()
        self._news.set()

    async def say(self) -> list[Beat | ReplicaReport]:
        """Waits for news, at most HEARTBEAT_S seconds, and returns it: answers to pings, and a report."""
        timer = self._clock.call_at(self._clock.now() + HEARTBEAT_S, PLAN, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
        beats, self._beats = self._beats, []
        return [*beats, self._report()]

    def _hear(self, message: ToHost) -> None:
        match message:
            case Submit(request):
                self._host.submit(request)
            case Cancel(id, reason):
                self._host.cancel(id, reason)
            case Ping(asked):
                self._beats.append(self._beat(asked))
            case Do(commands):
                for command in map(decode_command, commands):
                    if isinstance(command, Assign):
                        self._host.assign(command.role)
                    elif isinstance(command, Recall):
                        self._host.recall(command.kind)

    def _beat(self, asked: float) -> Beat:
        return Beat(asked, self._clock.now(), unix_time())

    def _report(self) -> ReplicaReport:
        events, self._events = self._events, []
        replica = self._host.replica
        assert replica is not None, "reports are asked for after start"
        with_kv = [*replica.running.values(), *replica.migrating_out.values(), *replica.migrating_in.values()]
        kv_usage = {s.id: KVUsage(s.cached, s.blocks, s.own_blocks, s.in_flight) for s in with_kv if not s.ended}
        return ReplicaReport(
            self._clock.now(), tuple(events), replica.kv.free, replica.busy_until, kv_usage, self._error, replica.shape
        )

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()

    def _lose_host(self, id: str, error: BaseException, requests: Sequence[Request]) -> None:
        self._error = f"{type(error).__name__}: {error}"
        self._news.set()
