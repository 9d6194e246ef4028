"""What one connection may take: bytes and seconds of a head, seconds of a body and of reading its answers; and the HTTP
that uvicorn answers wrongly: offers to upgrade, and HTTP/1.0.

uvicorn waits for ever for a client that does not read its answer or does not finish its request, keeps a head of any
length, and reads on after an answer that did not wait for the body. Here the write buffer is bounded by what the kernel
holds (`SEND_BUFFER`) and one piece more, and a client that takes nothing for `stall_seconds` is aborted: its request
ends as cancelled. A head has `stall_seconds` and MOST_HEAD bytes, a body comes at LEAST_RATE. After an answer to half a
request the connection is closed, but not before its client had time to read it.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import sys
from collections import deque
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rubato.core.clock import WallClock
from rubato.fleet.relay import Flow
from rubato.frontdoor.errors import ApiError
from rubato.serving.asgi_client import HEAD_AT, WRITER
from rubato.serving.connections import Connections, Owed

SEND_BUFFER = 128 << 10  # bytes of a socket's send buffer; Linux would let it grow to megabytes a connection
CHECKS = 4  # looks per stall_seconds
BYTES_ACKED = 120  # offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)
MOST_HEAD = 64 << 10  # bytes of a request line with its headers; of a chunk's extensions; of trailers
PIECE = 4096  # bytes given to the parser at a time, and by how much a head may exceed MOST_HEAD unseen
# Bytes of a body per second, in each stretch of stall_seconds (or up to a quarter longer, the time between two looks).
# The slowest mobile networks bring more; max_body_bytes over it bounds how long a descriptor is held (4 MiB: 85 min).
LEAST_RATE = 1024
# Bytes read and dropped after an answer that did not wait for the body. Closing while they come would reset the
# connection, and many clients look for the answer only when all is sent: these are four of the largest by default.
LINGER_BYTES = 16 << 20

log = logging.getLogger(__name__)


def stall_guard(stall_seconds: float, connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with these limits."""

    class Limited(_StallGuard):
        stall = stall_seconds
        open_connections = connections

    return Limited


class _StallGuard(HttpToolsProtocol):
    stall: float
    open_connections: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The next piece is asked for only when the last one is gone, so that what is left shrinks or is stuck. Over TLS
        # there may be something already, and writing is paused at once.
        transport.set_write_buffer_limits(high=1, low=0)
        self._socket = transport.get_extra_info("socket")
        self._descriptor = self._socket.fileno()
        self._silent = True  # no byte has come
        self._part: Owed | None = None  # what is coming in; None: nothing, between two requests
        self._unmarked = 0  # bytes since the parser last got to a body, or to the end of a head, a chunk or a request
        self._dropped: int | None = None  # bytes, of a request that is not read any more
        self._unread = 0  # looks at which no answer was taken: seconds may have passed while the loop was busy
        self._left = (0, 0)
        self._closing = _Closing(self)
        self._writer: _BodyWriter | None = None
        self._window: deque[int] = deque(maxlen=CHECKS + 1)  # body bytes at the last looks: over stall_seconds at least
        self._begin("head")
        self._check = self.loop.call_later(self.stall / CHECKS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        if self._writer is not None:
            self._writer.is_open = False
        self.open_connections.gone(self._descriptor)
        super().connection_lost(exc)

    # ------------------------------------------------------------------- what comes in

    def data_received(self, data: bytes) -> None:
        self._silent = False
        if self._dropped is not None:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.close()
            return
        if self._part is None:
            self._begin("head")
        view = memoryview(data)
        for at in range(0, len(data), PIECE):
            piece = view[at : at + PIECE]
            self._marked = False
            self._parse(piece)
            if self._dropped is not None or self.transport.is_closing():
                return
            self._unmarked = 0 if self._marked else self._unmarked + len(piece)
            if self._unmarked > MOST_HEAD:
                what = "The request line with all headers, a chunk's extensions, or the trailers"
                self._refuse(431, f"{what} are longer than {MOST_HEAD} bytes.", "headers_too_large")
                return

    def _parse(self, data: memoryview) -> None:
        """Feed the parser. At an offer to upgrade (h2c, websocket) it stops and drops the body; a server may ignore the
        offer (RFC 9110, 7.8), so the request is parsed again without it."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as stop:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT is for proxies, and this is none.")
                return
            head = self._head_without_offer()
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own parser
            self._parse(memoryview(head + data[stop.args[0] :]))
        except HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._part is None:
            self._begin("head")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops here
        self._begin("body")
        cast(Any, self.scope)["extensions"] = {HEAD_AT: WallClock().now()}
        super().on_headers_complete()
        self.cycle.transport = self._closing  # type: ignore[assignment]
        if self.scope["http_version"] != "1.1":
            self.cycle.keep_alive = False
            self.cycle.waiting_for_100_continue = False  # an older client takes a 100 for the answer
        self._tell()

    def on_chunk_header(self) -> None:
        self._marked = True

    def on_body(self, body: bytes) -> None:
        self._marked = True
        self._came += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._marked = True
        self._part = None
        super().on_message_complete()
        self._tell()

    def _begin(self, part: Owed) -> None:
        self._marked = True
        self._part = part
        self._looks = 0
        self._came = 0  # bytes of a body, since the last look
        self._window.clear()

    # ------------------------------------------------------------------- what goes out

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writer is not None and self._writer.flow is not None:
            self._writer.flow.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writer is not None and self._writer.flow is not None:
            self._writer.flow.resume()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._writer = _BodyWriter(self.transport, cycle)
        cycle.scope.setdefault("extensions", {})[WRITER] = self._writer

        async def closing(scope: Any, receive: Any, send: Any) -> None:
            has_length = False

            async def sent(message: Any) -> None:
                nonlocal has_length
                if cycle.more_body and not cycle.response_started:
                    cycle.keep_alive = False  # answered before all of it was read: what is left is no request
                if scope["http_version"] != "1.1":  # no chunks: an answer without a length ends with the connection
                    if message["type"] == "http.response.start":
                        has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                    if not has_length:
                        cycle.chunked_encoding = False
                        cycle.expected_content_length = len(message.get("body", b""))  # else uvicorn checks it
                await send(message)

            await app(scope, receive, sent)

        super()._start_asgi_task(cycle, closing)

    def on_response_complete(self) -> None:
        if self._dropped is None:
            super().on_response_complete()
            self._tell()
        else:
            self.server_state.total_requests += 1

    def timeout_keep_alive_handler(self) -> None:
        # After a process was stopped, its timers are due though requests came meanwhile, in time.
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        if not waiting.poll(0):
            super().timeout_keep_alive_handler()

    def close_when_read(self) -> None:
        """Close; where half a request is unread, only once the client has had time to read what was written."""
        if self._part == "body" and self._dropped is None and not self.transport.is_closing():
            self._linger()
        elif self._dropped is None:
            self.transport.close()

    def is_closing(self) -> bool:
        return self._dropped is not None or self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer the request that is coming in, whose rest is not read, and close."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or not cycle.more_body or cycle.response_started:
                self.transport.abort()  # another answer, or this one, is on its way
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = ApiError(status, message, code=code).body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[status] + lines + b"\r\n" + body)
        if status == 408:
            self.transport.close()  # it had its time
        else:
            self._linger()

    def _linger(self) -> None:
        """Close when the client has, when it has sent LINGER_BYTES more, or after stall_seconds."""
        self._dropped = 0
        self._looks = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._tell()

    # ------------------------------------------------------------------- whose turn it is

    def _turn(self) -> Owed | None:
        """What the client is to send; None: it is the server's turn."""
        cycle: Any = self.cycle
        if self._dropped is not None or cycle is None:
            return "head"
        if self.pipeline:
            return None
        if cycle.response_complete:
            return "head"
        return "body" if cycle.more_body else None

    def _tell(self) -> None:
        self.open_connections.owes(self._descriptor, self._turn())

    def _look(self) -> None:
        left = (self.transport.get_write_buffer_size(), self._acknowledged())
        self._unread = self._unread + 1 if left == self._left and left[0] > 0 else 0
        self._left = left
        if self._unread >= CHECKS:
            log.info("a client took nothing for %.1f s: cut off", self.stall)
            self.transport.abort()
            return
        self._check = self.loop.call_later(self.stall / CHECKS, self._look)
        if self.transport.is_closing() or self.flow.read_paused or not self._late():
            return
        log.info("a client's %s took too long: cut off", self._part or "end")
        if self._dropped is not None or self._silent:
            self.transport.close()
        else:
            of = f"the headers within {self.stall:g} s" if self._part == "head" else f"{LEAST_RATE} bytes per second"
            self._refuse(408, f"The request came too slowly: send {of}.", "request_timeout")

    def _late(self) -> bool:
        """Whether the client had its time, as of this look."""
        if self._dropped is None and (self._part is None or self._turn() != self._part):
            return False  # between two requests uvicorn's own timer runs
        self._looks += 1
        if self._dropped is not None or self._part == "head":
            return self._looks > CHECKS
        self._window.append(self._came)
        self._came = 0
        return len(self._window) > CHECKS and sum(self._window) < LEAST_RATE * self.stall

    def _acknowledged(self) -> int:
        """Bytes that the client's kernel has taken, ever. Linux lets us write again only when a third of the buffer
        is free, long after a slow reader took something. Elsewhere 0: then only what is written is seen."""
        if not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
            return 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 8)
        except OSError:  # it is being closed
            return 0
        return int.from_bytes(info[BYTES_ACKED:], sys.byteorder)


class _BodyWriter:
    """Writes parts of a body that has begun, past ASGI (`asgi_client.Writer`): from callbacks, and at once."""

    __slots__ = ("_cycle", "_is_chunked", "_transport", "flow", "is_open")

    def __init__(self, transport: asyncio.Transport, cycle: Any) -> None:
        self._transport, self._cycle = transport, cycle
        self._is_chunked: bool | None = None
        self.is_open = True  # the connection is there
        self.flow: Flow | None = None

    def write(self, data: bytes) -> None:
        if self._is_chunked is None:
            self._is_chunked = self._cycle.chunked_encoding
        if data and self.is_open:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def abort(self) -> None:
        self._transport.abort()


class _Closing:
    """The transport as a request's cycle sees it: `close` gives its client the time to read the answer."""

    def __init__(self, connection: _StallGuard) -> None:
        self.write = connection.transport.write
        self.close = connection.close_when_read
        self.is_closing = connection.is_closing
