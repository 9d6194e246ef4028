"""The client end of a relay in an ASGI app: written to from callbacks, past ASGI where the server allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from rubato.fleet.relay import Flow
from rubato.fleet.upstream import Headers

WRITER_KEY = "rubato.writer"  # key in an ASGI scope's `extensions`: a `Writer`
HEAD_TIME_KEY = "rubato.head_at"  # key in `extensions`: when the request's head was received, WallClock seconds
MAX_QUEUED_BYTES = 256 << 10  # of parts not yet sent; beyond it the upstream is paused

Head = Callable[[Headers], list[tuple[bytes, bytes]]]


class Writer:
    """Writes parts of a body that has begun straight to the connection, past ASGI.

    Args:
        transport: of the connection.
        cycle: uvicorn's of the request.
    """

    __slots__ = ("_cycle", "_is_chunked", "_transport", "flow", "is_open")

    def __init__(self, transport: asyncio.Transport, cycle: Any) -> None:
        self._transport, self._cycle = transport, cycle
        self._is_chunked: bool | None = None
        self.is_open = True  # until the connection is lost
        self.flow: Flow | None = None  # paused while the client reads nothing

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            self._is_chunked = self._cycle.chunked_encoding
        if data and self.is_open:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def abort(self) -> None:
        self._transport.abort()


def writer_of(scope: Scope) -> Writer | None:
    """Returns the writer of a request's connection; None where the ASGI server has none."""
    writer: Writer | None = (scope.get("extensions") or {}).get(WRITER_KEY)
    return writer


async def watch_departure(receive: Receive, on_departure: Callable[[], object]) -> None:
    """Calls `on_departure` in the same turn of the loop in which the client's departure becomes known."""
    while (await receive())["type"] != "http.disconnect":
        pass
    on_departure()


class AsgiClient:
    """Queues the messages of a response, as a `relay.Client`; `run` sends them until the response has ended.

    Args:
        head: turns a server's headers into those for the client.
    """

    def __init__(self, scope: Scope, send: Send, head: Head) -> None:
        self._send, self._head = send, head
        self._extension = writer_of(scope)
        self.direct: Writer | None = None  # set once all earlier messages are sent
        self._queue: list[Message] = []
        self._queued_bytes = 0  # bytes
        self._paused = False
        self._has_messages = asyncio.Event()
        self._flow: Flow | None = None
        self.has_ended = False

    @property
    def flow(self) -> Flow | None:
        return self._flow

    @flow.setter
    def flow(self, flow: Flow | None) -> None:
        self._flow = flow
        if self.direct is not None:
            self.direct.flow = flow

    def start(self, status: int, headers: Headers) -> None:
        self._put({"type": "http.response.start", "status": status, "headers": self._head(headers)})

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Writes a whole response of our own."""
        self._put({"type": "http.response.start", "status": status, "headers": headers})
        self.end(body)

    def write(self, data: bytes) -> None:
        if self.direct is not None:
            self.direct.write(data)
        else:
            self._put({"type": "http.response.body", "body": data, "more_body": True}, len(data))

    def end(self, data: bytes = b"") -> None:
        if self.direct is not None:
            self.direct.flow = None
            self.direct = None
        self.has_ended = True
        self._put({"type": "http.response.body", "body": data, "more_body": False})

    def _put(self, message: Message, size: int = 0) -> None:
        self._queue.append(message)
        self._queued_bytes += size
        if self._queued_bytes > MAX_QUEUED_BYTES and self._flow is not None and not self._paused:
            self._paused = True
            self._flow.pause()
        self._has_messages.set()

    async def run(self) -> None:
        last: dict[str, Any] = {}
        while last.get("more_body", True):
            await self._has_messages.wait()
            self._has_messages.clear()
            while self._queue:
                queue, self._queue, self._queued_bytes = self._queue, [], 0
                for message in queue:
                    await self._send(message)
                    last = dict(message)
            if self._paused:
                self._paused = False
                if self._flow is not None:
                    self._flow.resume()
            if last and not self.has_ended and self._extension is not None:
                self.direct = self._extension
                self.direct.flow = self._flow
