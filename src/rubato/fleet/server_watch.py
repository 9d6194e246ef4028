"""What is heard of a server: by the link of its engine core, and by asking for its health."""

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
from rubato.fleet.remote_view import HandOffReport, RemoteReplica, shifted_report
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
    """Its engine hangs in the step that it told of last."""


class ServerWatch:
    """Of a `ServerReplica`. linked: the link tells what happens there."""

    id: str
    url: str
    clock: Clock
    upstream: Upstream
    linked: bool
    _link: Link | None
    _mirror: RemoteReplica | None
    _mine: dict[str, Trip]
    _prefilled: dict[str, HandOffReport]
    _role: Role | None
    _gone: bool
    _suspect: bool
    _step_timeout: float | None
    _kv_used: Callable[[], Coroutine[Any, Any, float | None]] | None
    _read_models: Callable[[], Coroutine[Any, Any, None]]

    if TYPE_CHECKING:

        def _die(self, error: ServerLostError) -> None: ...
        def _emit(self, events: Sequence[Event]) -> None: ...
        def tell_of_counted(self, before: float = ...) -> None: ...
        def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]: ...
        def fail(self, trip: Trip, why: str, fault: Fault) -> None: ...
        def _fold(self, *events: Event) -> None: ...

    def _hear_nothing_yet(self) -> None:
        self._name = uuid4().hex  # by which the engine knows whose requests it takes back
        self._reader = LinkReader(self.id, self._own)
        self._greeted: asyncio.Future[CoreAbout] | None = None
        self._ahead = 0.0  # what the engine core's clock shows more than this one
        self._round_trip = float("inf")  # seconds of the fastest ping so far
        self._absent: dict[str, float] = {}  # of those here that the engine does not know: since when
        self._aborted: set[str] = set()  # of these, those that it knew, and was told to give up
        self._silent = 0.0
        self._looking: asyncio.Future[None] | None = None

    # ----------------------------------------------------------------- the link

    async def _greet(self, link: Link) -> CoreAbout:
        """Say hello until the core answers. Raises ValueError where it does not let this gateway in, or is silent."""
        self._greeted = asyncio.get_running_loop().create_future()
        for _ in range(int(MAX_SILENCE_S / HEARTBEAT_S)):
            link.send(Hello(PROTOCOL, self._name, self.clock.now()))
            done, _ = await asyncio.wait({self._greeted}, timeout=HEARTBEAT_S)
            if done:
                return self._greeted.result()
            if link.is_refused:
                raise ValueError(
                    f"server {self.url} does not let this gateway in: set {TOKEN_ENV} to one secret for both, or for "
                    "none"
                )
        raise ValueError(f"server {self.url}: its engine does not answer on the link within {MAX_SILENCE_S:g} s")

    async def _listen(self, link: Link) -> None:
        while not self._gone:
            message = await link.receive()
            try:
                self._hear(link, message)
            except MissedReportError:
                link.send(Resync())
            except Exception as error:  # deaf to its replica this host is of no use: its requests must not hang
                log.exception("replica %s: its report could not be used", self.id)
                self._die(ServerLostError(f"a report of replica {self.id} cannot be used ({type(error).__name__})"))

    def _hear(self, link: Link, message: FromCore) -> None:
        if isinstance(message, Snapshot | Report) or not self._mine:  # an engine with requests has more to say
            self._silent = 0.0
        match message:
            case Greeting():
                self._round_trip = float("inf")  # it may be another core
                self._measure_ahead(message)
                if self._greeted is not None and not self._greeted.done():
                    self._greeted.set_result(message.about)
                elif self._role is not None:  # it was away
                    self._command(assign(self._role))
            case Refused(why):
                error = ValueError(f"server {self.url} does not let this gateway in: {why}")
                if self._greeted is not None and not self._greeted.done():
                    self._greeted.set_exception(error)
            case Unknown():
                link.send(Hello(PROTOCOL, self._name, self.clock.now()))
            case Beat():
                self._measure_ahead(message)
            case Snapshot() | Report():
                if self._mirror is not None and (report := self._reader.read(message)) is not None:
                    self._take(self._mirror, shifted_report(report, -self._ahead))

    def _take(self, mirror: RemoteReplica, report: remote_view.ReplicaReport) -> None:
        if not self.linked:
            log.info("replica %s: the link is back", self.id)
            self.linked = True
        self.tell_of_counted()
        if report.there is not None:
            shown = {one.request.id for one in report.there}
            now = self.clock.now()
            self._absent = {id: self._absent.get(id, now) for id in self._mine if id not in shown}
        report = self._without_aborts(report)
        mirror.take(report)  # all of it first: told of an end, the cluster may place another
        self._emit(report.events)
        for told in report.gave_up:
            id, reason, at, cached = told
            trip = self._mine.get(id)
            if trip is not None and cached:  # its response says the rest
                self._prefilled[id] = told
                trip.news.set()
                continue
            request = mirror.moved(id, reason, at)
            if trip is not None and request is not None:
                self._fold(HandedOff(at, id, trip.progress_seen(request, self.clock.now())))
            else:
                mirror.forget(id)

    def _without_aborts(self, report: remote_view.ReplicaReport) -> remote_view.ReplicaReport:
        """But for ends of requests that the engine was told to give up, and not from here: their API server has failed
        at them, and each response will say so, if anything comes of it."""
        left = {e.id for e in report.events if type(e) is Finished and e.outcome == "cancelled" and e.id in self._mine}
        if not left:
            return report
        self._absent |= {id: self._absent.get(id, self.clock.now()) for id in left}
        self._aborted |= left
        return replace(report, events=tuple([e for e in report.events if type(e) is not Finished or e.id not in left]))

    def _measure_ahead(self, message: Greeting | Beat) -> None:
        """Learn what the core's clock shows more than this one: between the bounds that the fastest answer so far has
        set, as Unix time says it, where the two machines' agree."""
        heard, asked = self.clock.now(), message.asked
        if heard - asked > self._round_trip:
            return
        self._round_trip = heard - asked
        least, most = message.clock - heard, message.clock - asked
        ahead: float = (message.clock - message.unix) - (heard - unix_time())
        self._ahead = ahead if least <= ahead <= most else (least + most) / 2

    def _own(self, name: str) -> str:
        """The request here that a report's name means; empty where it is none, or an earlier try of it."""
        id, _, tries = name.rpartition(TRY_SEPARATOR)
        trip = self._mine.get(id)
        return id if trip is not None and tries == str(trip.tries) else ""

    def _command(self, *commands: Command) -> None:
        if self._link is not None:
            self._link.send(do(*commands))

    # ----------------------------------------------------------------- health

    async def _watch(self, mirror: RemoteReplica) -> None:
        """Notice silence, counted in turns of this loop: a process that was itself stopped heard nothing meanwhile."""
        failed = turns = 0
        while not self._gone:
            await self.clock.sleep_until(self.clock.now() + HEARTBEAT_S, PLAN)
            turns += 1
            self.tell_of_counted(self.clock.now())
            if self._link is not None:
                self._watch_link(self._link, mirror)
            if self.linked and not (failed or self._suspect) and turns % HEARTBEATS_PER_PROBE:
                continue
            self._suspect = False
            failed = 0 if await self._is_healthy() else failed + 1
            if failed >= MAX_FAILED_PROBES:
                self._die(ServerLostError(f"the server of replica {self.id} does not answer"))
                continue
            if not (failed or self.linked):
                await self._look_at_kv(mirror)
            if not failed and turns % HEARTBEATS_PER_PROBE == 0:
                with contextlib.suppress(UpstreamError, ValueError):  # the list that was read last stands
                    await self._read_models()

    def _watch_link(self, link: Link, mirror: RemoteReplica) -> None:
        link.send(Ping(self.clock.now()))
        self._silent += HEARTBEAT_S
        self._look_for_absent(mirror)
        if self.linked and self._silent < MAX_SILENCE_S:
            self._check_step(mirror)
            return
        if self.linked:
            log.warning("replica %s: its link is silent; what is sent there is counted instead", self.id)
            self.linked = False
        link.send(Hello(PROTOCOL, self._name, self.clock.now()))
        link.send(Resync())

    def _look_for_absent(self, mirror: RemoteReplica) -> None:
        """Place elsewhere what the engine does not know: it has handed it off, in a report that was missed, or the API
        server has kept it to itself. (Of one that has ended, the response has ended.)"""
        # (a server whose link is silent, too, may hang: its health tells, and the request may be what it hangs at)
        unreported = mirror.unreported() if self.linked else {}
        for id, since in {**unreported, **self._absent}.items():
            if (trip := self._mine.get(id)) is None:
                self._absent.pop(id, None)
            elif self.clock.now() - since > MAX_ABSENCE_S:
                self._absent.pop(id, None)
                self.fail(trip, f"replica {self.id} does not know request {id!r}", Fault.UNAVAILABLE)

    async def look(self, trip: Trip) -> None:
        """Ask the server whether it is there, once for all trips that it has broken off: one that is gone breaks them
        all at once, and they have not failed one by one."""
        for id in trip.ids:
            self._reader.disown(id)  # the engine will tell that its client has left
        if self._looking is None or self._looking.done():
            self._looking = self._spawn(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
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

    async def _look_at_kv(self, mirror: RemoteReplica) -> None:
        """How much KV is free, of a server whose link does not say it. One that does not say it either is shown as it
        was before: with all of it free, or as much as it said last."""
        used = None if self._kv_used is None else await self._kv_used()
        if used is not None and not self.linked:  # meanwhile the link may have come back
            mirror.told_kv_free(round((1.0 - used) * mirror.limits.kv_blocks))

    def _check_step(self, mirror: RemoteReplica) -> None:
        """Lose a server whose engine hangs in a step."""
        view = mirror.view(self.clock.now())
        if self._step_timeout is None or not view.in_flight.seqs:
            return
        predicted = max(0.0, view.busy_until - view.as_of)
        if self.clock.now() - view.as_of > self._step_timeout + MAX_STEP_SLOWDOWN * predicted:
            self._die(StepHangsError(f"the engine of replica {self.id} hangs in a step"))
