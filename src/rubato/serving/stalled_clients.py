"""Limits what one connection may take, and corrects two answers of uvicorn: to offers to upgrade, and to HTTP/1.0.

Of uvicorn's limits two are used: `timeout_keep_alive` closes a connection that sends nothing after an answer, and
`timeout_graceful_shutdown` ends the last answers. The others do not keep what docs/security.md states. uvicorn waits
for ever for a client that does not read its answer or has begun a request, and reads on after an answer that did not
wait for the body. `h11_max_incomplete_event_size` bounds heads, but only with h11, which took 334 us of CPU where
httptools took 66 us (a request answered in 64 chunks); `limit_concurrency` is no bound of connections (`connections`).

Here the write buffer is bounded by the kernel's (`SEND_BUFFER_BYTES`) and one piece more, and a client that reads
nothing for `stall_seconds` is cut off: its request ends as cancelled. A head may take `stall_seconds` and
MAX_HEAD_BYTES, a body must come at MIN_BODY_RATE. After an answer to half a request the connection is closed once its
client had time to read the answer.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rubato.core.clock import WallClock
from rubato.frontdoor.errors import ApiError
from rubato.serving.asgi_client import HEAD_TIME_KEY, WRITER_KEY, Writer
from rubato.serving.connections import Connections, PendingInput

SEND_BUFFER_BYTES = 128 << 10  # of each socket; Linux would let it grow to megabytes
CHECKS_PER_STALL = 4  # checks per stall_seconds
TCPI_BYTES_ACKED_OFFSET = 120  # offset of tcpi_bytes_acked in struct tcp_info (linux/tcp.h)
MAX_HEAD_BYTES = 64 << 10  # of a request line with its headers; of a chunk's extensions; of trailers
PARSED_PIECE_BYTES = 4096  # given to the parser at a time; a head may exceed MAX_HEAD_BYTES by this much unnoticed
# Bytes of a body per second, in each stretch of stall_seconds (or up to a quarter longer, the time between two checks).
# The slowest mobile networks bring more; max_body_bytes over it bounds how long a descriptor is held (4 MiB: 85 min).
MIN_BODY_RATE = 1024
# Read and dropped after an answer that did not wait for the body. Closing while bytes come would reset the
# connection, and many clients look for the answer only when all is sent: these are four of the largest by default.
LINGER_BYTES = 16 << 20

log = logging.getLogger(__name__)


def stall_guard(stall_seconds: float, connections: Connections) -> type[asyncio.Protocol]:
    """Returns uvicorn's HTTP protocol class with these limits."""

    class Limited(_StallGuard):
        stall_s = stall_seconds
        open_connections = connections

    return Limited


class _StallGuard(HttpToolsProtocol):
    stall_s: float
    open_connections: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The next piece is asked for only once the buffer is empty, so that the buffer shrinks or is stuck. Over TLS
        # it may not be empty now, and writing is paused at once.
        transport.set_write_buffer_limits(high=1, low=0)
        self._socket = transport.get_extra_info("socket")
        self._descriptor = self._socket.fileno()
        self._is_silent = True  # no byte received yet
        self._part: PendingInput | None = None  # being received; None between two requests
        self._bytes_without_progress = 0  # since the parser reached a body, or the end of a head, chunk or request
        self._dropped_bytes: int | None = None  # of a request that is not read any more
        self._checks_without_read = 0  # checks, not seconds, which may have passed while the loop was busy
        self._write_state = (0, 0)
        # For uvicorn's request cycle; its `close` gives the client time to read the answer.
        self._transport_of_cycle: Any = SimpleNamespace(
            write=transport.write, close=self.close_when_read, is_closing=self.is_closing
        )
        self._writer: Writer | None = None
        # Body bytes at the last checks, over stall_seconds at least.
        self._window: deque[int] = deque(maxlen=CHECKS_PER_STALL + 1)
        self._begin_part("head")
        self._check_timer = self.loop.call_later(self.stall_s / CHECKS_PER_STALL, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check_timer.cancel()
        if self._writer is not None:
            self._writer.is_open = False
        self.open_connections.remove(self._descriptor)
        super().connection_lost(exc)

    # ------------------------------------------------------------------- receiving

    def data_received(self, data: bytes) -> None:
        """Feeds the parser piece by piece. Refuses a client whose bytes bring the parser no further (431): it keeps
        them all, whichever part of a request they are. After a refusal it counts what is dropped, up to a limit."""
        self._is_silent = False
        if self._dropped_bytes is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.close()
            return
        if self._part is None:
            self._begin_part("head")
        view = memoryview(data)
        for at in range(0, len(data), PARSED_PIECE_BYTES):
            piece = view[at : at + PARSED_PIECE_BYTES]
            self._has_progressed = False
            self._parse(piece)
            if self._dropped_bytes is not None or self.transport.is_closing():
                return
            self._bytes_without_progress = 0 if self._has_progressed else self._bytes_without_progress + len(piece)
            if self._bytes_without_progress > MAX_HEAD_BYTES:
                what = "The request line with all headers, a chunk's extensions, or the trailers"
                self._refuse(431, f"{what} are longer than {MAX_HEAD_BYTES} bytes.", "headers_too_large")
                return

    def _parse(self, data: memoryview) -> None:
        """Feeds the parser. At an offer to upgrade (h2c, websocket) it stops and drops the body; a server may ignore
        the offer (RFC 9110, 7.8), so the request is parsed again without it."""
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
            self._begin_part("head")

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser stops here
        self._begin_part("body")
        cast(Any, self.scope)["extensions"] = {HEAD_TIME_KEY: WallClock().now()}
        super().on_headers_complete()
        self.cycle.transport = self._transport_of_cycle
        if self.scope["http_version"] != "1.1":
            self.cycle.keep_alive = False
            self.cycle.waiting_for_100_continue = False  # an older client would take a 100 for the answer
        self._report_turn()

    def on_chunk_header(self) -> None:
        self._has_progressed = True

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._has_progressed = True
        self._part = None
        super().on_message_complete()
        self._report_turn()

    def _begin_part(self, part: PendingInput) -> None:
        self._has_progressed = True
        self._part = part
        self._checks_of_part = 0
        self._body_bytes = 0  # since the last check
        self._window.clear()

    # ------------------------------------------------------------------- sending

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writer is not None and self._writer.flow is not None:
            self._writer.flow.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writer is not None and self._writer.flow is not None:
            self._writer.flow.resume()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._writer = Writer(self.transport, cycle)
        cycle.scope.setdefault("extensions", {})[WRITER_KEY] = self._writer

        async def app_of_one_answer(scope: Any, receive: Any, send: Any) -> None:
            has_length = False

            async def send_checked(message: Any) -> None:
                nonlocal has_length
                if cycle.more_body and not cycle.response_started:
                    cycle.keep_alive = False  # answered early: the rest of the body is no request
                if scope["http_version"] != "1.1":  # no chunks: without a length the connection's end is the end
                    if message["type"] == "http.response.start":
                        has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                    if not has_length:
                        cycle.chunked_encoding = False
                        cycle.expected_content_length = len(message.get("body", b""))  # else uvicorn checks it
                await send(message)

            await app(scope, receive, send_checked)

        super()._start_asgi_task(cycle, app_of_one_answer)

    def on_response_complete(self) -> None:
        if self._dropped_bytes is None:
            super().on_response_complete()
            self._report_turn()
        else:
            self.server_state.total_requests += 1

    def timeout_keep_alive_handler(self) -> None:
        # After SIGSTOP the timer is due although a request may have come in time.
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        if not waiting.poll(0):
            super().timeout_keep_alive_handler()

    def close_when_read(self) -> None:
        """Closes; where half a request is unread, only once the client had time to read the answer."""
        if self._part == "body" and self._dropped_bytes is None and not self.transport.is_closing():
            self._linger()
        elif self._dropped_bytes is None:
            self.transport.close()

    def is_closing(self) -> bool:
        return self._dropped_bytes is not None or self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers the request being received, ignores its rest, and closes."""
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
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        if status == 408:
            self.transport.close()  # it had its time
        else:
            self._linger()

    def _linger(self) -> None:
        """Closes when the client has, when it has sent LINGER_BYTES more, or after stall_seconds."""
        self._dropped_bytes = 0
        self._checks_of_part = 0
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self._report_turn()

    # ------------------------------------------------------------------- whose turn it is

    def _turn(self) -> PendingInput | None:
        """Returns the input awaited from the client; None: it is the server's turn."""
        cycle: Any = self.cycle
        if self._dropped_bytes is not None or cycle is None:
            return "head"
        if self.pipeline:
            return None
        if cycle.response_complete:
            return "head"
        return "body" if cycle.more_body else None

    def _report_turn(self) -> None:
        self.open_connections.expect(self._descriptor, self._turn())

    def _check_progress(self) -> None:
        left = (self.transport.get_write_buffer_size(), self._acknowledged())
        self._checks_without_read = self._checks_without_read + 1 if left == self._write_state and left[0] > 0 else 0
        self._write_state = left
        if self._checks_without_read >= CHECKS_PER_STALL:
            log.info("a client took nothing for %.1f s: cut off", self.stall_s)
            self.transport.abort()
            return
        self._check_timer = self.loop.call_later(self.stall_s / CHECKS_PER_STALL, self._check_progress)
        if self.transport.is_closing() or self.flow.read_paused or not self._is_late():
            return
        log.info("a client's %s took too long: cut off", self._part or "end")
        if self._dropped_bytes is not None or self._is_silent:
            self.transport.close()
        else:
            of = (
                f"the headers within {self.stall_s:g} s"
                if self._part == "head"
                else f"{MIN_BODY_RATE} bytes per second"
            )
            self._refuse(408, f"The request came too slowly: send {of}.", "request_timeout")

    def _is_late(self) -> bool:
        """Returns whether the client's time is up at this check."""
        if self._dropped_bytes is None and (self._part is None or self._turn() != self._part):
            return False  # between two requests uvicorn's own timer runs
        self._checks_of_part += 1
        if self._dropped_bytes is not None or self._part == "head":
            return self._checks_of_part > CHECKS_PER_STALL
        self._window.append(self._body_bytes)
        self._body_bytes = 0
        return len(self._window) > CHECKS_PER_STALL and sum(self._window) < MIN_BODY_RATE * self.stall_s

    def _acknowledged(self) -> int:
        """Returns the bytes that the client's kernel has acknowledged in all; 0 on other systems than Linux.

        Linux lets us write again only when a third of the buffer is free, long after a slow reader took something.
        """
        if not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
            return 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_BYTES_ACKED_OFFSET + 8)
        except OSError:  # it is being closed
            return 0
        return int.from_bytes(info[TCPI_BYTES_ACKED_OFFSET:], sys.byteorder)
