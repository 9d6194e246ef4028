"""One connection's protocol fed with bytes on the virtual clock, and the socket that accepts connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from rubato.config.schema import ConfigError, load
from rubato.core.clock import WallClock, run_virtual
from rubato.serving import connections
from rubato.serving.asgi_client import HEAD_TIME_KEY
from rubato.serving.connections import Connections, ListeningSocket, connection_limit, limit_accept_error_logs
from rubato.serving.serve import _warn_if_open_to_all
from rubato.serving.stalled_clients import LINGER_BYTES, MAX_HEAD_BYTES, MIN_BODY_RATE, PARSED_PIECE_BYTES, stall_guard
from tests.kit import on

STALL = 8.0
HEAD = b"POST /all HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says how long the body was; of /early before reading it, of /slow after a minute, of /open in two pieces."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/slow":
        await asyncio.sleep(60)
    status = 401 if scope["path"] == "/early" else 200
    if scope["path"] == "/open":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"size ", "more_body": True})
        await send({"type": "http.response.body", "body": str(size).encode()})
        return
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(str(size)))]}
    )
    await send({"type": "http.response.body", "body": str(size).encode()})


class Wire(asyncio.Transport):
    """What the server did to one connection."""

    def __init__(self) -> None:
        self.socket, self.other = socket.socketpair()
        super().__init__({"socket": self.socket})
        self.written = b""
        self.ended = self.reading = self.closed = False
        self.protocol: Any = None

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def write(self, data: Any) -> None:
        assert not self.ended
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    async def send(self, data: bytes, times: int = 1, every: float = 0.0) -> int:
        """How often it could be sent before the connection was closed, or an answer came."""
        for done in range(times):
            if self.closed or self.ended or self.written:
                return done
            self.protocol.data_received(data)
            await asyncio.sleep(every)
        return times

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


def on_a_wire(scenario: Callable[[Wire], Awaitable[None]]) -> None:
    async def main() -> None:
        guard = stall_guard(STALL, Connections(10))
        config = uvicorn.Config(app, http=guard, lifespan="off", ws="none", log_config=None)
        wire = Wire()
        wire.protocol = guard(config, ServerState(), {}, asyncio.get_running_loop())  # type: ignore[call-arg]
        wire.protocol.connection_made(wire)
        try:
            await scenario(wire)
        finally:
            wire.close()
            await asyncio.sleep(0.001)
            wire.socket.close()
            wire.other.close()

    run_virtual(main())


# --------------------------------------------------------------------------- heads


@on(on_a_wire)
async def test_a_request_is_marked_with_when_its_head_had_come_in(wire: Wire) -> None:
    before = WallClock().now()
    wire.protocol.data_received(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n")
    between = WallClock().now()
    wire.protocol.data_received(b"\r\nab")
    scope = wire.protocol.cycle.scope  # type: ignore[attr-defined]
    assert before < between <= scope["extensions"][HEAD_TIME_KEY] <= WallClock().now()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"GET /", b"a" * 50_000),
        (b"GET / HTTP/1.1\r\nX: ", b"a" * 50_000),
        (b"GET / HTTP/1.1\r\nX: ", b" " * 50_000),
        (b"GET / HTTP/1.1\r\n", b"X-Y: %b\r\n" % (b"a" * 990) * 50),
        (b"", b"\r\n" * 25_000),
        (CHUNKED + b"1", b";a=" + b"b" * 50_000),
        (CHUNKED, b"0" * 50_000),
        (CHUNKED + b"0\r\n", b"X-Y: %b\r\n" % (b"a" * 990) * 50),
    ],
    ids=["url", "value", "blanks", "headers", "line ends", "extension", "zeros", "trailers"],
)
@pytest.mark.parametrize("at_once", [False, True])
@on(on_a_wire)
async def test_more_than_64_kib_beside_the_body_are_refused(
    wire: Wire, begin: bytes, more: bytes, at_once: bool
) -> None:
    if at_once:
        await wire.send(begin + more * 10)
    else:
        await wire.send(begin)
        assert await wire.send(more, times=100) == 2
    assert wire.statuses == [431]
    assert wire.ended
    error = json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_large")
    assert b"\r\nconnection: close\r\n" in wire.written


@on(on_a_wire)
async def test_a_head_of_almost_64_kib_and_small_ones_pipelined_pass(wire: Wire) -> None:
    get = b"GET /all HTTP/1.1\r\nX: "
    await wire.send(get + b"a" * (MAX_HEAD_BYTES - PARSED_PIECE_BYTES - len(get)) + b"\r\n\r\n")
    assert wire.statuses == [200]
    wire.protocol.data_received(b"GET /all HTTP/1.1\r\n\r\n" * 5000)
    await asyncio.sleep(0.01)
    assert wire.statuses == [200] * 5001


@pytest.mark.parametrize("first", [b"", b"GET /all HTTP/1.1\r\n\r\n"], ids=["new", "kept"])
@on(on_a_wire)
async def test_a_trickled_head_has_stall_seconds(wire: Wire, first: bytes) -> None:
    if first:
        await wire.send(first)
        assert wire.statuses == [200]
        wire.written = b""
    await wire.send(b"GET /all HTTP/1.1\r\nX: ")
    assert STALL <= await wire.send(b"a", times=100, every=0.5) * 0.5 <= 1.5 * STALL
    assert wire.statuses == [408]
    assert wire.closed


@on(on_a_wire)
async def test_a_connection_that_never_says_anything_is_closed_without_a_word(wire: Wire) -> None:
    await asyncio.sleep(STALL)
    assert not wire.closed
    await asyncio.sleep(STALL / 2)
    assert (wire.closed, wire.written) == (True, b"")


@on(on_a_wire)
async def test_half_of_the_next_head_does_not_cut_off_a_long_answer(wire: Wire) -> None:
    await wire.send(b"GET /slow HTTP/1.1\r\n\r\nGET /al")
    await asyncio.sleep(59)
    wire.protocol.data_received(b"l HTTP/1.1\r\n\r\n")
    await asyncio.sleep(2)
    assert wire.statuses == [200, 200]


# --------------------------------------------------------------------------- bodies


@pytest.mark.parametrize("head", [HEAD + b"Content-Length: 4000000\r\n\r\n", CHUNKED], ids=["declared", "chunked"])
@pytest.mark.parametrize("rate", [MIN_BODY_RATE * 3 // 4, MIN_BODY_RATE])
@on(on_a_wire)
async def test_a_body_has_a_least_rate(wire: Wire, head: bytes, rate: int) -> None:
    part = b"a" * (rate // 2)
    if head is CHUNKED:
        part = b"%x\r\n%b\r\n" % (len(part), part)
    await wire.send(head)
    sent = await wire.send(part, times=400, every=0.5)
    if rate >= MIN_BODY_RATE:
        assert (sent, wire.written) == (400, b"")
    else:
        assert STALL <= sent * 0.5 <= 1.5 * STALL
        assert (wire.statuses, wire.closed) == ([408], True)


@on(on_a_wire)
async def test_a_body_that_stops_is_cut_off_after_a_fast_beginning(wire: Wire) -> None:
    await wire.send(HEAD + b"Content-Length: 4000000\r\n\r\n" + b"a" * 100_000)
    await asyncio.sleep(1.6 * STALL)
    assert (wire.statuses, wire.closed) == ([408], True)


@on(on_a_wire)
async def test_a_body_in_pieces_is_whole(wire: Wire) -> None:
    await wire.send(HEAD + b"Content-Length: 100000\r\n\r\n" + b"a" * 90_000)
    await wire.send(b"a" * 10_000)
    assert (wire.statuses, wire.written[-6:], wire.ended) == ([200], b"100000", False)


# --------------------------------------------------------------------------- answers to half a request


@pytest.mark.parametrize("length", [b"Content-Length: 400000000", b"Transfer-Encoding: chunked"])
@on(on_a_wire)
async def test_after_an_early_answer_a_bounded_part_of_the_body_is_dropped_and_the_connection_closed(
    wire: Wire, length: bytes
) -> None:
    await wire.send(HEAD.replace(b"/all", b"/early") + length + b"\r\n\r\n")
    assert (wire.statuses, wire.ended, wire.closed) == ([401], True, False)
    assert b"\r\nconnection: close\r\n" in wire.written
    block, sent = b"10000\r\n" + b"a" * 65_536 + b"\r\n", 0
    while not wire.closed:
        wire.protocol.data_received(block)
        sent += len(block)
    assert LINGER_BYTES <= sent <= LINGER_BYTES + 2 * len(block)
    assert wire.statuses == [401]


@on(on_a_wire)
async def test_after_an_early_answer_a_trickled_body_has_stall_seconds(wire: Wire) -> None:
    await wire.send(HEAD.replace(b"/all", b"/early") + b"Content-Length: 100000\r\n\r\n")
    for _ in range(int(3 * STALL)):
        if not wire.closed:
            wire.protocol.data_received(b"a")
            await asyncio.sleep(0.5)
    assert wire.closed
    assert STALL <= asyncio.get_running_loop().time() <= 1.5 * STALL + 12


@on(on_a_wire)
async def test_an_answer_to_a_whole_request_keeps_the_connection(wire: Wire) -> None:
    await wire.send(HEAD.replace(b"/all", b"/early") + b"Content-Length: 3\r\n\r\nabc")
    assert (wire.statuses, wire.ended, wire.closed) == ([401], False, False)
    assert b"connection: close" not in wire.written


@on(on_a_wire)
async def test_what_is_not_http_is_answered_in_the_usual_shape(wire: Wire) -> None:
    await wire.send(b"GET /\xff HTTP/1.1\r\n\r\n")
    assert (wire.statuses, wire.ended) == ([400], True)
    assert json.loads(wire.written.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@on(on_a_wire)
async def test_bad_http_behind_a_request_that_is_being_answered_does_not_get_into_its_answer(wire: Wire) -> None:
    await wire.send(b"GET /slow HTTP/1.1\r\n\r\n")
    wire.protocol.data_received(b"\xff\xff\r\n\r\n")
    await asyncio.sleep(100)
    assert (wire.written, wire.closed) == (b"", True)


# --------------------------------------------------------------------------- offers to upgrade

OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@on(on_a_wire)
async def test_an_offer_is_ignored_wherever_its_request_is_cut_in_two(wire: Wire) -> None:
    request = HEAD + OFFER + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for at in range(1, len(request)):
        for part in (request[:at], request[at:]):
            wire.protocol.data_received(part)
            await asyncio.sleep(0.001)
        assert (wire.statuses, wire.written[-1:]) == ([200], b"3")
        wire.written = b""


@on(on_a_wire)
async def test_offers_one_after_another_in_one_segment_are_answered_in_order(wire: Wire) -> None:
    lengths = range(200)
    parts = [HEAD + OFFER + b"Content-Length: %d\r\n\r\n" % n + b"a" * n for n in lengths]
    wire.protocol.data_received(b"".join(parts))
    await asyncio.sleep(0.01)
    assert [int(answer.rpartition(b"\n")[2]) for answer in wire.written.split(b"HTTP/1.1 ")[1:]] == [*lengths]


def test_a_head_with_an_offer_has_its_bound_and_its_time() -> None:
    async def too_long(wire: Wire) -> None:
        await wire.send(HEAD + OFFER + b"X: " + b"a" * 2 * MAX_HEAD_BYTES)
        assert wire.statuses == [431]

    async def too_slow(wire: Wire) -> None:
        await wire.send(HEAD + OFFER + b"Content-Length: 9\r\n\r\n")
        assert STALL <= await wire.send(b"a", times=8, every=2.0) * 2.0 <= 1.5 * STALL
        assert wire.statuses == [408]

    on_a_wire(too_long)
    on_a_wire(too_slow)


@pytest.mark.parametrize(
    "rest", [b"Transfer-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"]
)
@on(on_a_wire)
async def test_a_body_whose_end_is_not_known_is_refused_beside_an_offer_too(wire: Wire, rest: bytes) -> None:
    await wire.send(HEAD + OFFER + rest + b"\r\n3\r\nabc\r\n0\r\n\r\n")
    assert (wire.statuses, wire.ended) == ([400], True)


@pytest.mark.parametrize("target", [b"host:443", b"http://host/"])
@pytest.mark.parametrize("offer", [b"", OFFER])
@on(on_a_wire)
async def test_connect_is_refused(wire: Wire, target: bytes, offer: bytes) -> None:
    await wire.send(b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\nGET /all HTTP/1.1\r\n\r\n")
    assert (wire.statuses, wire.ended) == ([400], True)


# --------------------------------------------------------------------------- versions before 1.1


@pytest.mark.parametrize("version", [b"0.9", b"1.0"])
@pytest.mark.parametrize(("method", "body"), [(b"GET", b"size 0"), (b"HEAD", b"")])
@on(on_a_wire)
async def test_an_answer_to_an_old_client_ends_with_the_connection(
    wire: Wire, version: bytes, method: bytes, body: bytes
) -> None:
    await wire.send(method + b" /open HTTP/" + version + b"\r\nConnection: keep-alive\r\n\r\n")
    assert (wire.written.partition(b"\r\n\r\n")[2], wire.closed) == (body, True)
    assert b"\r\nconnection: close\r\n" in wire.written
    assert b"transfer-encoding" not in wire.written


# --------------------------------------------------------------------------- the listening socket


class Ends(asyncio.Protocol):
    """Of an accepted connection: only that it is told gone."""

    def __init__(self, book: Connections) -> None:
        self.book = book

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.descriptor = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:
        self.book.remove(self.descriptor)


def accepting(scenario: Callable[[Connections, Callable[[], Awaitable[Any]]], Awaitable[None]]) -> None:
    """With room for two. The second argument connects, and returns a reader of what the server sends."""

    async def main() -> None:
        book = Connections(2)
        with ListeningSocket(socket.AF_INET, book) as listening:
            listening.bind(("127.0.0.1", 0))
            address = listening.getsockname()
            writers = []

            async def visit() -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection(*address)
                writers.append(writer)
                came = writer.get_extra_info("sockname")[1]
                for _ in range(2000):
                    if reader.at_eof() or came in map(peer, book._open.values()):
                        return reader
                    await asyncio.sleep(0.01)
                raise AssertionError("neither accepted nor refused")

            async with await asyncio.get_running_loop().create_server(lambda: Ends(book), sock=listening):
                await scenario(book, visit)
                for writer in writers:
                    writer.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def peer(connection: socket.socket) -> int:
    return int(connection.getpeername()[1]) if connection.fileno() >= 0 else -1


def test_the_connection_that_owes_a_head_for_longest_gives_way() -> None:
    async def scenario(book: Connections, visit: Callable[[], Awaitable[Any]]) -> None:
        first, second = await visit(), await visit()
        descriptor = next(iter(book._open))
        book.expect(descriptor, None)  # a request, served
        book.expect(descriptor, "head")
        third = await visit()
        assert await second.read() == b""
        assert not first.at_eof()
        assert not third.at_eof()
        assert len(book) == 2

    accepting(scenario)


def test_an_unfinished_body_gives_way_last_and_a_request_being_served_never(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(book: Connections, visit: Callable[[], Awaitable[Any]]) -> None:
        first, second = await visit(), await visit()
        before = next(iter(book._open))
        book.expect(before, "body")
        third = await visit()
        assert await second.read() == b""  # it came later, but owes a head
        book.expect([*book._open][-1], None)  # the third's, whatever its descriptor is
        fourth = await visit()
        assert await first.read() == b""
        for descriptor in list(book._open):
            book.expect(descriptor, None)
        assert await (await visit()).read() == b""
        assert not third.at_eof()
        assert not fourth.at_eof()

    accepting(scenario)
    assert caplog.text.count("(1 times so far)") == 1  # the others within the same minute
    assert "max_connections (2) reached" in caplog.text


def test_accept_errors_are_reported_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit_accept_error_logs(loop)
        error = OSError(24, "Too many open files")
        for _ in range(2):
            for _ in range(1000):
                loop.call_exception_handler({"message": "socket.accept()", "exception": error, "socket": object()})
            await asyncio.sleep(connections.WARN_INTERVAL_S)
        loop.call_exception_handler({"message": "something else", "exception": ValueError("else")})

    run_virtual(main())  # whose own handler is replaced
    told = [record.getMessage() for record in caplog.records]
    assert told[:2] == [f"no connection can be accepted (Too many open files) ({n} times so far)" for n in (1, 1001)]
    assert told[2:] == ["something else"]


@pytest.mark.parametrize(
    ("host", "tenants", "warnings"),
    [("0.0.0.0", False, 1), ("::", False, 1), ("0.0.0.0", True, 0), ("127.0.0.1", False, 0), ("::1", False, 0)],
)
def test_an_address_that_others_reach_without_keys_is_warned_of(
    host: str, tenants: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_if_open_to_all(load({"tenants": {"a": {"keys": ["sk-a"]}}} if tenants else {}), host)
    assert len(caplog.records) == warnings


def test_connections_follow_from_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [64, 256]

    def set_limits(which: int, to: tuple[int, int]) -> None:
        limits[:] = to

    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(connections.resource, "setrlimit", set_limits)
    assert connection_limit(None) == 128
    assert limits == [256, 256]
    assert connection_limit(100) == 100
    with pytest.raises(ConfigError, match="max_connections: 200 take 328 file descriptors and 256 are allowed"):
        connection_limit(200)
    assert connection_limit(None, descriptors_each=2) == 64
    assert connection_limit(64, descriptors_each=2) == 64
    with pytest.raises(ConfigError, match=r"max_connections: 65 take 258 file descriptors .* or set 64"):
        connection_limit(65, descriptors_each=2)
    limits[:] = [64, 64]
    assert connection_limit(None) == 32
    assert connection_limit(None, descriptors_each=2) == 16
    limits[:] = [1024, -1]
    assert connection_limit(None) == connections.MAX_CONNECTIONS
    assert limits == [connections.MAX_CONNECTIONS + connections.RESERVED_DESCRIPTORS, -1]
    assert connection_limit(None, descriptors_each=2) == connections.MAX_CONNECTIONS
    assert limits == [2 * connections.MAX_CONNECTIONS + connections.RESERVED_DESCRIPTORS, -1]
