"""One OpenAI server as a replica: requests go there over HTTP, as they came; what it tells of itself is folded here.

With the link of the plug-in (`core.link_messages`) every step is known, and waiting requests can be taken back. Without
it, or while it is silent, what is sent there is counted: a request waits until its first chunk comes, and each chunk is
a token. A server that is lost, or that fails at a request, gives it back to the cluster, if it can go on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rubato.core.clock import Clock
from rubato.core.events import Event, Finished, HandedOff, Offered, Started, Stepped, Tokens, Transferred
from rubato.core.interfaces import LatencyModel, View
from rubato.core.link_messages import Message, assign, demote, expect, recall
from rubato.core.plan import KV, Limits, Recall, Role
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import INFEASIBLE, SATURATED, Outcome, Progress, Request
from rubato.core.slo import StageTimes, judge
from rubato.fleet.call import Call, Calls, CannotContinueError, usage_of
from rubato.fleet.cluster import HostLost
from rubato.fleet.event_bus import Listener
from rubato.fleet.remote_view import Mirror, shifted_request
from rubato.fleet.server_kv import KVBetweenServers, NotApartError, prefill_only, with_kv
from rubato.fleet.server_link import Link
from rubato.fleet.server_watch import PROBE_SECONDS, TRY, ServerLostError, ServerWatch
from rubato.fleet.sse_relay import END, StreamRelay, may_be_last
from rubato.fleet.upstream import Headers, Reply, Upstream, UpstreamError, error_code, whole
from rubato.replica.miss_cause import is_infeasible

log = logging.getLogger(__name__)

AGAIN = 1.0  # seconds from one look whether a server is there to the next
SAID_EVERY = 60  # of such looks, one that fails is logged
REST = 1.0  # seconds that it is given nothing after a failure
RETRIES = 3  # times that a request which failed is placed again
LAST_BYTES = 2.0  # seconds for the rest of responses whose requests have ended
REPORT_WAIT = 0.25  # seconds that the end of a response waits for its verdict


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


class ServerHost(ServerWatch, KVBetweenServers):
    """A `Host` over one server.

    link: opens the link; None for a server that has none. about: asks the server what it is (`server_probe.about`),
    given what its core said first. Both raise ValueError or UpstreamError. calls: of the gateway, where each request's
    body is. emit and lost: as every host's. step_timeout: as `local_host.LocalHost`, of steps that the link tells of.
    kv_used: asks it for the share of its KV that is in use, while no link tells that; None: that is not asked.
    """

    def __init__(
        self,
        id: str,
        url: str,
        upstream: Upstream,
        clock: Clock,
        *,
        about: Callable[[Message | None], Coroutine[Any, Any, ServerAbout]],
        link: Callable[[], Coroutine[Any, Any, Link | None]],
        calls: Calls,
        emit: Listener,
        lost: HostLost,
        options: ReplicaOptions,
        step_timeout: float | None = None,
        patient: bool = False,
        kv_used: Callable[[], Coroutine[Any, Any, float | None]] | None = None,
    ) -> None:
        self.id = id
        self.url = url
        self.clock = clock
        self.about: ServerAbout | None = None
        self.linked = False  # the link tells what happens there
        self.upstream = upstream
        self._ask, self._open_link, self._kv_used = about, link, kv_used
        self._calls = calls
        self._emit_outside, self._lost = emit, lost
        self._options = options
        self._step_timeout = step_timeout
        self._patient = patient
        self._link: Link | None = None
        self._mirror: Mirror | None = None
        self._role: Role | None = None
        self._mine: dict[str, Call] = {}  # by the id of each request that is here
        self._prompts: dict[str, int] = {}  # tokens as the server counts them, by a call's first id
        self._serving: dict[str, asyncio.Task[None]] = {}  # by a call's first id
        self._news: dict[str, asyncio.Event] = {}  # by a call's first id: a request of it has ended
        self.rests_until = 0.0
        self._no_kv_moves()
        self._hear_nothing_yet()
        self._suspect = False  # it has failed at a request, and is to be asked for its health
        self._gone = False
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Future[None]] = set()

    # ----------------------------------------------------------------- Host

    async def start(self) -> None:
        """Raises UpstreamError for a server that does not answer, ValueError for one that cannot be used; where it is
        to be waited for, it is asked again and again instead."""
        tries = 0
        while True:
            try:
                await self._begin_to_serve()
                return
            except (UpstreamError, ValueError) as error:
                for task in self._tasks:
                    task.cancel()
                if self._link is not None:
                    self._link.close()
                if not self._patient:
                    raise
                if tries % SAID_EVERY == 0:
                    log.warning("server %s is waited for: %s", self.url, error)
                tries += 1
                await asyncio.sleep(AGAIN)

    async def _begin_to_serve(self) -> None:
        told: Message | None = None
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
            self._link.send({"kind": "resync"})
            self.linked = True
        self._spawn(self._watch(mirror))

    @property
    def has_link(self) -> bool:
        """Whether it is told by a link what is promised, also while that is silent."""
        return self._link is not None

    def submit(self, request: Request) -> None:
        mirror = self._started()
        call = self._calls[request.id]
        mirror.submit(request, self.clock.now())
        self._mine[request.id] = call
        if call.ids[0] not in self._serving:  # else with the first of its requests
            self._send(call, request)

    def _send(self, call: Call, request: Request, kv: KV | None = None) -> None:
        """kv: of its prompt, where another server has it."""
        call.tries += 1
        for id in call.ids if call.tries > 1 else ():
            self._reader.disown(id)
        if self._link is not None:
            names = tuple([f"{id}{TRY}{call.tries}" for id in call.ids])
            commands = [expect(call.answer, names, call.choices, shifted_request(request, self._ahead))]
            if request.progress is not None and request.progress.demoted:
                commands.append(demote(call.answer))
            self._link.send({"kind": "do", "commands": commands})
        self._news[call.ids[0]] = asyncio.Event()
        task = asyncio.ensure_future(self._serve(call, request, kv, kv is None and self._prefills))
        self._serving[call.ids[0]] = task
        task.add_done_callback(lambda done: self._served(call, done))

    def resume(self, id: str) -> None:
        """No request here waits for a tool."""

    def cancel(self, id: str, reason: str) -> None:
        call = self._mine.get(id)
        if call is None:
            return
        self._finish(id, "cancelled", reason)
        if not any(other in self._mine for other in call.ids):
            self._leave(call)

    def view(self) -> View:
        return self._started().view(self.clock.now())

    def assign(self, role: Role) -> None:
        self._role = role
        self._started().assign(role)
        self._command(assign(role))

    def recall(self, kind: Recall) -> None:
        if self.linked:
            self._command(recall(kind))
            return
        now, mirror = self.clock.now(), self._started()
        for id, call in list(self._mine.items()):
            seq = mirror.known(id)
            wanted = seq is not None and (kind == "waiting" or seq.best_effort) and mirror.waits(id)
            request = mirror.moved(id, "recalled", now) if wanted and not call.begun and len(call.ids) == 1 else None
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
                if (call := self._calls.get(answer)) is not None:
                    call.breaks(f"replica {self.id} is gone, and the last bytes of the response with it")
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
        open_ = {call.ids[0] for call in self._mine.values()}
        return {answer: task for answer, task in self._serving.items() if answer not in open_}

    # ----------------------------------------------------------------- requests

    async def _serve(self, call: Call, request: Request, kv: KV | None, prefills: bool) -> None:
        """Send a call there, and pass on what comes back. prefills: only its prompt is to be run there."""
        try:
            headers, body = call.sent(request.progress)
            if call.begun:
                headers, body = call.sent(request.progress, await self._tokenized(call.so_far(), headers))
            if kv is not None:
                body = with_kv(body, kv)
            elif prefills:
                body = prefill_only(call, body)
            reply = await self.upstream.open("POST", call.target, headers, body)
        except CannotContinueError as error:
            self._fail(call, str(error))
            return
        except NotApartError as error:
            self._end(call, "refused", f"rejected-invalid: {error}")
            return
        except UpstreamError as error:
            self._failed(call, f"replica {self.id} cannot be reached: {error}")
            return
        try:
            await self._pass_on(call, reply, prefills)
        except UpstreamError as error:
            reply.close()  # first: it may come back here
            self._failed(call, f"replica {self.id} broke off: {error}")
        finally:
            reply.close()

    async def _tokenized(self, text: str, headers: Headers) -> tuple[int, ...]:
        """The text that a client has had, in tokens of this server: a chunk may have brought several. Empty where it
        does not say. Raises UpstreamError."""
        asked = orjson.dumps({"prompt": text, "add_special_tokens": False})
        reply = await self.upstream.open("POST", "/tokenize", headers, asked, seconds=PROBE_SECONDS)
        raw = await whole(reply)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return tuple(map(int, orjson.loads(raw)["tokens"])) if reply.status == 200 else ()
        return ()

    async def _pass_on(self, call: Call, reply: Reply, prefills: bool) -> None:
        if not self.linked and reply.status == 429 and dict(reply.headers).get("x-should-retry") == "false":
            raw = await whole(reply)  # its SLO cannot be met there even alone: no fault of the server's
            await call.whole(reply.status, reply.headers, raw)
            self._end(call, "refused", f"{INFEASIBLE}: the server answered 429")
            return
        if reply.status >= 500 or reply.status == 429:
            error = await whole(reply)
            await self._heard_of(call)
            if not any(id in self._mine for id in call.ids):  # what the server says is the echo of a refusal
                call.breaks(f"replica {self.id} answered {reply.status}")
                return
            log.debug("replica %s answered %d: %.200r", self.id, reply.status, error)  # it may quote the prompt
            why = f"replica {self.id} answered {reply.status}{error_code(error)}"
            self._failed(call, why, full=reply.status == 429, once=reply.status == 500)
            return
        if reply.status != 200:
            raw = await whole(reply)
            await call.whole(reply.status, reply.headers, raw)
            self._end(call, "refused", f"rejected-invalid: the server answered {reply.status}")
            return
        if prefills:
            await self._hand_over(call, await whole(reply))
            return
        if dict(reply.headers).get("content-type", "").startswith("text/event-stream"):
            await self._stream(call, reply)
            return
        raw = await whole(reply)
        prompt, output = usage_of(raw)
        self._know_prompt(call, prompt)
        if not self.linked:
            self._begin(call, prompt)
            output = min(output, self._most_output(call))
            self._count(call, [at % len(call.ids) for at in range(output)])
        await self._ended(call)
        await call.whole(200, reply.headers, raw)

    async def _stream(self, call: Call, reply: Reply) -> None:
        relay = StreamRelay(len(call.ids), events=call.path not in CHUNKED)
        begun, early = False, b""  # what came before the first token is kept until then: an engine may still refuse
        while data := await self._part(reply, relay):
            now, choices = relay.feed(data)
            if not begun:
                early = now = early + now
            if (at := (now or relay.rest()).find(ERROR)) >= 0:
                error = (now or relay.rest())[at:].partition(END)[0]
                if at and now and begun:
                    await call.write(now[:at])
                await self._heard_of(call)
                log.debug("replica %s: an error in a stream: %.200r", self.id, error)  # it may quote the prompt
                raise UpstreamError(f"an error in the stream{error_code(error[len(DATA) :])}")
            if not begun:
                if not choices and not relay.rest() and not relay.ended:
                    continue
                begun = True
                if not call.begun:
                    await call.begin(200, reply.headers)
            call.streamed += len(choices)
            if not self.linked and choices:
                self._begin(call, 0)
                self._count(call, choices)
            if now:
                await call.write(now)
        if not relay.ended:
            raise UpstreamError("the stream ended before its last chunk")
        prompt, output = usage_of(relay.usage)
        self._know_prompt(call, prompt)
        if not self.linked:  # a chunk may have brought several tokens
            missing = min(output, self._most_output(call)) - call.streamed
            self._count(call, [at % len(call.ids) for at in range(missing)])
        await self._ended(call)
        await call.end(relay.rest())

    async def _part(self, reply: Reply, relay: StreamRelay) -> bytes:
        """What comes next; nothing where the connection broke behind the last chunk."""
        try:
            return await reply.part()
        except UpstreamError:
            if relay.ended or may_be_last(relay.rest()):
                return b"data: [DONE]\n\n" if not relay.ended else b""
            raise

    async def _ended(self, call: Call) -> None:
        """The response has come to its end: so have its requests, which the link tells of as a rule."""
        await self._heard_of(call)
        self._end(call, "completed", "stop")

    async def _heard_of(self, call: Call) -> None:
        """Wait for the link to tell of the ends of its requests, but not for long."""
        news = self._news.get(call.ids[0])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_WAIT):
                while (
                    news is not None
                    and self.linked
                    and any(id in self._mine and id not in self._prefilled for id in call.ids)
                ):
                    news.clear()
                    await news.wait()

    def _end(self, call: Call, outcome: Outcome, reason: str) -> None:
        for id in call.ids:
            self._finish(id, outcome, reason)

    def _fail(self, call: Call, why: str) -> None:
        self._end(call, "failed", why)

    def _failed(self, call: Call, why: str, *, full: bool = False, once: bool = False) -> None:
        """The server could not, or went away meanwhile: what is left of the call goes elsewhere, if it can. full: it
        takes no more for now. once: it may be the request's own fault, which the server is not to rest for, and which
        one other server is asked about; whether it is the server's, its health tells."""
        if not any(id in self._mine for id in call.ids):  # they have ended: this is the echo, or too late to matter
            call.breaks(why)
            return
        if not once:
            self.rests_until = self.clock.now() + REST
        self._suspect = True
        log.warning("%s", why)
        if not self._failed_to_arrive(call, why):
            self._give_back(call, why, full, 1 if once else RETRIES)

    def _give_back(self, call: Call, why: str, full: bool, retries: int) -> None:
        now, mirror = self.clock.now(), self._started()
        for id in [id for id in call.ids if id in self._mine]:
            request = self._as_sent(call, mirror.moved(id, "failed", now))
            if request is None:  # the link tells that it has left the engine, and not how it ended
                self._finish(id, "failed", why)
            elif (no := self._stays_here(call, request, now, retries)) is not None:
                self._finish(id, *(("refused", SATURATED) if full else ("failed", f"{why}; {no}")))
            else:
                self._fold(HandedOff(now, id, request))

    def _as_sent(self, call: Call, request: Request | None) -> Request | None:
        """A request that goes elsewhere, with what its client has had of it, not with what the engine has told."""
        count = call.streamed if call.begun else 0
        if request is None or (request.progress is None and not count):
            return request
        had = request.progress or Progress((request.arrival,), ((),))
        times = had.times[0][:count]
        times += (self.clock.now(),) * (count - len(times))
        ids = had.token_ids[:count]
        progress = replace(had, times=(times,), token_ids=ids if len(ids) == count else ())
        return replace(request, progress=progress if count or had.demoted or had.delays else None)

    def _stays_here(self, call: Call, request: Request, now: float, retries: int) -> str | None:
        """Why a request that failed is not tried elsewhere; None if it is."""
        assert request.handoff is not None
        e2e = request.stages[0].slo.e2e
        if e2e is not None and now > request.arrival + e2e:
            return "its deadline has passed"
        if request.handoff.failures > retries:
            return f"it was tried {request.handoff.failures} times"
        if call.begun:
            try:
                call.sent(request.progress)
            except CannotContinueError as error:
                return str(error)
        return None

    def _served(self, call: Call, task: asyncio.Task[None]) -> None:
        """Nothing of a call is under way here any more. An error here is one of ours: it must not stay in flight."""
        if self._serving.get(call.ids[0]) is task:
            del self._serving[call.ids[0]]
            self._news.pop(call.ids[0], None)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("replica %s: a request could not be passed on", self.id, exc_info=error)
            self._fail(call, f"the gateway failed at it ({type(error).__name__})")

    def _leave(self, call: Call) -> None:
        """Take no more of its response: the server ends what is left of it."""
        task = self._serving.pop(call.ids[0], None)
        self._news.pop(call.ids[0], None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # ----------------------------------------------------------------- events

    def _fold(self, *events: Event) -> None:
        """What is known here, and not from the link."""
        mirror = self._started()
        for event in events:
            mirror.fold(event)
        self._emit(events)

    def _emit(self, events: Sequence[Event]) -> None:
        """Tell the cluster of its own requests, and of steps."""
        for event in events:
            if isinstance(event, Stepped):
                self._emit_outside(event)
                continue
            self._absent.pop(event.id, None)
            call = self._mine.get(event.id)
            if call is None:
                continue
            if isinstance(event, Offered):  # it has come there; the cluster has offered it
                is_first = call.ids.index(event.id) % call.choices == 0  # choice of its prompt
                if event.request.progress is None and is_first and call.ids[0] in self._mine:
                    self._prompts[call.ids[0]] = self._prompts.get(call.ids[0], 0) + event.request.prompt
                    if len(call.ids) == 1:
                        call.counted(event.request.prompt)
                continue
            if isinstance(event, Finished):
                event = replace(event, prompt=self._prompts.pop(event.id, None))
            if type(event) is Finished and event.outcome == "failed":
                why = f"replica {self.id} could not read the KV of request {event.id!r}"
                if self._failed_to_arrive(call, why):
                    del self._mine[event.id]
                    self._leave(call)
                    continue
            self._arrived(event)
            if isinstance(event, Finished | HandedOff):
                self._prompts.pop(event.id, None)
                self._prefilled.pop(event.id, None)
                del self._mine[event.id]
                if (news := self._news.get(call.ids[0])) is not None:
                    news.set()
                if isinstance(event, HandedOff) and not any(id in self._mine for id in call.ids):
                    self._leave(call)
            self._emit_outside(event)
        if not self._mine:
            self._idle.set()

    def _know_prompt(self, call: Call, prompt: int) -> None:
        """The server has counted so many tokens in the prompts of a call; 0: it has not."""
        if prompt and call.tries <= 1 and call.ids[0] in self._mine:
            self._prompts[call.ids[0]] = prompt
            call.counted(prompt)

    def _most_output(self, call: Call) -> int:
        """Output tokens that a call may have, whatever its server claims."""
        known = [self._started().known(id) for id in call.ids]
        return sum([seq.request.sampling.max_tokens for seq in known if seq is not None])

    def _begin(self, call: Call, prompt: int) -> None:
        """Something has come of it: it waits no more. prompt: tokens, where the server has said how many."""
        now, mirror = self.clock.now(), self._started()
        for id in call.ids:
            if id in self._mine and mirror.arrives(id) and (seq := mirror.known(id)) and (came := seq.request.handoff):
                self._fold(Transferred(now, id, self.id, came.source, came.cached, 0))
            if id in self._mine and mirror.waits(id):
                if prompt and len(call.ids) == 1:
                    mirror.correct(id, prompt)
                self._fold(Started(now, id))

    def _count(self, call: Call, choices: Sequence[int]) -> None:
        """A token of each of these choices."""
        now = self.clock.now()
        for at in choices:
            if at < len(call.ids) and (id := call.ids[at]) in self._mine:
                self._fold(Tokens(now, id, 1))

    def _finish(self, id: str, outcome: Outcome, reason: str) -> None:
        """End a request here, of which the link has not said that it ended."""
        if id not in self._mine:
            return
        now, mirror = self.clock.now(), self._started()
        seq = mirror.known(id)
        assert seq is not None, "what is served here is here"
        stages = [StageTimes(*stage) for stage in zip(seq.starts, seq.times_of_all(), strict=True)]
        slo_rule = self._options.slo_rule
        verdict = judge(seq.request, stages, outcome, slo_rule, reason=reason)
        about = self.about
        if outcome == "completed" and not verdict.met and about is not None and "step_times" in about.supports:
            cached = seq.request.prompt  # what a prefix cache there saves is not known
            if is_infeasible(seq, cached, about.latency, about.limits, slo_rule):
                verdict = replace(verdict, cause="infeasible")
        self._fold(Finished(now, id, outcome, reason, verdict, seq.total_output, seq.best_effort))

    def _die(self, error: ServerLostError) -> None:
        if self._gone:
            return
        self._gone = True
        left, ending = [], self._ending_responses()
        for request in self._started().left():
            if (call := self._mine.get(request.id)) is None:
                continue
            moved = self._as_sent(call, request)
            assert moved is not None
            try:
                if call.begun:
                    call.sent(moved.progress)
                left.append(moved)
            except CannotContinueError as no:
                self._finish(request.id, "failed", f"{error}; {no}")
        current = asyncio.current_task()
        for answer, task in self._serving.items():
            if task is not current and answer not in ending:
                task.cancel()
        self._serving = ending
        self._mine.clear()
        self._prompts.clear()
        self._kv.clear()
        self._idle.set()
        self._lost(self.id, error, left)
        self._spawn(self.close())  # what it holds open is of no use any more

    # ----------------------------------------------------------------- parts

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)

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


DATA = b"data: "
ERROR = DATA + b'{"error"'  # a chunk of a stream that an engine would not serve, or not to its end
CHUNKED = ("/v1/chat/completions", "/v1/completions")  # streams that end with [DONE]; others are of named events
