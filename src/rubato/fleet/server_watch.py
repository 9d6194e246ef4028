"""Watches a server: over the link of its engine core, and by health probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from rubato.core.clock import PLAN, Clock, unix_time
from rubato.core.events import Event, Finished, HandedOff
from rubato.core.plan import Role
from rubato.fleet import remote_view
from rubato.fleet.link_reader import LinkReader, MissedReportError
from rubato.fleet.local_host import MAX_STEP_SLOWDOWN
from rubato.fleet.relay import Fault, Trip
from rubato.fleet.remote_view import HandOffReport, RemoteReplica, shift_report
from rubato.fleet.server_link import Link
from rubato.fleet.upstream import UnreachableError, Upstream, UpstreamError, ask_health
from rubato.wire.link_keys import TOKEN_ENV
from rubato.wire.messages import (
    HEARTBEAT_S,
    PROTOCOL,
    Beat,
    Command,
    CoreAbout,
    FromCore,
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

log = logging.getLogger(__name__)

MAX_SILENCE_S = 5.0  # a link that is silent for longer counts as broken
PROBE_S = 5.0  # for the answer to a health probe
HEARTBEATS_PER_PROBE = 5  # of a server whose link speaks; also of the list of models
MAX_FAILED_PROBES = 2  # in a row, before the server is lost
CHECK_DELAY_S = 0.01  # before each health check of a server that broke a response off
MAX_ABSENCE_S = 10.0  # of an open request from the reports of its engine, before it is placed elsewhere
TRY_SEPARATOR = "~"  # in the names of requests in reports, before the number of the try


class ServerLostError(Exception):
    """A server cannot be reached, or its engine hangs."""


class StepHangsError(ServerLostError):
    """The engine hangs in the last step that it reported."""


class ServerWatch:
    """The part of a `ServerReplica` that watches its server."""

    id: str
    url: str
    clock: Clock
    upstream: Upstream
    is_linked: bool
    _link: Link | None
    _remote: RemoteReplica | None
    _requests: dict[str, Trip]
    _prefill_reports: dict[str, HandOffReport]
    _role: Role | None
    _is_gone: bool
    _is_suspect: bool
    _step_timeout: float | None
    _kv_used: Callable[[], Coroutine[Any, Any, float | None]] | None
    _read_models: Callable[[], Coroutine[Any, Any, None]]

    if TYPE_CHECKING:

        def _die(self, error: ServerLostError) -> None: ...
        def _emit(self, events: Sequence[Event]) -> None: ...
        def emit_counted_tokens(self, before: float = ...) -> None: ...
        def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]: ...
        def fail(self, trip: Trip, why: str, fault: Fault) -> None: ...
        def _fold(self, *events: Event) -> None: ...

    def _init_watch(self) -> None:
        self._name = uuid4().hex  # the engine recalls requests by it
        self._reader = LinkReader(self.id, self._request_id_of)
        self._greeting: asyncio.Future[CoreAbout] | None = None
        self._ahead = 0.0  # seconds of the engine core's clock beyond this one
        self._round_trip = float("inf")  # seconds of the fastest ping so far
        self._absent_since: dict[str, float] = {}  # since when the engine does not know a request that is open here
        self._aborted_ids: set[str] = set()  # of these, requests that the engine was told to abort
        self._silence_s = 0.0
        self._health_check: asyncio.Future[None] | None = None

    # ----------------------------------------------------------------- the link

    async def _greet(self, link: Link) -> CoreAbout:
        """Greets the core until it answers. Raises ValueError if it rejects this gateway or stays silent."""
        self._greeting = asyncio.get_running_loop().create_future()
        for _ in range(int(MAX_SILENCE_S / HEARTBEAT_S)):
            link.send(Hello(PROTOCOL, self._name, self.clock.now()))
            done, _ = await asyncio.wait({self._greeting}, timeout=HEARTBEAT_S)
            if done:
                return self._greeting.result()
            if link.is_refused:
                raise ValueError(
                    f"server {self.url} does not let this gateway in: set {TOKEN_ENV} to one secret for both, or for "
                    "none"
                )
        raise ValueError(f"server {self.url}: its engine does not answer on the link within {MAX_SILENCE_S:g} s")

    async def _listen(self, link: Link) -> None:
        while not self._is_gone:
            message = await link.receive()
            try:
                self._hear(link, message)
            except MissedReportError:
                link.send(Resync())
            except Exception as error:  # without reports its requests would hang
                log.exception("replica %s: its report could not be used", self.id)
                self._die(ServerLostError(f"a report of replica {self.id} cannot be used ({type(error).__name__})"))

    def _hear(self, link: Link, message: FromCore) -> None:
        if isinstance(message, Snapshot | Report) or not self._requests:  # an engine with requests sends reports
            self._silence_s = 0.0
        match message:
            case Greeting():
                self._round_trip = float("inf")  # it may be another core
                self._measure_ahead(message)
                if self._greeting is not None and not self._greeting.done():
                    self._greeting.set_result(message.about)
                elif self._role is not None:  # it was away
                    self._command(assign(self._role))
            case Refused(why):
                error = ValueError(f"server {self.url} does not let this gateway in: {why}")
                if self._greeting is not None and not self._greeting.done():
                    self._greeting.set_exception(error)
            case Unknown():
                link.send(Hello(PROTOCOL, self._name, self.clock.now()))
            case Beat():
                self._measure_ahead(message)
            case Snapshot() | Report():
                if self._remote is not None and (report := self._reader.read(message)) is not None:
                    self._apply(self._remote, shift_report(report, -self._ahead))

    def _apply(self, remote: RemoteReplica, report: remote_view.ReplicaReport) -> None:
        if not self.is_linked:
            log.info("replica %s: the link is back", self.id)
            self.is_linked = True
        self.emit_counted_tokens()
        if report.snapshot is not None:
            shown = {one.request.id for one in report.snapshot}
            now = self.clock.now()
            self._absent_since = {id: self._absent_since.get(id, now) for id in self._requests if id not in shown}
        report = self._without_aborts(report)
        remote.apply(report)  # first: the cluster may place a request on an end
        self._emit(report.events)
        for hand_off in report.hand_offs:
            id, reason, at, cached = hand_off
            trip = self._requests.get(id)
            if trip is not None and cached:  # its response says the rest
                self._prefill_reports[id] = hand_off
                trip.news.set()
                continue
            request = remote.handed_off_request(id, reason, at)
            if trip is not None and request is not None:
                self._fold(HandedOff(at, id, trip.progress_seen(request, self.clock.now())))
            else:
                remote.forget(id)

    def _without_aborts(self, report: remote_view.ReplicaReport) -> remote_view.ReplicaReport:
        """The report without the ends of requests that their API server aborted: it failed at them, and each response
        will say so."""
        aborted = {
            e.id for e in report.events if type(e) is Finished and e.outcome == "cancelled" and e.id in self._requests
        }
        if not aborted:
            return report
        self._absent_since |= {id: self._absent_since.get(id, self.clock.now()) for id in aborted}
        self._aborted_ids |= aborted
        events = tuple([e for e in report.events if type(e) is not Finished or e.id not in aborted])
        return replace(report, events=events)

    def _measure_ahead(self, message: Greeting | Beat) -> None:
        """Measures the offset of the core's clock: by Unix time where the machines agree, within the bounds that the
        fastest answer so far has set."""
        received_at, sent_at = self.clock.now(), message.asked
        if received_at - sent_at > self._round_trip:
            return
        self._round_trip = received_at - sent_at
        least, most = message.clock - received_at, message.clock - sent_at
        ahead: float = (message.clock - message.unix) - (received_at - unix_time())
        self._ahead = ahead if least <= ahead <= most else (least + most) / 2

    def _request_id_of(self, name: str) -> str:
        """The id of the request that a name in a report means; empty for an earlier try, or a stranger's request."""
        id, _, tries = name.rpartition(TRY_SEPARATOR)
        trip = self._requests.get(id)
        return id if trip is not None and tries == str(trip.tries) else ""

    def _command(self, *commands: Command) -> None:
        if self._link is not None:
            self._link.send(do(*commands))

    # ----------------------------------------------------------------- health

    async def _watch(self, remote: RemoteReplica) -> None:
        """Notices silence, in turns of this loop, not by a clock: a process that was itself stopped heard nothing."""
        failed = turns = 0
        while not self._is_gone:
            await self.clock.sleep_until(self.clock.now() + HEARTBEAT_S, PLAN)
            turns += 1
            self.emit_counted_tokens(self.clock.now())
            if self._link is not None:
                self._watch_link(self._link, remote)
            if self.is_linked and not (failed or self._is_suspect) and turns % HEARTBEATS_PER_PROBE:
                continue
            self._is_suspect = False
            failed = 0 if await self._is_healthy() else failed + 1
            if failed >= MAX_FAILED_PROBES:
                self._die(ServerLostError(f"the server of replica {self.id} does not answer"))
                continue
            if not (failed or self.is_linked):
                await self._read_kv_usage(remote)
            if not failed and turns % HEARTBEATS_PER_PROBE == 0:
                with contextlib.suppress(UpstreamError, ValueError):  # the list that was read last stands
                    await self._read_models()

    def _watch_link(self, link: Link, remote: RemoteReplica) -> None:
        link.send(Ping(self.clock.now()))
        self._silence_s += HEARTBEAT_S
        self._fail_absent(remote)
        if self.is_linked and self._silence_s < MAX_SILENCE_S:
            self._check_step(remote)
            return
        if self.is_linked:
            log.warning("replica %s: its link is silent; what is sent there is counted instead", self.id)
            self.is_linked = False
        link.send(Hello(PROTOCOL, self._name, self.clock.now()))
        link.send(Resync())

    def _fail_absent(self, remote: RemoteReplica) -> None:
        """Fails requests that the engine does not know, so that they are placed elsewhere: the engine handed them off
        in a missed report, or the API server never passed them on. (An ended request's response has ended, too.)"""
        # (a server with a silent link may hang, maybe at this request: health probes decide)
        unreported = remote.unreported() if self.is_linked else {}
        for id, since in {**unreported, **self._absent_since}.items():
            if (trip := self._requests.get(id)) is None:
                self._absent_since.pop(id, None)
            elif self.clock.now() - since > MAX_ABSENCE_S:
                self._absent_since.pop(id, None)
                self.fail(trip, f"replica {self.id} does not know request {id!r}", Fault.UNAVAILABLE)

    async def check_health(self, trip: Trip) -> None:
        """Checks the server's health once for all trips that it has broken off: a server that is gone breaks all of
        them at once, and is then lost as a whole."""
        for id in trip.ids:
            self._reader.detach_previous_try(id)  # the engine will report that its client has left
        if self._health_check is None or self._health_check.done():
            self._health_check = self._spawn(self._check_health_again())
        await asyncio.shield(self._health_check)

    async def _check_health_again(self) -> None:
        for _ in range(MAX_FAILED_PROBES):
            await self.clock.sleep_until(self.clock.now() + CHECK_DELAY_S, PLAN)
            try:
                await ask_health(self.upstream, PROBE_S)
                return
            except UnreachableError as error:
                why = error
            except UpstreamError:
                return  # the next probes tell
        self._die(ServerLostError(f"the server of replica {self.id} is gone ({why})"))

    async def _is_healthy(self) -> bool:
        """A server without /health is healthy if it lists its models."""
        try:
            status = await ask_health(self.upstream, PROBE_S)
            if status == 404:
                await self._read_models()
        except (UpstreamError, ValueError):
            return False
        return status in (200, 404)

    async def _read_kv_usage(self, remote: RemoteReplica) -> None:
        """Reads the free KV of a server whose link does not report it. Without an answer the last value stands, at
        first all of the KV."""
        used = None if self._kv_used is None else await self._kv_used()
        if used is not None and not self.is_linked:  # meanwhile the link may have come back
            remote.set_kv_free(round((1.0 - used) * remote.limits.kv_blocks))

    def _check_step(self, remote: RemoteReplica) -> None:
        """Counts a server as lost when its engine hangs in a step."""
        view = remote.view(self.clock.now())
        if self._step_timeout is None or not view.in_flight.seqs:
            return
        predicted = max(0.0, view.busy_until - view.as_of)
        if self.clock.now() - view.as_of > self._step_timeout + MAX_STEP_SLOWDOWN * predicted:
            self._die(StepHangsError(f"the engine of replica {self.id} hangs in a step"))
