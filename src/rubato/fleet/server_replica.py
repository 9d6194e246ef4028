"""One OpenAI server as a replica: requests go there over HTTP, as they came; what it tells of itself is folded here.

With the link of the plug-in (`wire.messages`) every step is known, and waiting requests can be taken back. Without
it, or while it is silent, what is sent there is counted: a request waits until its first chunk comes, and each chunk is
a token. A server that is lost, or that fails at a request, gives it back to the cluster, if it can go on elsewhere.
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
from rubato.fleet.remote_view import Mirror, shifted_request
from rubato.fleet.server_kv import KVBetweenServers, Trips
from rubato.fleet.server_link import Link
from rubato.fleet.server_watch import TRY, ServerLostError, ServerWatch, StepHangsError
from rubato.fleet.token_path import TokenCount
from rubato.fleet.upstream import Upstream, UpstreamError
from rubato.replica.miss_cause import is_infeasible
from rubato.replica.sequence import Seq
from rubato.wire import messages
from rubato.wire.messages import CoreAbout, Resync, assign, do, expect

log = logging.getLogger(__name__)

TELL_S = 1.0  # from a token that is counted until listeners are told of it, and of those that came after it
AGAIN = 1.0  # seconds from one look whether a server is there to the next
SAID_EVERY = 60  # of such looks, one that fails is logged
REST = 1.0  # seconds that it is given nothing after failures
ASIDE = 1e-3  # the same after one: the request that failed is to go elsewhere
RETRIES = 3  # times that a request which failed is placed again, where that is no fault of its own
RETRY_SHARE, MIN_RETRIES = 0.2, 3  # of what is in flight, how much may be tried again at once; at least so many
LAST_BYTES = 2.0  # seconds for the rest of responses whose requests have ended
REPORT_WAIT = 0.25  # seconds that the end of a response waits for its verdict


class UnlikeError(ValueError):
    """A server is of another kind than the fleet: an operator is to be told at the start."""


@dataclass(frozen=True)
class ServerAbout:
    """What a server is: its model, and what a router sees of it. version: of vLLM, empty where it is not said.
    kv_lease: seconds that its engine keeps KV for another one to read; None: it has no connector for that."""

    model: str
    limits: Limits
    latency: LatencyModel
    supports: frozenset[str]
    policy: str = ""
    version: str = ""
    kv_lease: float | None = None


class ServerReplica(ServerWatch, KVBetweenServers):
    """A `Host` over one server.

    link: opens the link; None for a server that has none. about: asks the server what it is (`server_probe.about`),
    given what its core said first. Whatever they raise, the server is not ready. read_models: reads the list of its
    models anew, and raises ValueError or UpstreamError. trips: of the gateway, by request: where its body is. emit and
    lost: as every host's. step_timeout: as `local_host.LocalHost`, of steps that the link tells of. patient: its start
    waits until it is ready. kv_used: asks it for the share of its KV that is in use, while no link tells that; None:
    that is not asked.
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
        patient: bool = False,
        kv_used: Callable[[], Coroutine[Any, Any, float | None]] | None = None,
        read_models: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.id = id
        self.url = url
        self.clock = clock
        self.about: ServerAbout | None = None
        self.linked = False  # the link tells what happens there
        self.upstream = upstream
        self._ask, self._open_link, self._kv_used, self._read_models = about, link, kv_used, read_models
        self._trips = trips
        self._emit_outside, self._lost = emit, lost
        self._options = options
        self._step_timeout = step_timeout
        self._patient = patient
        self._link: Link | None = None
        self._mirror: Mirror | None = None
        self._role: Role | None = None
        self._mine: dict[str, Trip] = {}  # by the id of each request that is here
        self._prompts: dict[str, int] = {}  # tokens as the server counts them, by a trip's first id
        self._serving: dict[str, asyncio.Task[None]] = {}  # by a trip's first id
        self.rests_until = 0.0
        self._counted: dict[str, TokenCount] = {}  # by request
        self._failed_at: set[str] = set()  # answers, since the server last brought anything
        self._no_kv_moves()
        self._hear_nothing_yet()
        self._suspect = False  # it has failed at a request, and is to be asked for its health
        self._gone = False
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        """Raises NotReadyError for a server that is not ready, UnlikeError for one of another kind than the fleet;
        where it is to be waited for, it is asked again and again instead, whatever it has answered."""
        tries = 0
        while True:
            try:
                await self._begin_to_serve()
                return
            except Exception as error:
                for task in self._tasks:
                    task.cancel()
                if self._link is not None:
                    self._link.close()
                if not self._patient and isinstance(error, UnlikeError):
                    raise
                if not self._patient:
                    raise NotReadyError(str(error) or type(error).__name__) from error
                if tries % SAID_EVERY == 0:
                    is_new = not isinstance(error, UpstreamError | ValueError)  # a kind of answer not thought of here
                    log.warning("server %s is waited for: %s", self.url, error, exc_info=is_new)
                tries += 1
                await asyncio.sleep(AGAIN)

    async def _begin_to_serve(self) -> None:
        told: CoreAbout | None = None
        self._link = await self._open_link()
        if self._link is not None:
            self._spawn(self._listen(self._link))
            told = await self._greet(self._link)
        self.about = await self._ask(told)
        mirror = Mirror(
            self.id, self.about.limits, self.about.latency, self.about.supports, self.clock.now(), self._options.lengths
        )
        self._mirror, self.kv_lease = mirror, self.about.kv_lease
        if self._link is not None:
            self._link.send(Resync())
            self.linked = True
        self._spawn(self._watch(mirror))

    @property
    def is_gone(self) -> bool:
        """Whether it is lost or closed."""
        return self._gone

    @property
    def has_link(self) -> bool:
        """Whether it is told by a link what is promised, also while that is silent."""
        return self._link is not None

    @property
    def continues(self) -> bool:
        """Whether its server is known to go on from what another has streamed: vLLM is."""
        return self.about is not None and bool(self.about.version)

    def submit(self, request: Request) -> None:
        mirror = self._started()
        trip = self._trips[request.id]
        mirror.submit(request, self.clock.now())
        self._mine[request.id] = trip
        if trip.ids[0] not in self._serving:  # else with the first of its requests
            self._send(trip, request)

    def _send(self, trip: Trip, request: Request, kv: KV | None = None) -> None:
        """kv: of its prompt, where another server has it."""
        trip.tries += 1
        if not trip.begun:
            trip.sent_at = self.clock.now()
        for id in trip.ids if trip.tries > 1 else ():
            self._reader.disown(id)
        if self._link is not None:
            names = tuple([f"{id}{TRY}{trip.tries}" for id in trip.ids])
            promised = expect(trip.answer, names, trip.choices, shifted_request(request, self._ahead))
            is_demoted = request.progress is not None and request.progress.demoted
            self._link.send(do(promised, messages.Demote(trip.answer)) if is_demoted else do(promised))
        self._serving[trip.ids[0]] = trip.placed(self, request, kv)

    def resume(self, id: str) -> None:
        """No request here waits for a tool."""

    def cancel(self, id: str, reason: str) -> None:
        trip = self._mine.get(id)
        if trip is None:
            return
        self._finish(id, "cancelled", reason)
        if not any(other in self._mine for other in trip.ids):
            self._leave(trip)

    def view(self) -> View:
        for count in self._counted.values():
            self._settle(count)
        return self._started().view(self.clock.now())

    def assign(self, role: Role) -> None:
        self._role = role
        self._started().assign(role)
        self._command(assign(role))

    def recall(self, kind: Recall) -> None:
        if self.linked:
            self._command(messages.Recall(kind))
            return
        now, mirror = self.clock.now(), self._started()
        for id, trip in list(self._mine.items()):
            seq = mirror.known(id)
            wanted = seq is not None and (kind == "waiting" or seq.best_effort) and mirror.waits(id)
            request = mirror.moved(id, "recalled", now) if wanted and not trip.begun and len(trip.ids) == 1 else None
            if request is not None:
                self._fold(HandedOff(now, id, request))

    async def drain(self) -> None:
        while (self._mine or self._kv) and not self._gone:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        """Leave the server; what it serves for this gateway ends as failed. The last bytes of what has ended pass."""
        if ending := self._ending_responses():
            await asyncio.wait(ending.values(), timeout=LAST_BYTES)
            for answer in [answer for answer, task in ending.items() if not task.done()]:
                if (trip := self._trips.get(answer)) is not None:
                    trip.break_off(f"replica {self.id} is gone, and the last bytes of the response with it")
        for id in list(self._mine):
            self._finish(id, "failed", "the server closed")
        self._gone = True
        tasks = [task for task in (*self._tasks, *self._serving.values()) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            self._link.close()
        await self.upstream.close()

    def _ending_responses(self) -> dict[str, asyncio.Task[None]]:
        """Responses that still come though their requests have ended."""
        open_ = {trip.ids[0] for trip in self._mine.values()}
        return {answer: task for answer, task in self._serving.items() if answer not in open_}

    # ----------------------------------------------------------------- requests

    def has(self, trip: Trip) -> bool:
        return any(id in self._mine for id in trip.ids)

    def is_working_at(self, trip: Trip) -> bool:
        """Whether its link says that the engine has a request of it."""
        return self.linked and any(id in self._mine and self._started().is_reported(id) for id in trip.ids)

    async def heard_of(self, trip: Trip) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_WAIT):
                while self.linked and any(id in self._mine and id not in self._prefilled for id in trip.ids):
                    trip.news.clear()
                    await trip.news.wait()

    def end(self, trip: Trip, outcome: Outcome, reason: str) -> None:
        for id in trip.ids:
            was_cut = outcome == "completed" and id in self._aborted
            self._finish(id, *(("cancelled", "aborted") if was_cut else (outcome, reason)))

    def fail(self, trip: Trip, why: str, fault: Fault) -> None:
        """The server could not, or went away meanwhile: what is left of the trip goes elsewhere, if it can."""
        if not self.has(trip):  # its requests have ended: this is the echo, or too late to matter
            trip.break_off(why)
            return
        self._rest(trip)
        log.warning("%s", why)
        if self._failed_to_arrive(trip, why):
            return
        self._leave(trip)  # first: the choices, which go on together, may come back here at once
        now, mirror, handed_off = self.clock.now(), self._started(), []
        for id, group in [(one.id, one.group) for one in trip.requests if one.id in self._mine]:
            moved = mirror.moved(id, "failed", now)
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

    def _rest(self, trip: Trip) -> None:
        """Give the server nothing for a while, by the word of two requests that nothing has come between. One alone may
        itself be at fault, as may one that has failed elsewhere. (Where nobody answers, `look` has told.)"""
        self._suspect = True
        self.tell_of_counted()  # of what has come since another failed
        if not trip.has_failed:
            self._failed_at.add(trip.ask.answer)
        if rests := len(self._failed_at) > 1:
            self._failed_at.clear()
        self.rests_until = max(self.rests_until, self.clock.now() + (REST if rests else ASIDE))

    def _why_not_retried(self, trip: Trip, request: Request, now: float, fault: Fault) -> str | None:
        """Why a request that failed is not tried elsewhere; None if it is."""
        assert request.handoff is not None
        e2e = request.stages[0].slo.e2e
        if e2e is not None and now > request.arrival + e2e:
            return "its deadline has passed"
        most = 1 if fault is Fault.UNKNOWN or request.losses else RETRIES
        if (failures := request.handoff.failures + request.losses) > most:
            return f"it was tried {failures} times"
        if fault is Fault.UNREACHABLE:  # no server has had it
            return trip.why_not_resumable(request.progress)
        others = {other.ask.answer for other in self._trips.values() if other.has_failed and other is not trip}
        if len(others) >= max(MIN_RETRIES, RETRY_SHARE * len(self._trips)):
            return "too many others are being tried again"
        return trip.why_not_resumable(request.progress)

    def left(self, trip: Trip) -> None:
        if self._serving.get(trip.ids[0]) is asyncio.current_task():
            del self._serving[trip.ids[0]]

    def _leave(self, trip: Trip) -> None:
        """Take no more of its response: the server ends what is left of it."""
        if (task := self._serving.pop(trip.ids[0], None)) is not None:
            trip.leave(task)

    # ----------------------------------------------------------------- events

    def _fold(self, *events: Event) -> None:
        """What is known here, and not from the link."""
        mirror = self._started()
        for event in events:
            mirror.fold(event)
        self._emit(events, is_told=False)

    def _emit(self, events: Sequence[Event], *, is_told: bool = True) -> None:
        """Tell the cluster of its own requests, and of steps. is_told: by the link, of what was at its engine."""
        for event in events:
            if isinstance(event, Stepped):
                self._emit_outside(event)
                continue
            if self._absent:
                self._absent.pop(event.id, None)
            if type(event) is Tokens:
                if self._failed_at:
                    self._failed_at.clear()
                if event.id in self._mine:
                    self._emit_outside(event)
                continue
            trip = self._mine.get(event.id)
            if trip is None:
                continue
            if isinstance(event, Offered):  # it has come there; the cluster has offered it
                is_first = trip.ids.index(event.id) % trip.choices == 0  # choice of its prompt
                if event.request.progress is None and is_first and trip.ids[0] in self._mine:
                    self._prompts[trip.ids[0]] = self._prompts.get(trip.ids[0], 0) + event.request.prompt
                    if len(trip.ids) == 1:
                        trip.learned(event.request.prompt)
                continue
            if isinstance(event, Finished):
                verdict = self._as_passed_on(trip, event) if is_told else event.verdict
                event = replace(event, prompt=self._prompts.pop(event.id, None), verdict=verdict)
            if type(event) is Finished and event.outcome == "failed":
                why = f"replica {self.id} could not read the KV of request {event.id!r}"
                if self._failed_to_arrive(trip, why):
                    del self._mine[event.id]
                    self._counted.pop(event.id, None)
                    self._leave(trip)
                    continue
            self._arrived(event)
            if isinstance(event, Finished | HandedOff):
                self._prompts.pop(event.id, None)
                self._prefilled.pop(event.id, None)
                self._counted.pop(event.id, None)
                self._aborted.discard(event.id)
                del self._mine[event.id]
                trip.news.set()
                if isinstance(event, HandedOff) and not any(id in self._mine for id in trip.ids):
                    self._leave(trip)
            self._emit_outside(event)
        if not self._mine:
            self._idle.set()

    def _as_passed_on(self, trip: Trip, end: Finished) -> Verdict:
        """With the delay of the gateway. The last chunk waits for the verdict, so that it is not passed on before
        this."""
        if end.outcome != "completed":
            return end.verdict
        request = trip.requests[trip.ids.index(end.id)]
        return as_passed_on(request, end.verdict, end.output, trip.began_at, self.clock.now())

    def know_prompt(self, trip: Trip, prompt: int) -> None:
        """The server has counted so many tokens in the prompts of a trip; 0: it has not."""
        if prompt and trip.tries <= 1 and trip.ids[0] in self._mine:
            self._prompts[trip.ids[0]] = prompt
            trip.learned(prompt)

    def max_output(self, trip: Trip) -> int:
        """Output tokens that a trip may have, whatever its server claims."""
        known = [self._started().known(id) for id in trip.ids]
        return sum([seq.request.sampling.max_tokens for seq in known if seq is not None])

    def begin(self, trip: Trip, prompt: int) -> None:
        """Something has come of it: it waits no more. prompt: tokens, where the server has said how many."""
        now, mirror = self.clock.now(), self._started()
        for id in trip.ids:
            if id in self._mine and mirror.arrives(id) and (seq := mirror.known(id)) and (came := seq.request.handoff):
                self._fold(Transferred(now, id, self.id, came.source, came.cached, 0))
            if id in self._mine and mirror.waits(id):
                if prompt and len(trip.ids) == 1:
                    mirror.correct(id, prompt)
                self._fold(Started(now, id))

    def count(self, trip: Trip, choices: Sequence[int]) -> None:
        for at in choices:
            if at < len(trip.ids) and (count := self._counting(trip, trip.ids[at])) is not None:
                count.add()

    def counting(self, trip: Trip) -> TokenCount | None:
        return None if self.linked else self._counted.get(trip.ids[0])

    def _counting(self, trip: Trip, id: str) -> TokenCount | None:
        if id not in self._counted and id in self._mine:
            if self._started().running(id) is None:
                self.begin(trip, 0)
            self._counted[id] = TokenCount(id, self.clock.now, self._tell_of, self.clock.now() + TELL_S)
        return self._counted.get(id)

    def _tell_of(self, count: TokenCount) -> None:
        """Tell listeners of the tokens that have come since this was last done."""
        now = self.clock.now()
        count.tell_at = now + TELL_S
        if count.times:
            self._settle(count)
            times, count.times, count.settled = tuple(count.times), [], 0
            self._failed_at.clear()
            self._emit_outside(Tokens(now, count.id, len(times), times=times))

    def tell_of_counted(self, before: float = inf) -> None:
        """Of all those that were to be told of before then."""
        for count in [count for count in self._counted.values() if count.tell_at <= before]:
            self._tell_of(count)

    def _settle(self, count: TokenCount) -> None:
        """Show in the view what has come."""
        if len(count.times) > count.settled:
            if (seq := self._started().known(count.id)) is not None:
                seq.add_tokens(count.times[count.settled :])
            count.settled = len(count.times)

    def _finish(self, id: str, outcome: Outcome, reason: str) -> None:
        """End a request here, of which the link has not said that it ended."""
        if id not in self._mine:
            return
        if (count := self._counted.get(id)) is not None:
            self._tell_of(count)
        now, mirror = self.clock.now(), self._started()
        seq = mirror.known(id)
        assert seq is not None, "what is served here is here"
        trip, slo_rule, output = self._mine[id], self._options.slo_rule, seq.total_output
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
        """As far as it is known here: that no idle server would have met it, or that at least half of what it is late
        by it waited for a place at one."""
        about = self.about
        if about is not None and "step_times" in about.supports:
            cached = seq.request.prompt  # what a prefix cache there saves is not known
            if is_infeasible(seq, cached, about.latency, about.limits, self._options.slo_rule):
                return "infeasible"
        waited = 0.0 if trip.sent_at is None else trip.sent_at - seq.request.arrival
        return "queue" if verdict.margin is not None and 0.0 < -verdict.margin <= 2 * waited else "not reported"

    def _die(self, error: ServerLostError) -> None:
        if self._gone or self._mirror is None:  # it has not begun to serve
            return
        self._gone = True
        self.tell_of_counted()
        now, left, ending = self.clock.now(), [], self._ending_responses()
        trips = {trip.ids[0]: trip for trip in self._mine.values()}  # whose requests end here may be forgotten at once
        mirror = self._started()
        for request in mirror.left(mirror.as_of if isinstance(error, StepHangsError) else now):
            if (trip := self._mine.get(request.id)) is None:
                continue
            moved = trip.progress_seen(request, now)
            if (no := trip.why_not_resumable(moved.progress)) is None:
                left.append(moved)
            else:
                self._finish(request.id, "failed", f"{error}; {no}")
        current = asyncio.current_task()
        for answer, task in self._serving.items():
            if task is not current and answer not in ending:
                trips[answer].leave(task)
        self._serving = ending
        self._mine.clear()
        self._counted.clear()
        self._aborted.clear()
        self._prompts.clear()
        self._kv.clear()
        self._idle.set()
        self._lost(self.id, error, left)
        self._spawn(self.close())  # what it holds open is of no use any more

    # ----------------------------------------------------------------- parts

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Future[None]) -> None:
        """An error in one of them is a fault of ours: without it the host would be deaf or blind."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("replica %s: the gateway failed to watch it", self.id, exc_info=error)
            if self._mirror is not None:
                self._die(ServerLostError(f"the gateway failed to watch replica {self.id} ({type(error).__name__})"))

    def _started(self) -> Mirror:
        if self._mirror is None:
            raise RuntimeError(f"host {self.id!r} is not started: await start() first")
        return self._mirror
