"""A client of an ASGI server as a relay writes to it: from callbacks, and by the connection itself where it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Message, Scope, Send

from rubato.fleet.relay import Flow
from rubato.fleet.upstream import Headers

WRITER = "rubato.writer"  # the key in an ASGI scope's `extensions` of what writes parts of a body at once
HEAD_AT = "rubato.head_at"  # and of when the request's head had come in, by the wall clock
MAX_QUEUED_BYTES = 256 << 10  # of parts that an ASGI server has not taken, before no more is read for them

Head = Callable[[Headers], list[tuple[bytes, bytes]]]


class Writer(Protocol):
    """The connection, for the middle of a body that has begun. flow: told when the client takes nothing."""

    flow: Flow | None

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...


def written_by(scope: Scope) -> Writer | None:
    """What writes to the connection of a request; None where its server has no such thing."""
    writer: Writer | None = (scope.get("extensions") or {}).get(WRITER)
    return writer


class AsgiClient:
    """A `relay.Client`. `run` sends what is written, until the response has ended.

    Args:
        head: a server's headers as the client gets them.
    """

    def __init__(self, scope: Scope, send: Send, head: Head) -> None:
        self._send, self._head = send, head
        self._extension = written_by(scope)
        self.direct: Writer | None = None  # once all that came before has been sent
        self._queue: list[Message] = []
        self._queued = 0  # bytes
        self._paused = False
        self._news = asyncio.Event()
        self._flow: Flow | None = None
        self.ended = False

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
        """A whole response that is no server's."""
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
        self.ended = True
        self._put({"type": "http.response.body", "body": data, "more_body": False})

    def _put(self, message: Message, size: int = 0) -> None:
        self._queue.append(message)
        self._queued += size
        if self._queued > MAX_QUEUED_BYTES and self._flow is not None and not self._paused:
            self._paused = True
            self._flow.pause()
        self._news.set()

    async def run(self) -> None:
        last: dict[str, Any] = {}
        while last.get("more_body", True):
            await self._news.wait()
            self._news.clear()
            while self._queue:
                queue, self._queue, self._queued = self._queue, [], 0
                for message in queue:
                    await self._send(message)
                    last = dict(message)
            if self._paused:
                self._paused = False
                if self._flow is not None:
                    self._flow.resume()
            if last and not self.ended and self._extension is not None:
                self.direct = self._extension
                self.direct.flow = self._flow
