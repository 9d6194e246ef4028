"""One API request's trip through the gateway: placed at a server, streamed, placed again where that failed, ended.

The cluster places the requests; each placement is a `server_try.Try`. A `RelayTrip` carries the bytes itself; of a
`picked_trip.PickedTrip` Envoy does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from rubato.core.events import Event, Finished
from rubato.core.plan import KV
from rubato.core.request import Progress, Request
from rubato.fleet.disaggregation import decode_body, prefill_body
from rubato.fleet.event_bus import Listener, without_tokens
from rubato.fleet.resume import NotResumableError, StreamSoFar
from rubato.fleet.token_path import ByteWriter, TokenPath
from rubato.fleet.upstream import Headers, Reply, Upstream, read_all
from rubato.wire.response_stream import with_fields

log = logging.getLogger(__name__)

TOKENIZE_S = 5.0  # for an answer of /tokenize
UNKNOWN_FIELD_STATUSES = (400, 422)  # answers to a body with a field that the server does not know


class Flow(Protocol):
    """A source of bytes that can be paused."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Client(Protocol):
    """Receives a response: it gets each part at once, or as soon as the parts before have been sent.

    `flow` is paused while the client reads nothing.
    """

    flow: Flow | None

    @property
    def direct(self) -> ByteWriter | None:
        """A writer for parts of a body that has begun, once all parts before have been sent."""
        ...

    def start(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None: ...


class Carrier(Protocol):
    """A replica to which a trip sends its request (`server_replica.ServerReplica`)."""

    @property
    def id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def upstream(self) -> Upstream: ...
    @property
    def is_linked(self) -> bool: ...
    @property
    def has_link(self) -> bool: ...
    @property
    def can_continue(self) -> bool: ...
    def is_working_at(self, trip: Trip) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """Holds an API request as it is sent to a server.

    Args:
        target: its path, with the query.
        answer: id of the response that the client sees.
        choices: of one prompt.
        body: makes the body, given the id of the try's response, and whether only the response reports its tokens.
        with_usage: the client wants to see a stream's counts.
        resumes: the servers are known to continue each other's streams, as vLLM does.
        model: must serve the request; "": any.
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
        self.streamed_before = 0  # tokens of a stream, without those of the current `path`
        self.path: TokenPath | None = None  # of the tokens of the try that counts
        self.untimed: int | None = None  # tokens of a response that came as a whole
        self.is_over = False  # the client has received the whole response
        self.break_reason = ""  # why no more of the response will come
        self.failed_end: Finished | None = None  # the first end that is no completion
        self.settlement = asyncio.Event()  # set once it is over, broken off or failed
        self.news = asyncio.Event()  # a request of it has ended at its server
        self._task: asyncio.Task[None] | None = None  # the try that counts
        self._ends: dict[str, Finished] = {}

    @property
    def choices(self) -> int:
        return self.ask.choices

    @property
    def streamed(self) -> int:
        """Tokens that have come in the stream."""
        return self.streamed_before + (0 if self.path is None else self.path.passed_tokens)

    def _settle(self) -> None:
        self.settlement.set()
        self._close_path()

    def _close_path(self) -> None:
        """Ends the direct path of tokens: the trip has changed."""
        if self.path is not None:
            self.streamed_before = self.streamed
            self.path.writer = None
            self.path = None

    def untimed_tokens(self, id: str) -> int | None:
        """Returns the output tokens of a request whose times are not known; None if they are known."""
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
        """Takes an event of one of its requests."""
        if type(event) is Finished:
            self._ends[event.id] = event
            if event.outcome != "completed" and self.failed_end is None:
                self.failed_end = event
                self._settle()

    def start_try(self, run: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a try at the replica where the cluster has placed it."""
        self._close_path()
        self.news.clear()
        self._task = asyncio.ensure_future(run)
        return self._task

    def is_current(self, task: asyncio.Task[None] | None) -> bool:
        """Returns whether this task runs the try that counts."""
        return self._task is task

    def leave(self, task: asyncio.Task[None]) -> None:
        """Drops a try: the server ends its requests."""
        if self.is_current(task):
            self._task = None
            self._close_path()
        if task is not asyncio.current_task():
            task.cancel()

    def break_off(self, why: str) -> None:
        """Breaks the response off, after the end of its requests."""
        if not self.is_over:
            self.break_reason = self.break_reason or why
            self._settle()

    def why_not_resumable(self, progress: Progress | None) -> str | None:
        """Returns why the response cannot continue elsewhere; None if it can, or has not begun."""
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

    def client_progress(self, request: Request, now: float) -> Request:
        """Returns the request with the output that its client has received, not the output that the engine has
        reported."""
        count = self.streamed if self.has_begun else 0
        if request.progress is None and not count:
            return request
        before = request.progress or Progress((request.arrival,), ((),))
        times = before.times[0][:count]
        times += (now,) * (count - len(times))
        ids = before.token_ids[:count]
        progress = replace(before, times=(times,), token_ids=ids if len(ids) == count else ())
        return replace(request, progress=progress if count or before.demoted or before.delays else None)

    # ----------------------------------------------------------------- of each kind of trip

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        """Returns headers and body for a server.

        Args:
            progress: the output so far, of a response that has begun.
            ids: token ids of its text, empty if no server knows them; None: they will be asked for.

        Raises:
            NotResumableError: the response has begun, and cannot continue elsewhere.
        """
        raise NotImplementedError

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        """Sends the request to a replica, and returns the response.

        Args:
            kv: of the prompt, at another server.
            prefills: the server only prefills the prompt.

        Raises:
            UpstreamError: the server does not answer.
            NotResumableError: the response has begun, and the replica cannot continue it.
            DisaggregationUnsupportedError: the body cannot be prefilled at one server and decoded at another.
        """
        raise NotImplementedError

    def verdict(self) -> Mapping[str, Any]:
        """Returns fields that the response gets once all its requests have ended."""
        return {}

    def keeper(self) -> Callable[[bytes], None] | None:
        """Returns the function that keeps events sent to the client; None: nothing keeps them."""
        return None

    def write(self, data: bytes) -> None:
        """Writes whole events to the client."""

    def finish(self, data: bytes) -> None:
        """Ends a stream with these bytes."""

    def answer_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answers with a response that does not stream, or with the client's own error."""


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
        output_ids = ids or (progress.token_ids if len(progress.token_ids) == received else ())
        received = max(received, len(output_ids))  # some chunk may have brought several tokens, and some text be fewer
        body = self._so_far.body(raw, received, output_ids, unasked=ids is None)
        self._so_far.received = received
        return headers, body

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        self._is_counted = not (replica.is_linked or prefills or kv is not None)
        self._slo_headers = () if replica.has_link else self.ask.slo_headers
        if self.has_begun and not replica.can_continue:
            raise NotResumableError(f"replica {replica.id} is not known to continue what another has begun")
        reply = await self._ask(replica, request, kv, prefills)
        if reply.status in UNKNOWN_FIELD_STATUSES and self._is_counted and self._adds_fields():
            reply.close()  # it may not know what was added: as the client asks, it may answer
            self._is_counted = False
            reply = await self._ask(replica, request, kv, prefills)
        return reply

    def _adds_fields(self) -> bool:
        """Returns whether the body changes if only the response reports tokens."""
        return self.ask.body(self.answer, True) != self.ask.body(self.answer, False)

    async def _ask(self, replica: Carrier, request: Request, kv: KV | None, prefills: bool) -> Reply:
        headers, body = self.build_request(request.progress)
        if self.has_begun and self._so_far is not None:
            ids = await _tokenized(replica.upstream, self._so_far.text(), headers)
            headers, body = self.build_request(request.progress, ids)
        if kv is not None:
            body = decode_body(body, kv)
        elif prefills:
            body = prefill_body(self.ask.path, len(self.ids), body)
        return await replica.upstream.open(
            "POST", self.ask.target, headers, body, is_working=lambda: replica.is_working_at(self)
        )

    def verdict(self) -> Mapping[str, Any]:
        ends = [self._ends[id] for id in self.ids if id in self._ends]
        return self._about(ends if len(ends) == len(self.ids) else ())

    def keeper(self) -> Callable[[bytes], None] | None:
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
        self._settle()

    def _as_first(self, data: bytes) -> bytes:
        """Returns the events as if the first server had sent them."""
        if self._resumed and self._so_far is not None:
            return self._so_far.rewrite(data)
        return self._named(data)

    def _named(self, data: bytes) -> bytes:
        """Returns the data with the id of the response that the client knows."""
        return data if self.tries <= 1 else data.replace(self.answer.encode(), self.ask.answer.encode())


async def _tokenized(upstream: Upstream, text: str, headers: Headers) -> tuple[int, ...]:
    """Returns the token ids of a text, from the server's /tokenize; empty if the server has none. (A chunk may have
    brought several tokens, so chunks do not tell.) Raises UpstreamError."""
    question = orjson.dumps({"prompt": text, "add_special_tokens": False})
    reply = await upstream.open("POST", "/tokenize", headers, question, seconds=TOKENIZE_S)
    raw = await read_all(reply)
    try:
        return tuple(map(int, orjson.loads(raw)["tokens"])) if reply.status == 200 else ()
    except (ValueError, KeyError, TypeError):
        return ()


Trips = dict[str, Trip]  # by the id of each of its requests


def name_of_try(id: str, tries: int) -> str:
    """Returns the name of a request in a server's reports, or of its response, in try number `tries`."""
    return id if tries <= 1 else f"{id}-t{tries}"
