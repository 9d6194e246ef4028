"""Proxies one OpenAI server as a replica and mirrors its reported state.

With the plug-in's link (`wire.messages`) every step is known, and waiting requests can be recalled. Without the link,
or while it is silent, the gateway counts: a request waits until its first chunk comes, and each chunk is a token. When
a server is lost or fails at a request, the request returns to the cluster, if it can go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from rubato.core.clock import Clock
from rubato.core.events import Event, Finished, HandedOff, Offered, Started, Stepped, Tokens, Transferred, Verdict
from rubato.core.interfaces import LatencyModel, NotReadyError, View
from rubato.core.plan import KV, Limits, Recall, Role
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SATURATED, Cause, Outcome, Request
from rubato.core.slo import StageTimes, as_passed_on, judge, judge_untimed
from rubato.fleet.cluster import HostLost
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Fault, Trip
from rubato.fleet.remote_view import RemoteReplica, shift_request
from rubato.fleet.server_kv import KVBetweenServers, Trips
from rubato.fleet.server_link import Link
from rubato.fleet.server_watch import TRY_SEPARATOR, ServerLostError, ServerWatch, StepHangsError
from rubato.fleet.token_path import TokenCount
from rubato.fleet.upstream import Upstream, UpstreamError
from rubato.replica.miss_cause import is_infeasible
from rubato.replica.sequence import Seq
from rubato.wire import messages
from rubato.wire.messages import CoreAbout, Resync, assign, do, expect

log = logging.getLogger(__name__)

TOKEN_EVENTS_S = 1.0  # counted tokens are reported to listeners at this interval
HEALTH_RETRY_S = 1.0  # between two tries to reach a server that is not ready
LOG_EVERY_N_RETRIES = 60
COOLDOWN_AFTER_FAILURES_S = 1.0  # without new requests
COOLDOWN_AFTER_ONE_S = 1e-3  # after a single failure: that request goes elsewhere
MAX_RETRIES = 3  # of a request that failed through no fault of its own
RETRY_SHARE, MIN_RETRIES = 0.2, 3  # of the requests in flight that may be retried at once, and the least number
RESPONSE_END_S = 2.0  # for the last bytes of responses whose requests have ended
END_REPORT_S = 0.25  # the end of a response waits this long for its verdict


class UnlikeServerError(ValueError):
    """A server is of another kind than the fleet; the gateway does not start."""


@dataclass(frozen=True)
class ServerAbout:
    """A server's model, and the properties that a router sees.

    Args:
        version: of vLLM; empty if the server does not report it.
        kv_lease: seconds that the engine keeps KV for another engine to read; None: it has no KV connector.
    """

    model: str
    limits: Limits
    latency: LatencyModel
    supports: frozenset[str]
    policy: str = ""
    version: str = ""
    kv_lease: float | None = None


class ServerReplica(ServerWatch, KVBetweenServers):
    """A `Host` over one server.

    Args:
        about: asks the server for its properties (`server_probe.about`), given the greeting of its core. If it raises,
            the server is not ready.
        link: opens the link; returns None for a server without one. If it raises, the server is not ready.
        trips: the gateway's trips, by request; they have the bodies.
        emit: as every host's.
        lost: as every host's.
        step_timeout: seconds, as in `local_host.LocalHost`, for steps that the link reports.
        wait_until_ready: `start` waits until the server is ready.
        kv_used: reads the share of KV in use while no link reports it; None: it is not read.
        read_models: reads the server's list of models again; raises ValueError or UpstreamError.
    """

    def __init__(
        self,
        id: str,
        url: str,
        upstream: Upstream,
        clock: Clock,
        *,
        about: Callable[[CoreAbout | None], Coroutine[Any, Any, ServerAbout]],
        link: Callable[[], Coroutine[Any, Any, Link | None]],
        trips: Trips,
        emit: Listener,
        lost: HostLost,
        options: ReplicaOptions,
        step_timeout: float | None = None,
        wait_until_ready: bool = False,
        kv_used: Callable[[], Coroutine[Any, Any, float | None]] | None = None,
        read_models: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.id = id
        self.url = url
        self.clock = clock
        self.about: ServerAbout | None = None
        self.is_linked = False  # the link reports every step
        self.upstream = upstream
        self._ask_about, self._open_link, self._kv_used, self._read_models = about, link, kv_used, read_models
        self._trips = trips
        self._emit_outside, self._lose_host = emit, lost
        self._options = options
        self._step_timeout = step_timeout
        self._wait_until_ready = wait_until_ready
        self._link: Link | None = None
        self._remote: RemoteReplica | None = None
        self._role: Role | None = None
        self._requests: dict[str, Trip] = {}  # by request id
        self._prompt_tokens: dict[str, int] = {}  # tokens as the server counts them, by a trip's first id
        self._tries: dict[str, asyncio.Task[None]] = {}  # by a trip's first id
        self.cooldown_until = 0.0
        self._token_counts: dict[str, TokenCount] = {}  # by request
        self._failed_answers: set[str] = set()  # since the server's last token
        self._init_kv_moves()
        self._init_watch()
        self._is_suspect = False  # it failed at a request: the next heartbeat checks its health
        self._is_gone = False
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        """Asks the server what it is, and begins to watch it; a patient replica asks until the server is ready.

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
                if self._link is not None:
                    self._link.close()
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
        self._link = await self._open_link()
        if self._link is not None:
            self._spawn(self._listen(self._link))
            greeting = await self._greet(self._link)
        self.about = await self._ask_about(greeting)
        remote = RemoteReplica(
            self.id, self.about.limits, self.about.latency, self.about.supports, self.clock.now(), self._options.lengths
        )
        self._remote, self.kv_lease = remote, self.about.kv_lease
        if self._link is not None:
            self._link.send(Resync())
            self.is_linked = True
        self._spawn(self._watch(remote))

    @property
    def is_gone(self) -> bool:
        """Whether it is lost or closed."""
        return self._is_gone

    @property
    def has_link(self) -> bool:
        """Whether the server learns SLOs over a link, which may be silent now."""
        return self._link is not None

    @property
    def can_continue(self) -> bool:
        """Whether the server is known to continue another server's stream, as vLLM does."""
        return self.about is not None and bool(self.about.version)

    def submit(self, request: Request) -> None:
        remote = self._started_remote()
        trip = self._trips[request.id]
        remote.submit(request, self.clock.now())
        self._requests[request.id] = trip
        if trip.ids[0] not in self._tries:  # else with the first of its requests
            self._send(trip, request)

    def _send(self, trip: Trip, request: Request, kv: KV | None = None) -> None:
        """Sends the first or the next try of a trip. kv: of its prompt, at another server."""
        trip.tries += 1
        if not trip.has_begun:
            trip.sent_at = self.clock.now()
        for id in trip.ids if trip.tries > 1 else ():
            self._reader.detach_previous_try(id)
        if self._link is not None:
            names = tuple([f"{id}{TRY_SEPARATOR}{trip.tries}" for id in trip.ids])
            promised = expect(trip.answer, names, trip.choices, shift_request(request, self._ahead))
            is_demoted = request.progress is not None and request.progress.demoted
            self._link.send(do(promised, messages.Demote(trip.answer)) if is_demoted else do(promised))
        self._tries[trip.ids[0]] = trip.start_try(self, request, kv)

    def resume(self, id: str) -> None:
        """No request here waits for a tool."""

    def cancel(self, id: str, reason: str) -> None:
        trip = self._requests.get(id)
        if trip is None:
            return
        self._finish(id, "cancelled", reason)
        if not any(other in self._requests for other in trip.ids):
            self._drop_response(trip)

    def view(self) -> View:
        for count in self._token_counts.values():
            self._show_tokens(count)
        return self._started_remote().view(self.clock.now())

    def assign(self, role: Role) -> None:
        self._role = role
        self._started_remote().assign(role)
        self._command(assign(role))

    def recall(self, kind: Recall) -> None:
        if self.is_linked:
            self._command(messages.Recall(kind))
            return
        now, remote = self.clock.now(), self._started_remote()
        for id, trip in list(self._requests.items()):
            seq = remote.seq_of(id)
            is_recalled = seq is not None and (kind == "waiting" or seq.best_effort) and remote.is_waiting(id)
            request = (
                remote.handed_off_request(id, "recalled", now)
                if is_recalled and not trip.has_begun and len(trip.ids) == 1
                else None
            )
            if request is not None:
                self._fold(HandedOff(now, id, request))

    async def drain(self) -> None:
        while (self._requests or self._kv_at_server) and not self._is_gone:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Leaves the server: its requests end as failed, and the last bytes of ended responses still pass."""
        if ending := self._ending_responses():
            await asyncio.wait(ending.values(), timeout=RESPONSE_END_S)
            for answer in [answer for answer, task in ending.items() if not task.done()]:
                if (trip := self._trips.get(answer)) is not None:
                    trip.break_off(f"replica {self.id} is gone, and the last bytes of the response with it")
        for id in list(self._requests):
            self._finish(id, "failed", "the server closed")
        self._is_gone = True
        tasks = [task for task in (*self._tasks, *self._tries.values()) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        await self.upstream.close()

    def _ending_responses(self) -> dict[str, asyncio.Task[None]]:
        """Responses whose bytes still arrive though their requests have ended."""
        open_ = {trip.ids[0] for trip in self._requests.values()}
        return {answer: task for answer, task in self._tries.items() if answer not in open_}

    # ----------------------------------------------------------------- requests

    def has_requests_of(self, trip: Trip) -> bool:
        return any(id in self._requests for id in trip.ids)

    def is_working_at(self, trip: Trip) -> bool:
        """Whether the link reports a request of this trip at the engine."""
        return self.is_linked and any(
            id in self._requests and self._started_remote().is_reported(id) for id in trip.ids
        )

    async def wait_for_end_report(self, trip: Trip) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_REPORT_S):
                while self.is_linked and any(
                    id in self._requests and id not in self._prefill_reports for id in trip.ids
                ):
                    trip.news.clear()
                    await trip.news.wait()

    def end(self, trip: Trip, outcome: Outcome, reason: str) -> None:
        for id in trip.ids:
            was_cut = outcome == "completed" and id in self._aborted_ids
            self._finish(id, *(("cancelled", "aborted") if was_cut else (outcome, reason)))

    def fail(self, trip: Trip, why: str, fault: Fault) -> None:
        """The server failed or went away: the trip's open requests go elsewhere, if they can."""
        if not self.has_requests_of(trip):  # its requests have ended: this is the echo, or too late to matter
            trip.break_off(why)
            return
        self._cool_down(trip)
        log.warning("%s", why)
        if self._fail_arrival(trip, why):
            return
        self._drop_response(trip)  # first: the choices, which go on together, may come back here at once
        now, remote, handed_off = self.clock.now(), self._started_remote(), []
        for id, group in [(one.id, one.group) for one in trip.requests if one.id in self._requests]:
            moved = remote.handed_off_request(id, "failed", now)
            if moved is None:  # the link tells that it has left the engine, and not how it ended
                self._finish(id, "failed", why)
                continue
            request = trip.progress_seen(moved, now)
            if (no := self._why_not_retried(trip, request, now, fault)) is not None:
                full = fault is Fault.FULL
                self._finish(id, "refused" if full else "failed", SATURATED if full else f"{why}; {no}")
            else:
                trip.has_failed = True
                handed_off.append(HandedOff(now, id, replace(request, group=group)))
        self._fold(*handed_off)

    def _cool_down(self, trip: Trip) -> None:
        """Gives the server no new requests for a while, after two failures without a token in between. A single
        failure may be the request's own fault, as may one of a request that failed elsewhere before. (A server that
        does not answer at all is found by `check_health`.)"""
        self._is_suspect = True
        self.emit_counted_tokens()  # of what has come since another failed
        if not trip.has_failed:
            self._failed_answers.add(trip.ask.answer)
        if rests := len(self._failed_answers) > 1:
            self._failed_answers.clear()
        self.cooldown_until = max(
            self.cooldown_until, self.clock.now() + (COOLDOWN_AFTER_FAILURES_S if rests else COOLDOWN_AFTER_ONE_S)
        )

    def _why_not_retried(self, trip: Trip, request: Request, now: float, fault: Fault) -> str | None:
        """Why a request that failed is not tried elsewhere; None if it is."""
        assert request.handoff is not None
        e2e = request.stages[0].slo.e2e
        if e2e is not None and now > request.arrival + e2e:
            return "its deadline has passed"
        most = 1 if fault is Fault.UNKNOWN or request.losses else MAX_RETRIES
        if (failures := request.handoff.failures + request.losses) > most:
            return f"it was tried {failures} times"
        if fault is Fault.UNREACHABLE:  # no server has had it
            return trip.why_not_resumable(request.progress)
        others = {other.ask.answer for other in self._trips.values() if other.has_failed and other is not trip}
        if len(others) >= max(MIN_RETRIES, RETRY_SHARE * len(self._trips)):
            return "too many others are being tried again"
        return trip.why_not_resumable(request.progress)

    def end_try(self, trip: Trip) -> None:
        if self._tries.get(trip.ids[0]) is asyncio.current_task():
            del self._tries[trip.ids[0]]

    def _drop_response(self, trip: Trip) -> None:
        """Drops the connection of the response: the server ends its requests."""
        if (task := self._tries.pop(trip.ids[0], None)) is not None:
            trip.leave(task)

    # ----------------------------------------------------------------- events

    def _fold(self, *events: Event) -> None:
        """Applies events that the gateway knows of without the link."""
        remote = self._started_remote()
        for event in events:
            remote.fold(event)
        self._emit(events, is_from_link=False)

    def _emit(self, events: Sequence[Event], *, is_from_link: bool = True) -> None:
        """Emits events of the gateway's own requests, and of steps. is_from_link: the engine reported them."""
        for event in events:
            if isinstance(event, Stepped):
                self._emit_outside(event)
                continue
            if self._absent_since:
                self._absent_since.pop(event.id, None)
            if type(event) is Tokens:
                if self._failed_answers:
                    self._failed_answers.clear()
                if event.id in self._requests:
                    self._emit_outside(event)
                continue
            trip = self._requests.get(event.id)
            if trip is None:
                continue
            if isinstance(event, Offered):  # it has come there; the cluster has offered it
                is_first = trip.ids.index(event.id) % trip.choices == 0  # choice of its prompt
                if event.request.progress is None and is_first and trip.ids[0] in self._requests:
                    self._prompt_tokens[trip.ids[0]] = self._prompt_tokens.get(trip.ids[0], 0) + event.request.prompt
                    if len(trip.ids) == 1:
                        trip.on_prompt_tokens(event.request.prompt)
                continue
            if isinstance(event, Finished):
                verdict = self._as_passed_on(trip, event) if is_from_link else event.verdict
                event = replace(event, prompt=self._prompt_tokens.pop(event.id, None), verdict=verdict)
            if type(event) is Finished and event.outcome == "failed":
                why = f"replica {self.id} could not read the KV of request {event.id!r}"
                if self._fail_arrival(trip, why):
                    del self._requests[event.id]
                    self._token_counts.pop(event.id, None)
                    self._drop_response(trip)
                    continue
            self._end_arrival(event)
            if isinstance(event, Finished | HandedOff):
                self._prompt_tokens.pop(event.id, None)
                self._prefill_reports.pop(event.id, None)
                self._token_counts.pop(event.id, None)
                self._aborted_ids.discard(event.id)
                del self._requests[event.id]
                trip.news.set()
                if isinstance(event, HandedOff) and not any(id in self._requests for id in trip.ids):
                    self._drop_response(trip)
            self._emit_outside(event)
        if not self._requests:
            self._idle.set()

    def _as_passed_on(self, trip: Trip, end: Finished) -> Verdict:
        """The verdict with the gateway's own delay. The last chunk waits for the verdict, so it has not been passed on
        yet."""
        if end.outcome != "completed":
            return end.verdict
        request = trip.requests[trip.ids.index(end.id)]
        return as_passed_on(request, end.verdict, end.output, trip.began_at, self.clock.now())

    def set_prompt_tokens(self, trip: Trip, prompt: int) -> None:
        """Sets the prompt tokens of a trip, as its server counts them; 0: the server did not count."""
        if prompt and trip.tries <= 1 and trip.ids[0] in self._requests:
            self._prompt_tokens[trip.ids[0]] = prompt
            trip.on_prompt_tokens(prompt)

    def max_output(self, trip: Trip) -> int:
        """The limit on a trip's output tokens, whatever its server claims."""
        known = [self._started_remote().seq_of(id) for id in trip.ids]
        return sum([seq.request.sampling.max_tokens for seq in known if seq is not None])

    def mark_started(self, trip: Trip, prompt: int) -> None:
        """Marks a trip's requests as started: their first bytes have come. prompt: tokens, 0 if not known."""
        now, remote = self.clock.now(), self._started_remote()
        for id in trip.ids:
            if (
                id in self._requests
                and remote.is_arriving(id)
                and (seq := remote.seq_of(id))
                and (came := seq.request.handoff)
            ):
                self._fold(Transferred(now, id, self.id, came.source, came.cached, 0))
            if id in self._requests and remote.is_waiting(id):
                if prompt and len(trip.ids) == 1:
                    remote.set_prompt_tokens(id, prompt)
                self._fold(Started(now, id))

    def count(self, trip: Trip, choices: Sequence[int]) -> None:
        for at in choices:
            if at < len(trip.ids) and (count := self._token_count(trip, trip.ids[at])) is not None:
                count.add()

    def token_count_of(self, trip: Trip) -> TokenCount | None:
        return None if self.is_linked else self._token_counts.get(trip.ids[0])

    def _token_count(self, trip: Trip, id: str) -> TokenCount | None:
        if id not in self._token_counts and id in self._requests:
            if self._started_remote().running_seq(id) is None:
                self.mark_started(trip, 0)
            self._token_counts[id] = TokenCount(
                id, self.clock.now, self._emit_tokens, self.clock.now() + TOKEN_EVENTS_S
            )
        return self._token_counts.get(id)

    def _emit_tokens(self, count: TokenCount) -> None:
        """Emits the tokens that have come since the last call."""
        now = self.clock.now()
        count.emit_at = now + TOKEN_EVENTS_S
        if count.times:
            self._show_tokens(count)
            times, count.times, count.shown_count = tuple(count.times), [], 0
            self._failed_answers.clear()
            self._emit_outside(Tokens(now, count.id, len(times), times=times))

    def emit_counted_tokens(self, before: float = inf) -> None:
        """Emits the counted tokens of all requests whose report is due before this time."""
        for count in [count for count in self._token_counts.values() if count.emit_at <= before]:
            self._emit_tokens(count)

    def _show_tokens(self, count: TokenCount) -> None:
        """Shows counted tokens in the view."""
        if len(count.times) > count.shown_count:
            if (seq := self._started_remote().seq_of(count.id)) is not None:
                seq.add_tokens(count.times[count.shown_count :])
            count.shown_count = len(count.times)

    def _finish(self, id: str, outcome: Outcome, reason: str) -> None:
        """Ends a request whose end the link has not reported."""
        if id not in self._requests:
            return
        if (count := self._token_counts.get(id)) is not None:
            self._emit_tokens(count)
        now, remote = self.clock.now(), self._started_remote()
        seq = remote.seq_of(id)
        assert seq is not None, "a request with a trip has a sequence"
        trip, slo_rule, output = self._requests[id], self._options.slo_rule, seq.total_output
        untimed = trip.untimed_tokens(id)
        if outcome == "completed" and untimed is not None:
            output = max(output, untimed)
            verdict = judge_untimed(seq.request, now, slo_rule)
        else:
            stages = [StageTimes(*stage) for stage in zip(seq.starts, seq.times_of_all(), strict=True)]
            verdict = judge(seq.request, stages, outcome, slo_rule, reason=reason)
        if outcome == "completed" and verdict.missed:
            verdict = replace(verdict, cause=self._why_missed(seq, verdict, trip))
        self._fold(Finished(now, id, outcome, reason, verdict, output, seq.best_effort))

    def _why_missed(self, seq: Seq, verdict: Verdict, trip: Trip) -> Cause:
        """The cause of a miss, as far as the gateway knows: the SLO is infeasible even on an idle server, or the wait
        for a replica was at least half of the delay."""
        about = self.about
        if about is not None and "step_times" in about.supports:
            cached = seq.request.prompt  # what a prefix cache there saves is not known
            if is_infeasible(seq, cached, about.latency, about.limits, self._options.slo_rule):
                return "infeasible"
        waited = 0.0 if trip.sent_at is None else trip.sent_at - seq.request.arrival
        return "queue" if verdict.margin is not None and 0.0 < -verdict.margin <= 2 * waited else "not reported"

    def _die(self, error: ServerLostError) -> None:
        if self._is_gone or self._remote is None:  # it has not begun to serve
            return
        self._is_gone = True
        self.emit_counted_tokens()
        now, to_resume, ending = self.clock.now(), [], self._ending_responses()
        trips = {trip.ids[0]: trip for trip in self._requests.values()}  # before their requests end and are forgotten
        remote = self._started_remote()
        for request in remote.unfinished_requests(remote.as_of if isinstance(error, StepHangsError) else now):
            if (trip := self._requests.get(request.id)) is None:
                continue
            moved = trip.progress_seen(request, now)
            if (no := trip.why_not_resumable(moved.progress)) is None:
                to_resume.append(moved)
            else:
                self._finish(request.id, "failed", f"{error}; {no}")
        current = asyncio.current_task()
        for answer, task in self._tries.items():
            if task is not current and answer not in ending:
                trips[answer].leave(task)
        self._tries = ending
        self._requests.clear()
        self._token_counts.clear()
        self._aborted_ids.clear()
        self._prompt_tokens.clear()
        self._kv_at_server.clear()
        self._idle.set()
        self._lose_host(self.id, error, to_resume)
        self._spawn(self.close())  # its connections are of no use any more

    # ----------------------------------------------------------------- parts

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Future[None]) -> None:
        """A task that raises is our fault; without these tasks the host has stale state, so the server is lost."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("replica %s: the gateway failed to watch it", self.id, exc_info=error)
            if self._remote is not None:
                self._die(ServerLostError(f"the gateway failed to watch replica {self.id} ({type(error).__name__})"))

    def _started_remote(self) -> RemoteReplica:
        if self._remote is None:
            raise RuntimeError(f"host {self.id!r} is not started: await start() first")
        return self._remote
