"""Passes on vLLM's response to one API request, with the tier served and the verdict, or a 429 in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from rubato.core.events import Finished
from rubato.core.request import Request
from rubato.frontdoor import verdict
from rubato.frontdoor.admission import AdmittedRequest, FrontDoor
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.paths import CHAT, TEXT
from rubato.serving.sse import forbid_buffering
from rubato.wire.response_stream import ResponseStream, usage_of, with_fields

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Paths whose responses have OpenAI's form of chunks.
CHUNKED_PATHS = frozenset({CHAT, TEXT})
KEEPALIVE_PREFIX = b":"  # of comments by which vLLM keeps an idle stream open
# Events of /v1/responses that vLLM sends before it makes its request.
EVENTS_BEFORE_REQUEST = (b"event: response.created\n", b"event: response.in_progress\n")


@dataclass(slots=True)
class ServedRequest:
    """Follows one API request at the engines.

    Args:
        background: its response does not wait for its requests.
        ticket: names it in the engines' reports.
        requests: vLLM's, one for each choice, by id.
        ends: of those that have ended.
        has_tokens: whether any of them has a token.
        is_served: vLLM answered 200.
        is_answered: its response has ended, or its client left.
        usage: tokens of prompt and output by vLLM's response.
        settled_tokens: tokens of prompt and output that the door knows.
    """

    admitted: AdmittedRequest
    background: bool
    ticket: str = field(default_factory=lambda: uuid4().hex)
    requests: dict[str, Request] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)
    has_tokens: bool = False
    is_served: bool = False
    is_answered: bool = False
    usage: tuple[int, int] = (0, 0)
    settled_tokens: tuple[int, int] = (0, 0)

    @property
    def is_over(self) -> bool:
        return bool(self.requests) and len(self.ends) == len(self.requests)


class Front(Protocol):
    """Offers what a response needs of `vllm_middleware.FrontEnd`."""

    door: FrontDoor

    async def refusal(self, call: ServedRequest) -> ApiError | None: ...
    async def ends(self, call: ServedRequest) -> tuple[list[Request], list[Finished]]: ...
    def error_app(self, error: ApiError, call: ServedRequest) -> App: ...


class SloResponse:
    """Passes on vLLM's response, with the tier served and the verdict added, or a 429 in its place."""

    def __init__(self, front: Front, call: ServedRequest, scope: Scope, send: Send) -> None:
        self._front, self._call, self._scope, self._send = front, call, scope, send
        self._start: Message | None = None  # held back until the response may begin
        self._held_messages: list[Message] = []  # held back with it: parts from before vLLM made its request
        self._stream = False
        self._body: bytearray | None = None  # so far, of a response that is changed at its end
        admitted = call.admitted
        self._reader = ResponseStream(admitted.prompts * admitted.n)

    async def send(self, message: Message) -> None:
        """Passes one message on. The head is held back until it is known whether a 429 takes its place; a JSON body is
        collected to its end, a stream of chunks goes on chunk by chunk, all else as it comes."""
        if message["type"] == "http.response.start":
            self._start = message
            self._call.is_served = message["status"] == 200
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._stream = any(b"text/event-stream" in value for value in types)
            if not self._stream and any(b"json" in value for value in types):
                self._body = bytearray()
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._body is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_body(bytes(self._body))
        elif self._stream and self._call.admitted.path in CHUNKED_PATHS:
            await self._send_chunk(message)
        elif (
            self._start is not None
            and not self._call.background
            and message.get("body", b"").startswith(EVENTS_BEFORE_REQUEST)
        ):
            self._held_messages.append(message)
        elif not await self.is_refused(message.get("body", b"")):
            await self._begin()
            await self._send(message)

    async def is_refused(self, part: bytes = b"") -> bool:
        """Sends a 429 in place of `part`, the response's next, if the request was refused. Returns whether it was."""
        if self._start is None or (part.startswith(KEEPALIVE_PREFIX) and self._stream):
            return False
        if (error := await self._front.refusal(self._call)) is None:
            return False
        self._body = bytearray()  # `send` collects later parts here, and `_send_body` drops them: the head is gone
        await self._send_error(error)
        return True

    async def _begin(self) -> None:
        """Sends the head, once."""
        if self._start is not None:
            start, self._start = self._start, None
            more = self._front.door.response_headers(self._call.admitted)
            await self._send({**start, "headers": [*forbid_buffering(start["headers"]), *more]})
            for held_message in self._held_messages:
                await self._send(held_message)

    async def _send_body(self, raw: bytes) -> None:
        """Sends a whole response, with the verdict, or a 429 in place of an error that is a refusal."""
        if self._start is None:
            return  # it was replaced
        status = self._start["status"]
        if (status >= 500 or (status == 200 and self._call.background)) and await self.is_refused():
            return
        has_verdict = status == 200 and not self._call.background
        requests, ends = await self._front.ends(self._call) if has_verdict else ([], [])
        self._call.usage = usage_of(raw)
        if status == 200 and ends:
            raw = with_fields(raw, verdict.verdict_fields(requests, ends))
        other_headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        self._start = {**self._start, "headers": [*other_headers, (b"content-length", b"%d" % len(raw))]}
        await self._begin()
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def _send_chunk(self, message: Message) -> None:
        """Sends part of a stream. vLLM sends a chunk at a time; the last one before the end gets the verdict."""
        part, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            if await self.is_refused(part):
                return
            await self._begin()
        reader = self._reader
        passed, _ = reader.feed(part)
        if reader.has_ended or not more:
            self._call.usage = reader.usage
            passed += reader.finish(verdict.verdict_fields(*await self._front.ends(self._call)))
        await self._send({**message, "body": passed})

    async def _send_error(self, error: ApiError) -> None:
        self._start = None
        await self._front.error_app(error, self._call)(self._scope, _disconnected, self._send)


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}
