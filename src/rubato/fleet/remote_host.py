"""What every host of a replica in another process has: its mirror, its link, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from math import inf
from typing import Any
from uuid import uuid4

from rubato.core.clock import Clock, unix_time
from rubato.core.interfaces import Host, LatencyModel, View
from rubato.core.plan import KV, Limits, Role
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.fleet.cluster import HostLost
from rubato.fleet.event_bus import Listener
from rubato.fleet.link_reader import LinkReader, MissedReportError
from rubato.fleet.remote_view import RemoteReplica
from rubato.fleet.server_link import Link
from rubato.wire.link_keys import TOKEN_ENV
from rubato.wire.messages import (
    HEARTBEAT_S,
    PROTOCOL,
    Beat,
    Command,
    CoreAbout,
    Greeting,
    Hello,
    Ping,
    Refused,
    Report,
    Resync,
    Snapshot,
    Unknown,
    assign,
    do,
)
from rubato.wire.replica_report import ReplicaReport, shift_report, shift_request

log = logging.getLogger(__name__)

MAX_SILENCE_S = 5.0  # a link that is silent for longer counts as broken


class ReplicaLostError(Exception):
    """A replica's process cannot be reached, or its engine hangs or is beyond recovery."""


class StepHangsError(ReplicaLostError):
    """The engine hangs in the last step that it reported."""


class LinkSession:
    """Listens to a link, measures how far the clock at its other end is ahead, and counts silence.

    Args:
        replica: id of the replica.
        request_id_of: returns the id of the open request that a name in reports means; empty for none.
        is_idle: returns whether the replica has no request, so that its process may send no reports.
        apply: takes each report, with its times in this process's clock.
        lose: called when the replica is lost with its link.
    """

    def __init__(
        self, replica: str, link: Link, clock: Clock, *, request_id_of: Callable[[str], str] = str,
        is_idle: Callable[[], bool], apply: Callable[[ReplicaReport], None], lose: Callable[[ReplicaLostError], None],
    ) -> None:  # fmt: skip
        self.link = link
        self.reader = LinkReader(replica, request_id_of)
        self.silence_s = 0.0  # without a report
        self.role: Role | None = None  # as last assigned
        self._replica = replica
        self._clock = clock
        self._is_idle, self._apply, self._lose = is_idle, apply, lose
        self._name = uuid4().hex  # the engine recalls requests by it
        self._url = ""  # of the server, in errors
        self._greeting: asyncio.Future[CoreAbout] | None = None
        self._reads_reports = False
        self._ahead = 0.0  # seconds of the other clock beyond this one
        self._round_trip = inf  # seconds of the fastest answer so far

    async def greet(self, url: str) -> CoreAbout:
        """Greets the core until it answers.

        Raises:
            ValueError: it rejects this gateway, or stays silent.
        """
        self._greeting = asyncio.get_running_loop().create_future()
        self._url = url
        for _ in range(int(MAX_SILENCE_S / HEARTBEAT_S)):
            self.say_hello()
            done, _ = await asyncio.wait({self._greeting}, timeout=HEARTBEAT_S)
            if done:
                return self._greeting.result()
            if self.link.is_refused:
                raise ValueError(
                    f"server {url} does not let this gateway in: set {TOKEN_ENV} to one secret for both, or for none"
                )
        raise ValueError(f"server {url}: its engine does not answer on the link within {MAX_SILENCE_S:g} s")

    def begin_reports(self) -> None:
        """Applies reports from now on; the first is a snapshot."""
        self._reads_reports = True
        self.link.send(Resync())

    async def listen(self) -> None:
        """Listens until the replica is lost, or the task is cancelled."""
        while True:
            try:
                self._hear(await self.link.receive())
            except MissedReportError:
                self.link.send(Resync())
            except ReplicaLostError as error:
                self._lose(error)
                return
            except Exception as error:  # without reports its requests would hang
                log.exception("replica %s: its report could not be used", self._replica)
                kind = type(error).__name__
                self._lose(ReplicaLostError(f"a report of replica {self._replica} cannot be used ({kind})"))

    def send_heartbeat(self) -> None:
        """Pings the other end, and counts the silence up to the next heartbeat."""
        self.link.send(Ping(self._clock.now()))
        self.silence_s += HEARTBEAT_S

    def say_hello(self) -> None:
        self.link.send(Hello(PROTOCOL, self._name, self._clock.now()))

    def assign(self, role: Role) -> None:
        self.role = role
        self.send(assign(role))

    def send(self, *commands: Command) -> None:
        self.link.send(do(*commands))

    def detach_previous_try(self, ids: Iterable[str]) -> None:
        """Attributes all reports of these requests so far to an earlier try."""
        for id in ids:
            self.reader.detach_previous_try(id)

    def in_other_clock(self, request: Request) -> Request:
        """Returns the request with its times in the clock at the other end."""
        return shift_request(request, self._ahead)

    def _hear(self, message: object) -> None:
        if isinstance(message, Snapshot | Report | ReplicaReport) or self._is_idle():
            self.silence_s = 0.0
        match message:
            case Greeting():
                self._round_trip = inf  # it may be another core
                self.measure_ahead(message)
                if self._greeting is not None and not self._greeting.done():
                    self._greeting.set_result(message.about)
                elif self.role is not None:  # it was away
                    self.assign(self.role)
            case Refused(why):
                if self._greeting is not None and not self._greeting.done():
                    error = ValueError(f"server {self._url} does not let this gateway in: {why}")
                    self._greeting.set_exception(error)
            case Unknown():
                self.say_hello()
            case Beat():
                self.measure_ahead(message)
            case ReplicaReport():
                self._apply(shift_report(message, -self._ahead))
            case Snapshot() | Report():
                if self._reads_reports and (report := self.reader.read(message)) is not None:
                    self._apply(shift_report(report, -self._ahead))

    def measure_ahead(self, message: Greeting | Beat) -> None:
        """Measures how far the other clock is ahead: by Unix time where the machines agree, within the bounds that the
        fastest answer so far has set."""
        received_at, sent_at = self._clock.now(), message.asked
        if received_at - sent_at > self._round_trip:
            return
        self._round_trip = received_at - sent_at
        lowest, highest = message.clock - received_at, message.clock - sent_at
        ahead = (message.clock - message.unix) - (received_at - unix_time())
        self._ahead = ahead if lowest <= ahead <= highest else (lowest + highest) / 2


class RemoteHost:
    """Is a `Host` of a replica elsewhere. A subclass sends requests there, defines `die`, and moves KV if it can.

    Args:
        emit: gets the events, as every host's.
        lost: called when the replica is lost, as every host's.
        options: its length predictor learns from the completions of all replicas.
    """

    why_no_kv = ""  # as an error says it

    def __init__(self, id: str, clock: Clock, *, emit: Listener, lost: HostLost, options: ReplicaOptions) -> None:
        self.id = id
        self.clock = clock
        self.cooldown_until = 0.0
        self.is_gone = False  # it is lost or closed
        self.session: LinkSession | None = None
        self._emit_outside, self._report_loss = emit, lost
        self._options = options
        self._remote: RemoteReplica | None = None
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def remote(self) -> RemoteReplica:
        if self._remote is None:
            raise RuntimeError(f"host {self.id!r} is not started: await start() first")
        return self._remote

    @property
    def is_busy(self) -> bool:
        """Whether the replica has requests, or KV of requests."""
        return not self.remote.is_empty

    def view(self) -> View:
        return self.remote.view(self.clock.now())

    def assign(self, role: Role) -> None:
        self.remote.assign(role)
        if self.session is not None:
            self.session.assign(role)

    def resume(self, id: str) -> None:
        """Does nothing: no request here waits for a tool."""

    def reserve(self, request: Request) -> bool:
        raise RuntimeError(self.why_no_kv)

    async def transfer(self, id: str, to: Host) -> None:
        raise RuntimeError(self.why_no_kv)

    async def receive(self, id: str, kv: KV) -> None:
        raise RuntimeError(self.why_no_kv)

    def release(self, id: str) -> None:
        """Does nothing: no KV is being transferred."""

    async def drain(self) -> None:
        while self.is_busy and not self.is_gone:
            self._idle.clear()
            await self._idle.wait()

    def die(self, error: ReplicaLostError) -> None:
        """Gives the replica up: its requests go elsewhere, or end."""
        raise NotImplementedError

    def _mirror(self, limits: Limits, latency: LatencyModel, supports: frozenset[str]) -> None:
        """Begins to mirror the replica, which has just started."""
        self._remote = RemoteReplica(self.id, limits, latency, supports, self.clock.now(), self._options.lengths)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Future[None]) -> None:
        """Forgets a task. A task that raises is our fault; without it the host's state is stale, so the replica is
        lost."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("replica %s: the gateway failed to watch it", self.id, exc_info=error)
            if self._remote is not None:
                self.die(ReplicaLostError(f"the gateway failed to watch replica {self.id} ({type(error).__name__})"))

    async def _cancel_tasks(self, *others: asyncio.Future[None]) -> None:
        """Cancels the host's tasks and others, but for the one that calls."""
        tasks = [task for task in (*self._tasks, *others) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
