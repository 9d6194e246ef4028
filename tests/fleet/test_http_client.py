"""The HTTP client towards servers: every legal answer in any pieces is read, and every other is an error that ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.fleet import http_client, server_probe, upstream
from rubato.fleet.http_client import HttpServer
from rubato.fleet.upstream import UpstreamError, read_all

OK = b"HTTP/1.1 200 OK\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def served(answer: Answer, client: Callable[[HttpServer], Awaitable[object]], path: str = "") -> object:
    """What a client gets of a server that answers each request so."""

    async def run() -> object:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        listening = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with HttpServer(f"http://127.0.0.1:{port}{path}") as server, asyncio.timeout(20):
            found = await client(server)
        listening.close()
        return found

    return asyncio.run(run())


def pieces(*parts: bytes, close: bool = True) -> Answer:
    """These bytes, a piece at a time, to each request of a connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await _request(reader):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return answer


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    size = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(sum(size))


async def get(server: HttpServer, method: str = "GET") -> tuple[int, bytes]:
    reply = await server.open(method, "/x", [("a", "b")], b"" if method in ("GET", "HEAD") else b"body")
    return reply.status, await read_all(reply)


async def pumped(server: HttpServer) -> bytes:
    reply, out = await server.open("POST", "/x", [], b"{}"), bytearray()
    await reply.pump(out.extend)
    return bytes(out)


LEGAL = {
    "a length": (OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "no body": (OK + b"content-length: 0\r\n\r\n", b""),
    "until it closes": (OK + b"\r\nhello", b"hello"),
    "HTTP/1.0": (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
    "chunks": (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", b"hello"),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nt: 1\r\n\r\n", b"hello"),
    "hints before it": (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + OK
                        + b"content-length: 2\r\n\r\nhe", b"he"),
}  # fmt: skip
WRONG = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-x\r\n",
    "half a head": OK + b"content-length: 5\r\n",
    "half a body": OK + b"content-length: 5\r\n\r\nhel",
    "half a chunk": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhel",
    "no last chunk": OK + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "a chunk's size that is none": OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "two lengths": OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "a head without end": OK + b"a: " + b"x" * 100_000,
    "many headers": OK + b"a: b\r\n" * 20_000,
    "extensions without end": OK + b"transfer-encoding: chunked\r\n\r\n2;" + b"x" * 100_000,
    "another protocol": b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
}


@pytest.mark.parametrize("name", LEGAL)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_legal_answer_in_pieces_is_read(name: str, size: int) -> None:
    raw, body = LEGAL[name]
    cut = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert served(pieces(*cut), get) == (200, body)
    assert served(pieces(*cut), pumped) == body


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_is_none_is_an_error(name: str) -> None:
    with pytest.raises(UpstreamError) as failed:
        served(pieces(WRONG[name]), get)
    assert "127.0.0.1" not in str(failed.value)
    with pytest.raises(UpstreamError):
        served(pieces(WRONG[name]), pumped)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6))
def test_any_bytes_end(parts: list[bytes]) -> None:
    async def ends(server: HttpServer) -> None:
        with contextlib.suppress(UpstreamError):
            await pumped(server)
        await asyncio.sleep(0.001)
        assert not server._open or all(c in server._idle for c in server._open)

    served(pieces(*parts), ends)


def test_connections_are_kept_and_asked_again_when_they_were_closed() -> None:
    connections = 0
    inner = pieces(OK + b"content-length: 2\r\n\r\nhe", close=False)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await inner(reader, writer)

    async def several(server: HttpServer) -> list[tuple[int, bytes]]:
        found = [await get(server) for _ in range(3)]
        for connection in server._idle:  # the server closes an idle one, which is not known here yet
            connection.transport.get_extra_info("socket").shutdown(1)
        return [*found, await get(server)]

    assert served(answer, several) == [(200, b"he")] * 4
    assert connections == 2


def test_head_has_no_body_and_bytes_behind_an_answer_close_the_connection() -> None:
    assert served(pieces(OK + b"content-length: 5\r\n\r\n", close=False), lambda s: get(s, "HEAD")) == (200, b"")

    async def twice(server: HttpServer) -> list[tuple[int, bytes]]:
        found = [await get(server)]
        await asyncio.sleep(0.01)
        assert not server._idle
        return [*found, await get(server)]

    raw = OK + b"content-length: 2\r\n\r\nhe"
    assert served(pieces(raw + raw, close=False), twice) == [(200, b"he")] * 2


def test_a_body_that_nobody_takes_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_BUFFERED_BYTES", 1000)
    size = 8 << 20

    async def slow(server: HttpServer) -> int:
        reply = await server.open("GET", "/x", [], b"")
        await asyncio.sleep(0.1)
        assert reply._buffered < 1 << 20  # type: ignore[attr-defined]
        return len(await read_all(reply))

    assert served(pieces(OK + b"content-length: %d\r\n\r\n" % size, b"x" * size, close=False), slow) == size


def test_a_whole_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(UpstreamError, match="longer than 1000 bytes"):
        served(pieces(OK + b"content-length: 2000\r\n\r\n", b"x" * 2000), get)


def test_seconds_bound_the_whole_answer_and_errors_of_the_sink_come_out() -> None:
    async def late(server: HttpServer) -> None:
        reply = await server.open("GET", "/x", [], b"", seconds=0.05)
        await read_all(reply)

    async def stays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(OK + b"content-length: 5\r\n\r\nhe")
        await reader.read()

    with pytest.raises(UpstreamError, match="no answer in time"):
        served(stays, late)

    async def raising(server: HttpServer) -> None:
        reply = await server.open("GET", "/x", [], b"")
        await reply.pump(lambda data: 1 // 0)  # type: ignore[arg-type]

    with pytest.raises(ZeroDivisionError):
        served(stays, raising)


def test_a_base_url_with_a_path_and_a_header_with_a_line_break() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = await _request(reader)
        writer.write(OK + b"content-length: %d\r\n\r\n" % len(raw) + raw)

    status, raw = served(echo, lambda s: get(s, "POST"), "/v1")  # type: ignore[misc]
    assert status == 200
    assert raw.startswith(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert raw.endswith(b"a: b\r\ncontent-length: 4\r\n\r\nbody")

    async def broken(server: HttpServer) -> None:
        await server.open("GET", "/x", [("a", "b\r\nc: d")], b"")

    with pytest.raises(UpstreamError, match="line break"):
        served(echo, broken)


def test_a_path_of_a_server_stands_before_each_request_of_its_probes_and_its_clients() -> None:
    asked: list[bytes] = []
    page = b'{"data":[{"id":"m"}],"host":"127.0.0.1","port":1,"version":"v"}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _request(reader):
            asked.append(b" ".join(head.split(b" ")[:2]))
            writer.write(OK + b"content-length: %d\r\n\r\n" % len(page) + page)

    async def client(server: HttpServer) -> None:
        url = server.url
        models = await server_probe.ready_models(url, server)
        await server_probe.link_address(url, server)
        await server_probe.about(url, server, None, None, models, "m")
        await read_all(await server.open("POST", "/v1/completions", [], b"{}"))
        server.set_url(url.replace("/team-a", "/team-b"))
        await read_all(await server.open("POST", "/v1/completions", [], b"{}"))

    served(answer, client, "/team-a")
    paths = [b"/team-a" + path for path in (b"/health", b"/v1/models", b"/rubato/link", b"/metrics", b"/version")]
    posts = [b"POST /team-a/v1/completions", b"POST /team-b/v1/completions"]
    assert asked == [*[b"GET " + path for path in paths], *posts]


def test_a_client_without_a_url_gets_one_later() -> None:
    server = HttpServer("")
    server.set_url("http://10.0.0.7:8000/")
    assert server.url == "http://10.0.0.7:8000"


# --------------------------------------------------------------------------- silence


SILENT = [b"", OK, OK + b"content-length: 5\r\n\r\nhe", OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n"]


def silent_after(raw: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(raw)
        await reader.read()

    return answer


@pytest.mark.parametrize("raw", SILENT)
def test_server_that_is_silent_at_any_part_of_an_answer_is_an_error(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_SILENCE_S", 0.05)
    for client in (get, pumped):
        with pytest.raises(UpstreamError, match="no answer in time"):
            served(silent_after(raw), client)


def test_silence_of_a_server_that_is_known_to_work_is_no_error_until_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_SILENCE_S", 0.02)
    looks = iter([True] * 5)

    async def client(server: HttpServer) -> None:
        await server.open("POST", "/x", [], b"{}", is_working=lambda: next(looks, False))

    with pytest.raises(UpstreamError, match="no answer in time"):
        served(silent_after(b""), client)
    assert next(looks, None) is None


def test_what_a_client_does_not_take_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_SILENCE_S", 0.5)

    async def client(server: HttpServer) -> bytes:
        reply = await server.open("GET", "/x", [], b"")
        reply.pause()
        await asyncio.sleep(1.2)
        reply.resume()
        return await read_all(reply)

    assert served(pieces(OK + b"content-length: 5\r\n\r\n", b"hello"), client) == b"hello"


def test_answer_of_a_probe_without_end_is_given_up_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_probe, "MAX_PAGE_BYTES", 100_000)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(OK + b"\r\n")
        while True:
            writer.write(b"vllm:x 1\n" * 1000)
            await writer.drain()

    async def client(server: HttpServer) -> int:
        for _ in range(3):
            assert await server_probe.metrics(server) == ""
            with pytest.raises(UpstreamError, match="longer than 100000 bytes"):
                await server_probe.models(server.url, server)
        await asyncio.sleep(0.01)
        return len(server._open)

    assert served(answer, client) == 0


@pytest.mark.parametrize("raw", SILENT)
def test_call_that_is_cancelled_leaves_no_connection_at_the_server(raw: bytes) -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async def client(server: HttpServer) -> None:
        task = asyncio.create_task(get(server))
        await asyncio.sleep(0.05)
        task.cancel()
        await left.wait()

    served(answer, client)
