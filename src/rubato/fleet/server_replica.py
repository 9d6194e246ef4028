"""Proxies one OpenAI server as a replica and mirrors its reported state.

With the plug-in's link (`wire.messages`) every step is known, and waiting requests can be recalled. Without the link,
or while it is silent, the gateway counts: a request waits until its first chunk comes, and each chunk is a token. When
a server is lost or fails at a request, the request returns to the cluster, if it can go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from rubato.core.clock import Clock
from rubato.core.events import HandedOff
from rubato.core.interfaces import Host, NotReadyError, View
from rubato.core.plan import KV, Recall
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SATURATED, Request
from rubato.fleet.cluster import HostLost
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Trip, Trips
from rubato.fleet.remote_host import LinkSession, RemoteHost, ReplicaLostError, StepHangsError
from rubato.fleet.server_kv import ServerKV
from rubato.fleet.server_probe import FleetProbe, ServerAbout, UnlikeServerError
from rubato.fleet.server_requests import ServerRequests
from rubato.fleet.server_try import Fault, Try
from rubato.fleet.server_watch import ServerWatch
from rubato.fleet.upstream import UpstreamError
from rubato.wire import messages
from rubato.wire.messages import CoreAbout, expect

log = logging.getLogger(__name__)

HEALTH_RETRY_S = 1.0  # between two tries to reach a server that is not ready
LOG_EVERY_N_RETRIES = 60
COOLDOWN_AFTER_FAILURES_S = 1.0  # without new requests
COOLDOWN_AFTER_ONE_S = 1e-3  # after a single failure: that request goes elsewhere
MAX_RETRIES = 3  # of a request that failed through no fault of its own
RETRY_SHARE, MIN_RETRIES = 0.2, 3  # of the requests in flight that may be retried at once, and the least number
RESPONSE_END_S = 2.0  # for the last bytes of responses whose requests have ended
END_REPORT_S = 0.25  # the end of a response waits this long for its verdict
TRY_SEPARATOR = "~"  # in the names of requests in reports, before the number of the try


class ServerReplica(RemoteHost):
    """Is a `Host` over one server.

    Args:
        probe: asks the server. If it raises, the server is not ready.
        trips: the gateway's trips, by request; they have the bodies.
        step_timeout: seconds, as in `local_host.LocalHost`, for steps that the link reports.
        wait_until_ready: `start` waits until the server is ready.
    """

    def __init__(
        self, id: str, probe: FleetProbe, clock: Clock, *, trips: Trips, emit: Listener, lost: HostLost,
        options: ReplicaOptions, step_timeout: float | None = None, wait_until_ready: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(id, clock, emit=emit, lost=lost, options=options)
        self.probe = probe
        self.upstream = probe.upstream
        self.about: ServerAbout | None = None
        self._trips = trips
        self._wait_until_ready = wait_until_ready
        self._tries: dict[str, asyncio.Task[None]] = {}  # by a trip's first id
        self.requests = ServerRequests(
            id, lambda: self.remote, clock, options.slo_rule, emit=emit, drop_response=self._drop_response,
            all_ended=self._idle.set,
        )  # fmt: skip
        self.kv = ServerKV(id, self.requests, lambda: self.remote, clock, send=self._send, emit=emit)
        self._watch = ServerWatch(self, probe, self.requests, step_timeout, fail=self.fail)

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        """Asks the server what it is, and begins to watch it. With `wait_until_ready` it asks until the server is
        ready.

        Raises:
            NotReadyError: the server is not ready.
            UnlikeServerError: the server is of another kind than the fleet.
        """
        tries = 0
        while True:
            try:
                await self._connect()
                return
            except Exception as error:
                for task in self._tasks:
                    task.cancel()
                if self.session is not None:
                    self.session.link.close()
                if not self._wait_until_ready and isinstance(error, UnlikeServerError):
                    raise
                if not self._wait_until_ready:
                    raise NotReadyError(str(error) or type(error).__name__) from error
                if tries % LOG_EVERY_N_RETRIES == 0:
                    is_new = not isinstance(error, UpstreamError | ValueError)  # an unexpected kind of answer
                    log.warning("server %s is waited for: %s", self.url, error, exc_info=is_new)
                tries += 1
                await asyncio.sleep(HEALTH_RETRY_S)

    async def _connect(self) -> None:
        greeting: CoreAbout | None = None
        self.session = None
        if (link := await self.probe.open_link()) is not None:
            self.session = LinkSession(
                self.id, link, self.clock, request_id_of=self._request_id_of,
                is_idle=lambda: not self.requests.trips, apply=self._watch.apply, lose=self.die,
            )  # fmt: skip
            self.spawn(self.session.listen())
            greeting = await self.session.greet(self.url)
        self.about = about = await self.probe.about(greeting)
        self._mirror(about.limits, about.latency, about.supports)
        self.kv.lease = about.kv_lease
        if self.session is not None:
            self.session.begin_reports()
            self.requests.is_linked = True
        self.spawn(self._watch.run())

    def _request_id_of(self, name: str) -> str:
        """Returns the id of the request that a name in a report means; empty for an earlier try, or a stranger's
        request."""
        id, _, tries = name.rpartition(TRY_SEPARATOR)
        trip = self.requests.trips.get(id)
        return id if trip is not None and tries == str(trip.tries) else ""

    @property
    def url(self) -> str:
        return self.probe.url

    @property
    def is_linked(self) -> bool:
        """Whether the link reports every step."""
        return self.requests.is_linked

    @property
    def has_link(self) -> bool:
        """Whether the server learns SLOs over a link, which may be silent now."""
        return self.session is not None

    @property
    def can_continue(self) -> bool:
        """Whether the server is known to continue another server's stream, as vLLM does."""
        return self.about is not None and bool(self.about.version)

    @property
    def is_prefill_server(self) -> bool:
        """Whether requests that are sent there now go on elsewhere after their prefill."""
        return self.kv.lease is not None and self.remote.role.phase == "prefill"

    @property
    def is_busy(self) -> bool:
        return bool(self.requests.trips) or not self.kv.is_empty

    def submit(self, request: Request) -> None:
        trip = self._trips[request.id]
        self.remote.submit(request, self.clock.now())
        self.requests.trips[request.id] = trip
        if trip.ids[0] not in self._tries:  # else with the first of its requests
            self._send(trip, request)

    def _send(self, trip: Trip, request: Request, kv: KV | None = None) -> None:
        """Sends the first or the next try of a trip.

        Args:
            kv: of its prompt, at another server.
        """
        trip.tries += 1
        if not trip.has_begun:
            trip.sent_at = self.clock.now()
        if trip.tries > 1 and self.session is not None:
            self.session.detach_previous_try(trip.ids)
        if self.session is not None:
            names = tuple([f"{id}{TRY_SEPARATOR}{trip.tries}" for id in trip.ids])
            announcement = expect(trip.answer, names, trip.choices, self.session.in_other_clock(request))
            is_demoted = request.progress is not None and request.progress.demoted
            self.session.send(announcement, *([messages.Demote(trip.answer)] if is_demoted else []))
        self._tries[trip.ids[0]] = trip.start_try(Try(trip, self).run(request, kv))

    def cancel(self, id: str, reason: str) -> None:
        trip = self.requests.trips.get(id)
        if trip is None:
            return
        self.requests.finish(id, "cancelled", reason)
        if not self.requests.are_open(trip):
            self._drop_response(trip)

    def view(self) -> View:
        self.requests.show_counted_tokens()
        return super().view()

    def recall(self, kind: Recall) -> None:
        if self.is_linked and self.session is not None:
            self.session.send(messages.Recall(kind))
            return
        now, remote = self.clock.now(), self.remote
        for id, trip in list(self.requests.trips.items()):
            seq = remote.seq_of(id)
            is_recalled = seq is not None and (kind == "waiting" or seq.best_effort) and remote.is_waiting(id)
            request = (
                remote.handed_off_request(id, "recalled", now)
                if is_recalled and not trip.has_begun and len(trip.ids) == 1
                else None
            )
            if request is not None:
                self.requests.fold(HandedOff(now, id, request))

    def reserve(self, request: Request) -> bool:
        return self.kv.reserve(request, self._trips[request.id])

    async def transfer(self, id: str, to: Host) -> None:
        await self.kv.transfer(id, to)
        self.release(id)

    async def receive(self, id: str, kv: KV) -> None:
        await self.kv.receive(id, kv)

    def release(self, id: str) -> None:
        if (trip := self.kv.release(id)) is not None:
            self._drop_response(trip)
        self._idle.set()

    async def close(self) -> None:
        """Leaves the server: its requests end as failed, and the last bytes of ended responses still pass."""
        if ending := self._ending_responses():
            await asyncio.wait(ending.values(), timeout=RESPONSE_END_S)
            for answer in [answer for answer, task in ending.items() if not task.done()]:
                if (trip := self._trips.get(answer)) is not None:
                    trip.break_off(f"replica {self.id} is gone, and the last bytes of the response with it")
        for id in list(self.requests.trips):
            self.requests.finish(id, "failed", "the server closed")
        self.is_gone = True
        self.kv.clear()
        await self._cancel_tasks(*self._tries.values())
        if self.session is not None:
            self.session.link.close()
        await self.upstream.close()

    def _ending_responses(self) -> dict[str, asyncio.Task[None]]:
        """Returns responses whose bytes still arrive though their requests have ended, by the first id of each."""
        open_ = {trip.ids[0] for trip in self.requests.trips.values()}
        return {answer: task for answer, task in self._tries.items() if answer not in open_}

    # ----------------------------------------------------------------- tries

    def is_working_at(self, trip: Trip) -> bool:
        """Returns whether the link reports a request of this trip at the engine."""
        return self.is_linked and any(id in self.requests.trips and self.remote.is_reported(id) for id in trip.ids)

    async def wait_for_end_report(self, trip: Trip) -> None:
        """Waits a short time for the link to report the ends of the trip's requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_REPORT_S):
                while self.is_linked and self.requests.lacks_end_report(trip):
                    trip.news.clear()
                    await trip.news.wait()

    async def check_health(self, trip: Trip) -> None:
        """Checks the server's health after it has broken this trip off; without an answer the server is lost with all
        its requests."""
        await self._watch.check_health(trip)

    async def hand_over(self, trip: Trip, body: bytes) -> None:
        """Hands the prefilled request off.

        Args:
            body: the response, which says where its KV is.
        """
        await self.wait_for_end_report(trip)
        self.kv.hand_over(trip, body)

    def fail(self, trip: Trip, why: str, fault: Fault) -> None:
        """Places the trip's open requests elsewhere, if they can go on there: the server failed or went away."""
        if not self.requests.are_open(trip):  # its requests have ended: this is the echo, or too late to matter
            trip.break_off(why)
            return
        self._cool_down(trip)
        log.warning("%s", why)
        if self.requests.fail_arrival(trip, why):
            return
        self._drop_response(trip)  # first: the choices, which go on together, may come back here at once
        now, remote, handed_off = self.clock.now(), self.remote, []
        for id, group in [(one.id, one.group) for one in trip.requests if one.id in self.requests.trips]:
            to_move = remote.handed_off_request(id, "failed", now)
            if to_move is None:  # by the link it has left the engine; how it ended is not known
                self.requests.finish(id, "failed", why)
                continue
            request = trip.client_progress(to_move, now)
            if (why_not := self._why_not_retried(trip, request, now, fault)) is not None:
                is_full = fault is Fault.FULL
                reason = SATURATED if is_full else f"{why}; {why_not}"
                self.requests.finish(id, "refused" if is_full else "failed", reason)
            else:
                trip.has_failed = True
                handed_off.append(HandedOff(now, id, replace(request, group=group)))
        self.requests.fold(*handed_off)

    def _cool_down(self, trip: Trip) -> None:
        """Gives the server no new requests for a while, after two failures without a token in between. A single failure
        may be the request's own fault, and so may that of a request that failed elsewhere before. (A server that does
        not answer at all is found by `check_health`.)"""
        self._watch.is_suspect = True
        self.requests.emit_counted_tokens()  # of what has come since another failed
        if not trip.has_failed:
            self.requests.failed_answers.add(trip.ask.answer)
        if is_long := len(self.requests.failed_answers) > 1:
            self.requests.failed_answers.clear()
        self.cooldown_until = max(
            self.cooldown_until, self.clock.now() + (COOLDOWN_AFTER_FAILURES_S if is_long else COOLDOWN_AFTER_ONE_S)
        )

    def _why_not_retried(self, trip: Trip, request: Request, now: float, fault: Fault) -> str | None:
        """Returns why a request that failed is not tried elsewhere; None if it is."""
        assert request.handoff is not None
        e2e = request.stages[0].slo.e2e
        if e2e is not None and now > request.arrival + e2e:
            return "its deadline has passed"
        max_tries = 1 if fault is Fault.UNKNOWN or request.losses else MAX_RETRIES
        if (failures := request.handoff.failures + request.losses) > max_tries:
            return f"it was tried {failures} times"
        if fault is Fault.UNREACHABLE:  # no server has had it
            return trip.why_not_resumable(request.progress)
        others = {other.ask.answer for other in self._trips.values() if other.has_failed and other is not trip}
        if len(others) >= max(MIN_RETRIES, RETRY_SHARE * len(self._trips)):
            return "too many others are being tried again"
        return trip.why_not_resumable(request.progress)

    def end_try(self, trip: Trip) -> None:
        """Forgets the current task, a try of the trip, which has ended."""
        if self._tries.get(trip.ids[0]) is asyncio.current_task():
            del self._tries[trip.ids[0]]

    def _drop_response(self, trip: Trip) -> None:
        """Drops the connection of the response: the server ends its requests."""
        if (task := self._tries.pop(trip.ids[0], None)) is not None:
            trip.leave(task)

    def die(self, error: ReplicaLostError) -> None:
        if self.is_gone or self._remote is None:  # it has not begun to serve
            return
        self.is_gone = True
        self.requests.emit_counted_tokens()
        now, to_resume, ending = self.clock.now(), [], self._ending_responses()
        trips = {trip.ids[0]: trip for trip in self.requests.trips.values()}  # some end below
        remote = self.remote
        for request in remote.unfinished_requests(remote.as_of if isinstance(error, StepHangsError) else now):
            if (trip := self.requests.trips.get(request.id)) is None:
                continue
            to_move = trip.client_progress(request, now)
            if (why_not := trip.why_not_resumable(to_move.progress)) is None:
                to_resume.append(to_move)
            else:
                self.requests.finish(request.id, "failed", f"{error}; {why_not}")
        current = asyncio.current_task()
        for answer, task in self._tries.items():
            if task is not current and answer not in ending:
                trips[answer].leave(task)
        self._tries = ending
        self.requests.clear()
        self.kv.clear()
        self._idle.set()
        self._report_loss(self.id, error, to_resume)
        self.spawn(self.close())  # its connections are of no use any more
