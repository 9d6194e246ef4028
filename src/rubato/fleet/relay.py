"""One API request's trip through the gateway: placed at a server, streamed, placed again where that failed, ended.

The cluster places the requests; `Trip.start_try` sends the body to the server and passes the response on in callbacks:
no task wakes for a part of a stream. The trip reports tokens (`ServerReplica.count`) and ends to the replica, and adds
the verdict at the end of the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import orjson

from rubato.core.clock import Clock
from rubato.core.events import Event, Finished
from rubato.core.plan import KV
from rubato.core.request import INFEASIBLE, Progress, Request
from rubato.fleet.disaggregation import DisaggregationUnsupportedError, prefill_only, with_kv
from rubato.fleet.event_bus import Listener, without_tokens
from rubato.fleet.resume import CHAT, TEXT, NotResumableError, StreamSoFar
from rubato.fleet.token_path import ByteWriter, TokenCount, TokenPath
from rubato.fleet.upstream import (
    MAX_ANSWER_BYTES,
    BrokenError,
    Headers,
    Reply,
    UnreachableError,
    Upstream,
    UpstreamError,
    error_code,
    read_all,
)
from rubato.wire.folded_answer import FoldedAnswer
from rubato.wire.response_stream import DONE, ResponseStream, loads, usage_of, with_fields

log = logging.getLogger(__name__)

TOKENIZE_S = 5.0  # for an answer of /tokenize
# A redirect sends the client to another address, the server's own as a rule (304 does not).
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
JSON_HEADERS: Headers = [("content-type", "application/json")]
STREAM_HEADERS = ("content-type", "cache-control", "x-accel-buffering")  # which a folded stream does not have
REDIRECT_MESSAGE = "The server answers with a redirect, which is not passed on."
KEY_STATUSES = (401, 403)
KEY_REFUSED_MESSAGE = "The server refuses the gateway's own key, or what may be done with it."
UNKNOWN_FIELD_STATUSES = (400, 422)  # answers to a body with a field that the server does not know
CLOSE_S = 1.0  # from the last finish reason of a stream to the end of its bytes
MAX_EARLY_BYTES = 1 << 20  # held back of a stream before its first token


class Fault(Enum):
    """How a server failed at a request, which decides how often the request is retried elsewhere."""

    UNREACHABLE = "nobody answers there: the request was not sent"
    FULL = "it takes no more for now"
    UNAVAILABLE = "it says that it cannot serve for now"
    UNKNOWN = "it may be the request's own fault: one other server is asked"


class Flow(Protocol):
    """A source of bytes that can be paused."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


FAULT_OF_STATUS = {429: Fault.FULL, 503: Fault.UNAVAILABLE}


class Client(Protocol):
    """The receiver of a response: it gets each part at once, or as soon as the parts before have been sent. flow: is
    paused while the client reads nothing."""

    flow: Flow | None

    @property
    def direct(self) -> ByteWriter | None:
        """Takes parts of a body that has begun, once all parts before have been sent."""
        ...

    def start(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None: ...


class Carrier(Protocol):
    """A replica as a trip sees it."""

    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def upstream(self) -> Upstream: ...
    @property
    def is_linked(self) -> bool: ...
    @property
    def has_link(self) -> bool:
        """Whether the server learns SLOs over a link, which may be silent now."""
        ...

    @property
    def can_continue(self) -> bool:
        """Whether the server is known to continue another server's stream."""
        ...

    @property
    def clock(self) -> Clock: ...
    @property
    def is_prefill_server(self) -> bool:
        """Whether requests that are sent there now go on elsewhere after their prefill."""
        ...

    def has_requests_of(self, trip: Trip) -> bool:
        """Whether a request of the trip is open here."""
        ...

    def mark_started(self, trip: Trip, prompt: int) -> None:
        """Marks the trip's requests as started. prompt: tokens, 0 if not known."""
        ...

    def count(self, trip: Trip, choices: Sequence[int]) -> None:
        """Counts a token of each of these choices."""
        ...

    def token_count_of(self, trip: Trip) -> TokenCount | None:
        """The counter of a trip with one choice; None before its first token, and while a link reports tokens."""
        ...

    def set_prompt_tokens(self, trip: Trip, tokens: int) -> None:
        """Sets the prompt tokens as the server counts them; 0: the server did not count."""
        ...

    def max_output(self, trip: Trip) -> int:
        """The limit on the trip's output tokens, whatever its server claims."""
        ...

    def end(self, trip: Trip, outcome: Any, reason: str) -> None:
        """Ends the trip's requests that are open here."""
        ...

    def is_working_at(self, trip: Trip) -> bool:
        """Whether the link reports a request of this trip at the engine."""
        ...

    async def wait_for_end_report(self, trip: Trip) -> None:
        """Waits a short time for the link to report the ends of the trip's requests."""
        ...

    async def check_health(self, trip: Trip) -> None:
        """Checks the server's health after it has broken this trip off; without an answer the server is lost with all
        its requests."""
        ...

    def fail(self, trip: Trip, why: str, fault: Fault) -> None:
        """The server failed: the trip's open requests go elsewhere, if they can."""
        ...

    async def hand_over(self, trip: Trip, body: bytes) -> None:
        """Hands the prefilled request off. body: the response that says where its KV is."""
        ...

    def end_try(self, trip: Trip) -> None:
        """The current try of the trip has ended here."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """An API request as it is sent to a server.

    Args:
        target: its path, with the query.
        answer: id of the response that the client sees.
        choices: of one prompt.
        body: makes the body, given the id of the try's response, and whether only the response reports its tokens.
        with_usage: the client wants to see a stream's counts.
        resumes: the servers are known to continue each other's streams, as vLLM does.
        model: that must serve the request; "": any.
        has_own_key: the gateway's own key is in the headers.
        slo_headers: the granted SLO, for a server without a link.
    """

    path: str
    target: str
    answer: str
    choices: int
    streams: bool
    with_usage: bool
    resumes: bool
    headers: Headers
    body: Callable[[str, bool], bytes]
    model: str = ""
    has_own_key: bool = False
    slo_headers: Headers = ()


class Trip:
    """The state of a trip: its tries, and the response so far.

    Args:
        requests: one for each choice.
        on_prompt_tokens: called with the number of prompt tokens, once it is known.
    """

    def __init__(
        self, ask: Ask, requests: tuple[Request, ...], client: Client, on_prompt_tokens: Callable[[int], None]
    ) -> None:  # fmt: skip
        self.ask, self.requests, self.client, self.on_prompt_tokens = ask, requests, client, on_prompt_tokens
        self.ids = tuple([request.id for request in requests])
        self.tries = 0
        self.sent_at: float | None = None  # of the last try that began without output
        self.has_begun = False  # the client has received a part of the response
        self.began_at: float | None = None  # when the client got the first part of a stream
        self.has_failed = False  # at a server, and was retried
        self._streamed = 0  # tokens of a stream, without those of the current `_path`
        self._path: TokenPath | None = None  # of the try that counts
        self.untimed: int | None = None  # tokens of a response that came as a whole
        self.is_over = False  # the client has received the whole response
        self.break_reason = ""  # why no more of the response will come
        self.failed_end: Finished | None = None  # the first end that is no completion
        self.done = asyncio.Event()  # over, broken or failed
        self.news = asyncio.Event()  # a request of it has ended at its server
        self._task: asyncio.Task[None] | None = None  # the try that counts
        self._ends: dict[str, Finished] = {}

    @property
    def choices(self) -> int:
        return self.ask.choices

    @property
    def streamed(self) -> int:
        """Tokens that have come in the stream."""
        return self._streamed + (0 if self._path is None else self._path.passed_tokens)

    def _set_done(self) -> None:
        self.done.set()
        self._shut()

    def _shut(self) -> None:
        """Ends the direct path of tokens: the trip has changed."""
        if self._path is not None:
            self._streamed = self.streamed
            self._path.writer = None
            self._path = None

    def untimed_tokens(self, id: str) -> int | None:
        """Output tokens of a request whose times are not known; None if they are known."""
        if self.untimed is None:
            return None
        return (self.untimed + len(self.ids) - 1 - self.ids.index(id)) // len(self.ids)

    @property
    def on_event(self) -> Listener:
        """`hear` as a cluster's listener, without tokens: the trip counts them itself."""

        return without_tokens(self.hear)

    @property
    def answer(self) -> str:
        """The id that the server gives its response: a new one for each try, so that rests of one try are not taken for
        the next."""
        return name_of_try(self.ask.answer, self.tries)

    def hear(self, event: Event) -> None:
        """An event of one of its requests."""
        if type(event) is Finished:
            self._ends[event.id] = event
            if event.outcome != "completed" and self.failed_end is None:
                self.failed_end = event
                self._set_done()

    def start_try(self, replica: Carrier, request: Request, kv: KV | None = None) -> asyncio.Task[None]:
        """Starts a try at the replica where the cluster has placed it. kv: of its prompt, at another server."""
        self._shut()
        self.news.clear()
        self._task = asyncio.ensure_future(self._serve(replica, request, kv))
        return self._task

    def leave(self, task: asyncio.Task[None]) -> None:
        """Drops a try: the server ends its requests."""
        if self._task is task:
            self._task = None
            self._shut()
        if task is not asyncio.current_task():
            task.cancel()

    def break_off(self, why: str) -> None:
        """Breaks the response off, after the end of its requests."""
        if not self.is_over:
            self.break_reason = self.break_reason or why
            self._set_done()

    def why_not_resumable(self, progress: Progress | None) -> str | None:
        """Why the response cannot continue elsewhere; None if it can, or has not begun."""
        if self.has_begun and not self.ask.resumes:
            return "its client has had some of it, and the servers are not known to continue"
        try:
            if self.has_begun:
                self.build_request(progress)
        except NotResumableError as error:
            return str(error)
        except Exception as error:  # an unexpected body or stream must not harm other requests
            log.exception("request %s cannot be continued", self.ask.answer)
            return f"it cannot be continued ({type(error).__name__})"
        return None

    def progress_seen(self, request: Request, now: float) -> Request:
        """The request with the output that its client has received, not the output that the engine has reported."""
        count = self.streamed if self.has_begun else 0
        if request.progress is None and not count:
            return request
        had = request.progress or Progress((request.arrival,), ((),))
        times = had.times[0][:count]
        times += (now,) * (count - len(times))
        ids = had.token_ids[:count]
        progress = replace(had, times=(times,), token_ids=ids if len(ids) == count else ())
        return replace(request, progress=progress if count or had.demoted or had.delays else None)

    # ----------------------------------------------------------------- of each kind of trip

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        """Headers and body for a server.

        Args:
            progress: the output so far, of a response that has begun.
            ids: the tokens of its text, empty if no server knows them; None: they will be asked for.

        Raises:
            NotResumableError: the response has begun, and cannot continue elsewhere.
        """
        raise NotImplementedError

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        """Its response there. Raises UpstreamError, NotResumableError, DisaggregationUnsupportedError."""
        raise NotImplementedError

    def verdict(self) -> Mapping[str, Any]:
        """Fields that the response gets, once all its requests have ended."""
        return {}

    def keeps(self) -> Callable[[bytes], None] | None:
        """Takes the events that have gone to the client; None: nothing keeps them."""
        return None

    def write(self, data: bytes) -> None:
        """Writes whole events to the client."""

    def finish(self, data: bytes) -> None:
        """Ends a stream with these bytes."""

    def answer_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answers with a response that does not stream, or with the client's own error."""

    # ----------------------------------------------------------------- one try

    async def _serve(self, replica: Carrier, request: Request, kv: KV | None) -> None:
        """Runs one try. An error of the gateway ends it, too: nothing stays in flight."""
        reply: Reply | None = None
        prefills = kv is None and replica.is_prefill_server
        try:
            reply = await self.open(replica, request, kv, prefills=prefills)
            await self._pass_on(replica, reply, prefills)
        except NotResumableError as error:
            replica.end(self, "failed", str(error))
        except DisaggregationUnsupportedError as error:
            replica.end(self, "refused", f"rejected-invalid: {error}")
        except UpstreamError as error:
            if isinstance(error, BrokenError | UnreachableError):
                await replica.check_health(self)
            if reply is not None:
                reply.close()  # first: it may come back here
            what = "cannot be reached" if reply is None else "broke off"
            fault = Fault.UNREACHABLE if isinstance(error, UnreachableError) else Fault.UNKNOWN
            replica.fail(self, f"replica {replica.id} {what}: {error}", fault)
        except Exception as error:
            log.exception("replica %s: a request could not be passed on", replica.id)
            replica.end(self, "failed", f"the gateway failed at it ({type(error).__name__})")
            self.break_off(f"the gateway failed at it ({type(error).__name__})")
        finally:
            if reply is not None:
                reply.close()
            if self.client.flow is reply:
                self.client.flow = None
            replica.end_try(self)

    async def _pass_on(self, replica: Carrier, reply: Reply, prefills: bool) -> None:
        if reply.status != 200:
            await self._pass_error(replica, reply.status, reply.headers, await read_all(reply))
            return
        if prefills:
            await replica.hand_over(self, await read_all(reply))
            return
        if dict(reply.headers).get("content-type", "").lower().startswith("text/event-stream"):
            if self.ask.streams or self.ask.path not in (CHAT, TEXT):
                await self._stream(replica, reply)
            else:
                await self._fold(replica, reply)
            return
        raw = await read_all(reply)
        prompt, output = usage_of(raw)
        replica.set_prompt_tokens(self, prompt)
        if not replica.is_linked:
            replica.mark_started(self, prompt)
            self.untimed = min(output, replica.max_output(self))
        await self._completed(replica)
        self.answer_whole(200, reply.headers, raw)

    async def _pass_error(self, replica: Carrier, status: int, headers: Headers, raw: bytes) -> None:
        if not replica.is_linked and status == 429 and dict(headers).get("x-should-retry") == "false":
            # its SLO cannot be met there even alone: no fault of the server's
            self.answer_whole(status, headers, raw)
            replica.end(self, "refused", f"{INFEASIBLE}: the server answered 429")
            return
        if (kept := why_not_passed_on(replica.id, status, has_own_key=self.ask.has_own_key)) is not None:
            self._end_as_502(replica, *kept)
            return
        if status < 500 and status != 429:
            self.answer_whole(status, headers, raw)
            replica.end(self, "refused", f"rejected-invalid: the server answered {status}")
            return
        await replica.wait_for_end_report(self)
        if not replica.has_requests_of(self):  # what the server says is the echo of a refusal
            self.break_off(f"replica {replica.id} answered {status}")
            return
        log.debug("replica %s answered %d: %.200r", replica.id, status, raw)  # it may quote the prompt
        why = f"replica {replica.id} answered {status}{error_code(raw)}"
        replica.fail(self, why, FAULT_OF_STATUS.get(status, Fault.UNKNOWN))

    def _end_as_502(self, replica: Carrier, why: str, message: str) -> None:
        """Ends the trip as failed through no fault of its client, who gets only this message."""
        self._end_as_told(replica, why)
        error = {"message": message, "type": "server_error", "param": None, "code": "server_failed"}
        self.answer_whole(502, JSON_HEADERS, orjson.dumps({"error": error}))

    def _end_as_told(self, replica: Carrier, why: str) -> None:
        """Ends the trip as failed, without an error for the client, who sees the failure otherwise."""
        replica.end(self, "failed", why)
        self.failed_end = None

    async def _stream(self, replica: Carrier, reply: Reply) -> None:
        ask = self.ask
        is_named = ask.path not in (CHAT, TEXT)
        reader = ResponseStream(len(self.ids), is_named=is_named, with_usage=ask.with_usage)
        early: bytearray | None = bytearray()  # before its first token: an engine may still refuse

        def take(data: bytes, choices: Sequence[int]) -> None:
            nonlocal early
            if early is not None:
                early += data
                if not (choices or reader.holds or reader.has_ended or len(early) > MAX_EARLY_BYTES):
                    return
                data, early = bytes(early), None
                if not self.has_begun:
                    self.has_begun, self.began_at = True, replica.clock.now()
                    self.client.start(200, reply.headers)
                self.client.flow = reply
            self._count(replica, choices)
            if data:
                self.write(data)
            # A later try's events are not passed as they are.
            if choices and self._path is not None and self.tries <= 1:
                self._path.count, self._path.writer = replica.token_count_of(self), self.client.direct

        await self._pump(replica, reply, reader, take)
        if reader.has_failed:  # which its client has seen
            await replica.wait_for_end_report(self)
            self._end_as_told(replica, "the server's response says that it failed")
        else:
            await self._completed(replica)
        end = b"" if reader.has_ended or is_named else DONE
        self.finish(reader.finish({} if is_named else self.verdict(), end))

    async def _fold(self, replica: Carrier, reply: Reply) -> None:
        """Folds a stream into one answer: the gateway asked for a stream to see tokens as they come, though the client
        wants one answer, and gets it only when it is whole."""
        reader = ResponseStream(len(self.ids), max_event_bytes=MAX_ANSWER_BYTES)
        answer = FoldedAnswer(is_chat=self.ask.path == CHAT)
        self._streamed = 0

        def take(passed: bytes, choices: Sequence[int]) -> None:
            answer.add(passed)
            if answer.is_broken:
                raise UpstreamError("a chunk of the stream cannot be read")
            if answer.bytes > MAX_ANSWER_BYTES:
                raise UpstreamError(f"the server's answer is longer than {MAX_ANSWER_BYTES} bytes")
            self._count(replica, choices)

        try:
            await self._pump(replica, reply, reader, take)
        except UpstreamError:
            if reader.error is None:
                raise
            reply.close()  # first: it may come back here
            await self._pass_error(replica, _status_of(reader.error), JSON_HEADERS, reader.error)
            return
        answer.add(reader.finish({}))
        if not answer.has_choices:
            raise UpstreamError("the stream brought no answer")
        await self._completed(replica)
        headers = [header for header in reply.headers if header[0] not in STREAM_HEADERS]
        self.answer_whole(200, [*headers, *JSON_HEADERS], answer.to_json())

    def _count(self, replica: Carrier, choices: Sequence[int]) -> None:
        """Counts a token of each of these choices."""
        if choices:
            self._streamed += len(choices)
            if not replica.is_linked:
                replica.count(self, choices)

    async def _pump(
        self, replica: Carrier, reply: Reply, reader: ResponseStream, take: Callable[[bytes, Sequence[int]], None]
    ) -> None:
        """Reads a stream to its end, and counts tokens that its chunks have not shown. Raises UpstreamError.

        Args:
            take: gets the bytes that may be passed on, and the choice of each token in them.
        """
        task = asyncio.current_task()
        closing: list[asyncio.TimerHandle] = []  # closes the connection after the last finish reason

        def came(data: bytes) -> None:
            if self._task is not task:
                return  # it has been taken back, and the connection is about to close
            passable, choices = reader.feed(data)
            if reader.error is not None:
                raise UpstreamError("an error in the stream")
            take(passable, choices)
            if reader.is_complete and not closing:  # the counts, and [DONE], come at once if they do
                closing.append(asyncio.get_running_loop().call_later(CLOSE_S, reply.close))

        self._path = TokenPath(replica, reader, came, self.keeps())
        try:
            await reply.pump(self._path.take)
        except UpstreamError:
            if reader.error is not None:
                await replica.wait_for_end_report(self)
                log.debug("replica %s: an error in a stream: %.200r", replica.id, reader.error)  # it may quote a prompt
                raise UpstreamError(f"an error in the stream{error_code(reader.error)}") from None
            if not reader.is_complete:
                raise
        finally:
            for timer in closing:
                timer.cancel()
        if not reader.is_complete:
            raise UpstreamError("the stream ended before its last chunk")
        prompt, output = reader.usage
        replica.set_prompt_tokens(self, prompt)
        if not replica.is_linked:  # a chunk may have brought several tokens
            missing = min(output, replica.max_output(self)) - self.streamed
            replica.count(self, [at % len(self.ids) for at in range(missing)])

    async def _completed(self, replica: Carrier) -> None:
        """The response has ended: ends the requests whose ends the link has not reported."""
        await replica.wait_for_end_report(self)
        replica.end(self, "completed", "stop")


class RelayTrip(Trip):
    """A trip that sends the body and relays the response itself.

    Args:
        about: makes the fields that the response gets, from the ends of all its requests.
    """

    def __init__(
        self, ask: Ask, requests: tuple[Request, ...], client: Client, on_prompt_tokens: Callable[[int], None],
        about: Callable[[Sequence[Finished]], Mapping[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__(ask, requests, client, on_prompt_tokens)
        self._about = about
        self._so_far = StreamSoFar(ask.path) if ask.resumes and ask.streams and len(requests) == 1 else None
        self._resumed = False  # the stream continues at another server
        self._is_counted = False  # in this try, only the response reports tokens
        self._slo_headers: Headers = ()  # of this try

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        ask = self.ask
        short = ask.answer.partition("-")[2] or ask.answer
        headers = [*ask.headers, *self._slo_headers, ("x-request-id", name_of_try(short, self.tries))]
        raw = ask.body(self.answer, self._is_counted)
        if not self.has_begun:
            return headers, raw
        if self._so_far is None:
            raise NotResumableError("a response of several choices cannot be continued elsewhere")
        self._resumed = True
        received = 0 if progress is None else sum(map(len, progress.times))
        if progress is None or not received:
            if self._so_far.text():
                raise NotResumableError("its tokens were not counted")
            return headers, raw
        told = ids or (progress.token_ids if len(progress.token_ids) == received else ())
        received = max(received, len(told))  # some chunk may have brought several tokens, and some text be fewer
        body = self._so_far.body(raw, received, told, unasked=ids is None)
        self._so_far.received = received
        return headers, body

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        self._is_counted = not (replica.is_linked or prefills or kv is not None)
        self._slo_headers = () if replica.has_link else self.ask.slo_headers
        if self.has_begun and not replica.can_continue:
            raise NotResumableError(f"replica {replica.id} is not known to continue what another has begun")
        reply = await self._ask(replica, request, kv, prefills)
        if reply.status in UNKNOWN_FIELD_STATUSES and self._is_counted and self._adds:
            reply.close()  # it may not know what was added: as the client asks, it may answer
            self._is_counted = False
            reply = await self._ask(replica, request, kv, prefills)
        return reply

    @property
    def _adds(self) -> bool:
        """Whether the body changes if only the response reports tokens."""
        return self.ask.body(self.answer, True) != self.ask.body(self.answer, False)

    async def _ask(self, replica: Carrier, request: Request, kv: KV | None, prefills: bool) -> Reply:
        headers, body = self.build_request(request.progress)
        if self.has_begun and self._so_far is not None:
            ids = await _tokenized(replica.upstream, self._so_far.text(), headers)
            headers, body = self.build_request(request.progress, ids)
        if kv is not None:
            body = with_kv(body, kv)
        elif prefills:
            body = prefill_only(self.ask.path, len(self.ids), body)
        return await replica.upstream.open(
            "POST", self.ask.target, headers, body, is_working=lambda: replica.is_working_at(self)
        )

    def verdict(self) -> Mapping[str, Any]:
        ends = [self._ends[id] for id in self.ids if id in self._ends]
        return self._about(ends if len(ends) == len(self.ids) else ())

    def keeps(self) -> Callable[[bytes], None] | None:
        return None if self._so_far is None else self._so_far.keep

    @property
    def _is_closed(self) -> bool:
        """Whether the response has ended for the client: later bytes of a server are dropped."""
        return self.is_over or self.failed_end is not None

    def write(self, data: bytes) -> None:
        if self._is_closed:
            return
        data = self._as_first(data)
        if self._so_far is not None:
            self._so_far.keep(data)
        self.client.write(data)

    def finish(self, data: bytes) -> None:
        if not self._is_closed:
            self.client.end(self._as_first(data))
            self._end()

    def answer_whole(self, status: int, headers: Headers, body: bytes) -> None:
        if self._is_closed:
            return
        if self.has_begun:  # no second answer begins
            self.break_off(f"a server was to go on with it, and answered {status} as a whole")
            return
        body = self._named(body)
        if status == 200:
            body = with_fields(body, self.verdict())
        self.has_begun = True
        self.client.start(status, [*headers, ("content-length", str(len(body)))])
        self.client.end(body)
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._set_done()

    def _as_first(self, data: bytes) -> bytes:
        """The events as if the first server had sent them."""
        if self._resumed and self._so_far is not None:
            return self._so_far.rewrite(data)
        return self._named(data)

    def _named(self, data: bytes) -> bytes:
        """The data with the id of the response that the client knows."""
        return data if self.tries <= 1 else data.replace(self.answer.encode(), self.ask.answer.encode())


def why_not_passed_on(replica: str, status: int, *, has_own_key: bool) -> tuple[str, str] | None:
    """Why a server's answer is not passed on, and the message that the client gets instead; None: it is passed on.
    has_own_key: the gateway's own key was in the request."""
    if status in REDIRECT_STATUSES:
        return f"replica {replica} answered {status}, a redirect", REDIRECT_MESSAGE
    if has_own_key and status in KEY_STATUSES:
        why = f"replica {replica} answered {status} to the gateway's own key"
        log.error("%s: see `key_env` of its server", why)
        return why, KEY_REFUSED_MESSAGE
    return None


def _status_of(error: bytes) -> int:
    """The HTTP status of an error inside a stream: vLLM's `code`."""
    fields = loads(error)
    found = fields.get("error") if isinstance(fields, dict) else None
    status = found.get("code") if isinstance(found, dict) else None
    return status if type(status) is int and 400 <= status < 600 else 500


async def _tokenized(upstream: Upstream, text: str, headers: Headers) -> tuple[int, ...]:
    """The tokens of a text, from the server's /tokenize; empty if it has none. A chunk may have brought several tokens.
    Raises UpstreamError."""
    asked = orjson.dumps({"prompt": text, "add_special_tokens": False})
    reply = await upstream.open("POST", "/tokenize", headers, asked, seconds=TOKENIZE_S)
    raw = await read_all(reply)
    try:
        return tuple(map(int, orjson.loads(raw)["tokens"])) if reply.status == 200 else ()
    except (ValueError, KeyError, TypeError):
        return ()


def name_of_try(id: str, tries: int) -> str:
    """The name of a request in a server's reports, or of its response, in try number `tries`."""
    return id if tries <= 1 else f"{id}-t{tries}"
