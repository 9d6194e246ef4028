"""An HTTP/1.1 client whose responses come in callbacks: a relay passes each part on without waking a task.

aiohttp, which the rest of the project uses, wakes one for each part: half of what a gateway's stream then costs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from rubato.core.server_url import connection_failure
from rubato.fleet.upstream import MAX_SILENCE_S, BrokenError, Headers, Reply, UnreachableError, UpstreamError

KEEP_ALIVE_S = 4.0  # of an idle connection: below the 5 s after which uvicorn, vLLM's server, closes it
CONNECT_S = 5.0  # for a connection; a machine that is gone answers nothing, one that is busy does so late
MAX_HEAD_BYTES = 64 << 10  # of a response, and of what comes of a body between two of its parts
MAX_BUFFERED_BYTES = 256 << 10  # of a body that nobody takes, before the connection is read no more
READ_BYTES = 64 << 10  # at a time; asyncio makes room for 256 KiB at each read else, which takes longer than the read
PORTS = {"http": 80, "https": 443}
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})


class HttpServer:
    """Connects to a server by its base URL (`Upstream`), which may have a path. It is opened on the running event
    loop."""

    def __init__(self, url: str) -> None:
        self._idle: deque[_Connection] = deque()  # the one that was used last is the last
        self._open: set[_Connection] = set()
        self._buffer = memoryview(bytearray(READ_BYTES))  # of all connections: what is in it is parsed at once
        self.set_url(url)

    def set_url(self, url: str) -> None:
        """Sets the base URL: nobody knows that of a server that is yet to start."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._port = parts.port or PORTS.get(parts.scheme, 0)
        self._netloc = parts.netloc
        self._base = parts.path
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None,
        is_working: Callable[[], bool] = lambda: False,
    ) -> Reply:  # fmt: skip
        raw = self._head(method, path, headers, len(body)) + body
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    connection = self._idle_connection()
                    is_new = connection is None
                    if connection is None:
                        try:
                            connection = await self._connect()
                        except (OSError, TimeoutError) as error:
                            raise UnreachableError(connection_failure(error)) from error
                    try:
                        reply = await connection.send(raw, method == "HEAD", deadline, is_working)
                        break
                    except _ClosedError as error:  # while it was idle, maybe: a request is then sent once more
                        if is_new or method not in IDEMPOTENT:
                            raise BrokenError(str(error)) from None
        except TimeoutError as error:
            raise UpstreamError(connection_failure(error)) from error
        return reply

    def _head(self, method: str, path: str, headers: Headers, size: int) -> bytes:
        """Returns the head of a request. Raises UpstreamError for a header with a line break, which would be
        several."""
        lines = [f"{method} {self._base}{path} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if size or method not in ("GET", "HEAD"):
            lines.append(f"content-length: {size}")
        text = "\r\n".join([*lines, "\r\n"])
        if text.count("\n") != len(lines) + 1 or text.count("\r") != len(lines) + 1 or "\0" in text:
            raise UpstreamError("a header has a line break")
        return text.encode("latin-1", "replace")

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._idle, self._open, self._buffer), self._host, self._port, ssl=self._ssl
            )
        return connection

    def _idle_connection(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < KEEP_ALIVE_S and not connection.transport.is_closing():
                return connection
            connection.abort()
        return None

    async def close(self) -> None:
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # the transports close on the next turn

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class _ClosedError(Exception):
    """The connection was closed before a byte of a response came."""


class _Connection(asyncio.BufferedProtocol):
    """One connection, with one response at a time."""

    __slots__ = ("_buffer", "_idle", "_in_head", "_open", "_parser", "_reply", "idle_since", "transport")
    transport: asyncio.Transport

    def __init__(self, idle: deque[_Connection], open_: set[_Connection], buffer: memoryview) -> None:
        self._idle, self._open, self._buffer = idle, open_, buffer
        self._reply: _Reply | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._open.add(self)

    async def send(
        self, raw: bytes, has_no_body: bool, deadline: float | None, is_working: Callable[[], bool]
    ) -> _Reply:  # fmt: skip
        """Sends a request, and returns the response once its head is there.

        Args:
            raw: head and body of the request.
            has_no_body: the response has none, whatever its head says, as one to HEAD.
            deadline: time of the event loop at which the exchange fails (s); None: never.
            is_working: as in `Upstream.open`.

        Raises:
            UpstreamError: the exchange failed.
            _ClosedError: the connection was closed before a byte came.
        """
        self._reply = reply = _Reply(self, has_no_body, deadline, is_working)
        self._parser = HttpResponseParser(reply)
        self._in_head = 0
        self.transport.write(raw)
        try:
            await reply.head_ready
        except BaseException:
            self.abort()
            raise
        return reply

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        reply = self._reply
        if reply is None or reply.is_complete:
            self.abort()  # no request is open
            return
        reply.note_activity()
        try:
            self._parser.feed_data(self._buffer[:size])
        except (HttpParserError, HttpParserUpgrade):
            reply.fail(UpstreamError("the server's answer is no HTTP"))
        if reply.has_body_part:
            self._in_head = 0
            reply.has_body_part = False
        else:
            self._in_head += size
            if self._in_head > MAX_HEAD_BYTES:
                reply.fail(UpstreamError("the head of the server's answer is too long"))

    def eof_received(self) -> None:
        """Lets the transport close."""

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        if self._reply is None:
            if self in self._idle:
                self._idle.remove(self)
        elif not self._reply.is_complete:
            self._reply.lose(error)

    def response_complete(self, keep_alive: bool) -> None:
        """Ends the exchange, and returns the connection to the pool if it may carry another."""
        if keep_alive and not self.transport.is_closing():
            self.transport.resume_reading()
            self._reply = None
            self.idle_since = asyncio.get_running_loop().time()
            self._idle.append(self)
        else:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()


class _Reply:
    """A response (`upstream.Reply`), and what its parser calls."""

    __slots__ = (
        "_active_at", "_buffered", "_connection", "_error", "_has_no_body", "_is_framed", "_is_paused", "_is_working",
        "_loop", "_news", "_parts", "_silence_timer", "_sink", "_timer", "has_body_part", "head_ready", "headers",
        "is_complete", "status",
    )  # fmt: skip

    def __init__(
        self, connection: _Connection, has_no_body: bool, deadline: float | None, is_working: Callable[[], bool]
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.head_ready: asyncio.Future[None] = loop.create_future()
        self.is_complete = False
        self.has_body_part = False
        self._connection = connection
        self._has_no_body = has_no_body
        self._is_framed = False  # its head says where the body ends
        self._sink: Callable[[bytes], None] | None = None
        self._parts: deque[bytes] = deque()
        self._buffered = 0
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None
        self._timer = None if deadline is None else loop.call_at(deadline, self._expire)
        self._loop, self._is_working = loop, is_working
        self._active_at = loop.time()
        self._is_paused = False
        self._silence_timer = loop.call_at(self._active_at + MAX_SILENCE_S, self._check_silence)

    # ----------------------------------------------------------------- for the reader

    async def part(self) -> bytes:
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            await self._wait()
        part = self._parts.popleft()
        self._buffered -= len(part)
        if self._buffered <= MAX_BUFFERED_BYTES:
            self.resume()
        return part

    async def pump(self, sink: Callable[[bytes], None]) -> None:
        while self._parts:
            sink(self._parts.popleft())
        self._buffered = 0
        self._sink = sink
        self.resume()
        while not self.is_complete and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        self._is_paused = True
        if not self.is_complete and not self._connection.transport.is_closing():
            self._connection.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.note_activity()  # no part could come meanwhile
        if not self.is_complete and not self._connection.transport.is_closing():
            self._connection.transport.resume_reading()

    def close(self) -> None:
        if not self.is_complete:
            self.fail(UpstreamError("it was given up"))

    async def _wait(self) -> None:
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    # ----------------------------------------------------------------- for the connection

    def fail(self, error: Exception) -> None:
        if self.is_complete or self._error is not None:
            return
        self._error = error
        self._stop_timers()
        if not self.head_ready.done():
            self.head_ready.set_exception(error)
        self._connection.abort()

    def lose(self, error: Exception | None) -> None:
        """Ends the response: the connection is gone. A body without a length is complete then."""
        why = "the server closed the connection" if error is None else connection_failure(error)
        if not self.head_ready.done():
            self.fail(_ClosedError(why))
        elif error is None and not self._is_framed:
            self._finish(keep_alive=False)
        else:
            self.fail(BrokenError(why))

    def note_activity(self) -> None:
        self._active_at = self._loop.time()

    def _check_silence(self) -> None:
        """Fails a response that is silent for too long. There is one timer for a response, whatever number of parts it
        has."""
        if self._is_paused or self._is_working():
            self.note_activity()
        if self._loop.time() < (at := self._active_at + MAX_SILENCE_S):
            self._silence_timer = self._loop.call_at(at, self._check_silence)
        else:
            self._expire()

    def _expire(self) -> None:
        self.fail(UpstreamError(connection_failure(TimeoutError())))

    def _stop_timers(self) -> None:
        self._silence_timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _finish(self, keep_alive: bool) -> None:
        if not self.is_complete and self._error is None:
            self.is_complete = True
            self._stop_timers()
            self._connection.response_complete(keep_alive)

    # ----------------------------------------------------------------- for the parser

    def on_message_begin(self) -> None:
        if self.is_complete:
            self._connection.abort()  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        parser = self._connection._parser
        status = parser.get_status_code()
        if status < 200:  # 100 Continue, and hints
            self.headers.clear()
            return
        self.status = status
        names = dict(self.headers)
        self._is_framed = "content-length" in names or "transfer-encoding" in names
        if not self.head_ready.done():
            self.head_ready.set_result(None)
        if self._has_no_body:
            self._finish(keep_alive=False)

    def on_body(self, data: bytes) -> None:
        self.has_body_part = True
        if self.is_complete:
            return
        if self._sink is not None:
            try:
                self._sink(data)
            except Exception as error:  # through the parser it would be another
                self.fail(error)
            return
        self._parts.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_BUFFERED_BYTES:
            self.pause()
        self._wake_reader()

    def on_message_complete(self) -> None:
        if self.status:
            self._finish(keep_alive=self._connection._parser.should_keep_alive())
