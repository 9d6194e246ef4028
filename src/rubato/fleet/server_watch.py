"""Watches a server: by the reports of its engine core, and by health probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from rubato.core.clock import PLAN
from rubato.core.events import Finished, HandedOff
from rubato.fleet.local_host import MAX_STEP_SLOWDOWN
from rubato.fleet.relay import Trip
from rubato.fleet.remote_host import MAX_SILENCE_S, LinkSession, RemoteHost, ReplicaLostError, StepHangsError
from rubato.fleet.server_probe import FleetProbe
from rubato.fleet.server_requests import ServerRequests
from rubato.fleet.server_try import Fault
from rubato.fleet.upstream import UnreachableError, UpstreamError, ask_health
from rubato.wire.messages import HEARTBEAT_S, Resync
from rubato.wire.replica_report import ReplicaReport

log = logging.getLogger(__name__)

PROBE_S = 5.0  # for the answer to a health probe
HEARTBEATS_PER_PROBE = 5  # of a server whose link speaks; also of the list of models
MAX_FAILED_PROBES = 2  # in a row, before the server is lost
CHECK_DELAY_S = 0.01  # before each health check of a server that broke a response off
MAX_ABSENCE_S = 10.0  # of an open request from the reports of its engine, before it is placed elsewhere


class ServerWatch:
    """Decides what is known of a server's replica, and when it is lost.

    Args:
        host: of the replica.
        probe: asks the server.
        requests: those that are open at the server.
        step_timeout: seconds, as in `local_host.LocalHost`, for steps that the link reports.
        fail: called for a trip that the server has failed.
    """

    def __init__(
        self, host: RemoteHost, probe: FleetProbe, requests: ServerRequests, step_timeout: float | None, *,
        fail: Callable[[Trip, str, Fault], None],
    ) -> None:  # fmt: skip
        self.is_suspect = False  # the server failed at a request: the next heartbeat checks its health
        self._host, self._probe, self._requests, self._fail = host, probe, requests, fail
        self._step_timeout = step_timeout
        self._health_check: asyncio.Future[None] | None = None

    # ----------------------------------------------------------------- reports

    def apply(self, report: ReplicaReport) -> None:
        """Applies a report of the engine, and emits its events."""
        host, requests = self._host, self._requests
        remote, now = host.remote, host.clock.now()
        if host.is_gone:
            return
        if not self._requests.is_linked:
            log.info("replica %s: the link is back", host.id)
            self._requests.is_linked = True
        requests.emit_counted_tokens()
        if report.snapshot is not None:
            known_ids = {one.request.id for one in report.snapshot}
            absent = [id for id in requests.trips if id not in known_ids]
            requests.absent_since = {id: requests.absent_since.get(id, now) for id in absent}
        report = self._without_aborts(report)
        remote.apply(report)  # first: the cluster may place a request on an end
        requests.emit(report.events)
        for hand_off in report.hand_offs:
            id, reason, at, cached = hand_off
            trip = requests.trips.get(id)
            if trip is not None and cached:  # its response says the rest
                requests.prefill_reports[id] = hand_off
                trip.news.set()
                continue
            request = remote.handed_off_request(id, reason, at)
            if trip is not None and request is not None:
                requests.fold(HandedOff(at, id, trip.client_progress(request, host.clock.now())))
            else:
                remote.forget(id)

    def _without_aborts(self, report: ReplicaReport) -> ReplicaReport:
        """Returns the report without the ends of requests that their API server aborted: it failed at them, and each
        response will say so."""
        requests, now = self._requests, self._host.clock.now()
        aborted_ids = {
            e.id for e in report.events if type(e) is Finished and e.outcome == "cancelled" and e.id in requests.trips
        }
        if not aborted_ids:
            return report
        requests.absent_since |= {id: requests.absent_since.get(id, now) for id in aborted_ids}
        requests.aborted_ids |= aborted_ids
        events = tuple([e for e in report.events if type(e) is not Finished or e.id not in aborted_ids])
        return replace(report, events=events)

    # ----------------------------------------------------------------- health

    async def run(self) -> None:
        """Watches the server. Silence is counted in turns of this loop, not by a clock: a process that was itself
        stopped heard nothing meanwhile."""
        host = self._host
        failed_probes = heartbeats = 0
        while not host.is_gone:
            await host.clock.sleep_until(host.clock.now() + HEARTBEAT_S, PLAN)
            heartbeats += 1
            self._requests.emit_counted_tokens(host.clock.now())
            if host.session is not None:
                self._watch_link(host.session)
            is_probe_due = failed_probes or self.is_suspect or heartbeats % HEARTBEATS_PER_PROBE == 0
            if self._requests.is_linked and not is_probe_due:
                continue
            self.is_suspect = False
            failed_probes = 0 if await self._is_healthy() else failed_probes + 1
            if failed_probes >= MAX_FAILED_PROBES:
                host.die(ReplicaLostError(f"the server of replica {host.id} does not answer"))
                continue
            if not (failed_probes or self._requests.is_linked):
                await self._read_kv_usage()
            if not failed_probes and heartbeats % HEARTBEATS_PER_PROBE == 0:
                with contextlib.suppress(UpstreamError, ValueError):  # the list that was read last stands
                    await self._probe.read_models()

    def _watch_link(self, session: LinkSession) -> None:
        host = self._host
        session.send_heartbeat()
        self._fail_absent()
        if self._requests.is_linked and session.silence_s < MAX_SILENCE_S:
            self._check_step()
            return
        if self._requests.is_linked:
            log.warning("replica %s: its link is silent; what is sent there is counted instead", host.id)
            self._requests.is_linked = False
        session.say_hello()
        session.link.send(Resync())

    def _fail_absent(self) -> None:
        """Fails requests that the engine does not know, so that they are placed elsewhere: the engine handed them off
        in a missed report, or the API server never passed them on. (An ended request's response has ended, too.)"""
        host, requests = self._host, self._requests
        # (a server with a silent link may hang, maybe at this request: health probes decide)
        unreported = host.remote.unreported_since() if self._requests.is_linked else {}
        for id, since in {**unreported, **requests.absent_since}.items():
            if (trip := requests.trips.get(id)) is None:
                requests.absent_since.pop(id, None)
            elif host.clock.now() - since > MAX_ABSENCE_S:
                requests.absent_since.pop(id, None)
                self._fail(trip, f"replica {host.id} does not know request {id!r}", Fault.UNAVAILABLE)

    async def check_health(self, trip: Trip) -> None:
        """Checks the server's health once for all trips that it has broken off: a server that is gone breaks all of
        them at once, and is then lost as a whole."""
        if self._host.session is not None:
            self._host.session.detach_previous_try(trip.ids)  # the engine will report that its client has left
        if self._health_check is None or self._health_check.done():
            self._health_check = self._host.spawn(self._check_health_again())
        await asyncio.shield(self._health_check)

    async def _check_health_again(self) -> None:
        host = self._host
        for _ in range(MAX_FAILED_PROBES):
            await host.clock.sleep_until(host.clock.now() + CHECK_DELAY_S, PLAN)
            try:
                await ask_health(self._probe.upstream, PROBE_S)
                return
            except UnreachableError as error:
                why = error
            except UpstreamError:
                return  # the next probes tell
        host.die(ReplicaLostError(f"the server of replica {host.id} is gone ({why})"))

    async def _is_healthy(self) -> bool:
        """Returns whether the server is healthy. One without /health is if it lists its models."""
        try:
            status = await ask_health(self._probe.upstream, PROBE_S)
            if status == 404:
                await self._probe.read_models()
        except (UpstreamError, ValueError):
            return False
        return status in (200, 404)

    async def _read_kv_usage(self) -> None:
        """Reads the free KV of a server whose link does not report it. Without an answer the last value stands, at
        first all of the KV."""
        remote = self._host.remote
        used = await self._probe.kv_used()
        if used is not None and not self._requests.is_linked:  # meanwhile the link may have come back
            remote.set_kv_free(round((1.0 - used) * remote.limits.kv_blocks))

    def _check_step(self) -> None:
        """Counts a server as lost when its engine hangs in a step."""
        host, now = self._host, self._host.clock.now()
        view = host.remote.view(now)
        if self._step_timeout is None or not view.in_flight.seqs:
            return
        predicted = max(0.0, view.busy_until - view.as_of)
        if now - view.as_of > self._step_timeout + MAX_STEP_SLOWDOWN * predicted:
            host.die(StepHangsError(f"the engine of replica {host.id} hangs in a step"))
