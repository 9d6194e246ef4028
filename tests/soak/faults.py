"""What is done to a server while it serves. Each takes the server, a random generator and what was seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from random import Random

from tests.soak.clients import Seen
from tests.soak.server import KEYS, Server

Fault = Callable[[Server, Random, Seen], Awaitable[None]]
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['hostile']}\r\n".encode()
TRICKLING, NOT_READING = 200, 50
SECONDS = 6.0  # that most of them last


async def _connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(server.host, server.port)


def _post(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _chat(**fields: object) -> bytes:
    body = {"model": "soak", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **fields}
    return json.dumps(body).encode()


async def _answer(server: Server, request: bytes) -> bytes:
    """What comes back, b"" for nothing."""
    reader, writer = await _connect(server)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        with contextlib.suppress(ConnectionError, TimeoutError):
            return await asyncio.wait_for(reader.read(65536), 30.0)
        return b""
    finally:
        writer.close()


async def stop_server(server: Server, rng: Random, seen: Seen) -> None:
    """SIGSTOP for a while, as a suspended virtual machine."""
    began = time.monotonic()
    server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(SECONDS)
    server.process.send_signal(signal.SIGCONT)
    seen.excused.append((began, time.monotonic() + 2.0))


async def log_not_read(server: Server, rng: Random, seen: Seen) -> None:
    server.stop_reading()
    await asyncio.sleep(2 * SECONDS)
    server.read_on()


async def disk_full(server: Server, rng: Random, seen: Seen) -> None:
    """The event log can take no more for a while."""
    server.limit_files(server.event_log.stat().st_size + 4096)
    await asyncio.sleep(SECONDS)
    server.limit_files(-1)


async def slow_clients(server: Server, rng: Random, seen: Seen) -> None:
    """Heads that trickle, and clients that ask and do not read."""
    opened = await asyncio.gather(*(_connect(server) for _ in range(TRICKLING + NOT_READING)), return_exceptions=True)
    writers = [pair[1] for pair in opened if not isinstance(pair, BaseException)]
    for writer in writers[:TRICKLING]:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: ")
    for writer in writers[TRICKLING:]:
        writer.write(_post(_chat(max_tokens=64, stream=True)))
    until = time.monotonic() + 2 * SECONDS
    while time.monotonic() < until:
        for writer in writers[:TRICKLING]:
            if not writer.is_closing():
                writer.write(b"a")
        await asyncio.sleep(0.4)
    for writer in writers:
        writer.close()


async def long_head(server: Server, rng: Random, seen: Seen) -> None:
    """100 MB of headers, as far as they are taken."""
    _, writer = await _connect(server)
    with contextlib.suppress(ConnectionError):
        writer.write(HEAD)
        for number in range(1600):
            writer.write(b"X-%d: " % number + b"a" * 65536 + b"\r\n")
            await writer.drain()
    writer.close()


async def large_bodies(server: Server, rng: Random, seen: Seen) -> None:
    """Bodies that would take long to parse or to tokenize: each is refused."""
    for prompt in (b"[" + b"[1]," * 450_000 + b"[1]]", b'"' + b"a " * 900_000 + b'"', b'"' + b"x" * 4_000_000 + b'"'):
        body = b'{"model":"soak","prompt":' + prompt + b"}"
        answer = await _answer(server, _post(body).replace(b"/v1/chat/", b"/v1/", 1))
        if answer and not answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")):
            seen.broken(f"a large body was answered {answer[:60]!r}")


async def cancels(server: Server, rng: Random, seen: Seen) -> None:
    """60 clients leave at once, each at some moment of its own request."""

    async def leave() -> None:
        reader, writer = await _connect(server)
        writer.write(_post(_chat(stream=True, max_tokens=64)))
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reader.read(1000), rng.uniform(0.0, 2.0))
        writer.close()

    await asyncio.gather(*(leave() for _ in range(60)))


async def infeasible(server: Server, rng: Random, seen: Seen) -> None:
    """A flood of requests that cannot be served in time, as many as 4 connections get through; then one of a good
    length, which must still be served."""
    one = _post(_chat(slo={"ttft_ms": 0.001, "on_decline": "refuse"}))
    until = time.monotonic() + 2 * SECONDS

    async def flood() -> None:
        while time.monotonic() < until:
            await _answer(server, one.replace(b"Host: x", b"Host: x\r\nConnection: close"))

    await asyncio.gather(*(flood() for _ in range(4)))
    answer = await _answer(server, _post(_chat()))
    if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")):
        seen.broken(f"after a flood of infeasible requests: {answer[:200]!r}")


async def edges(server: Server, rng: Random, seen: Seen) -> None:
    """SLOs beyond all bounds: each is a 400."""
    for milliseconds in (1e-6, 1e-300, 1e300, 1.7e308):
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            answer = await _answer(server, _post(_chat(slo={name: milliseconds})))
            if not answer.startswith(b"HTTP/1.1 400"):
                seen.broken(f"slo.{name} {milliseconds}: {answer[:60]!r}")


async def reconnects(server: Server, rng: Random, seen: Seen) -> None:
    for _ in range(3):
        for pair in await asyncio.gather(*(_connect(server) for _ in range(100)), return_exceptions=True):
            if not isinstance(pair, BaseException):
                pair[1].close()


async def failing_step(server: Server, rng: Random, seen: Seen) -> None:
    seen.may_fail += ("injected failure",)
    (server.folder / "fail").touch()


async def hanging_step(server: Server, rng: Random, seen: Seen) -> None:
    """One of two replicas is lost with what it serves; the other goes on."""
    seen.may_fail += ("the engine hangs",)
    began = time.monotonic()
    (server.folder / "hang").touch()
    await asyncio.sleep(2 * SECONDS)
    seen.excused.append((began, time.monotonic()))


async def frozen_actor(server: Server, rng: Random, seen: Seen) -> None:
    os.kill(rng.choice(server.actors()), signal.SIGSTOP)
    began = time.monotonic()
    await asyncio.sleep(2.5 * SECONDS)  # it is lost after 10 s, and what it served goes on elsewhere
    seen.excused.append((began, time.monotonic()))


async def napping_actor(server: Server, rng: Random, seen: Seen) -> None:
    """Too short to be lost."""
    pid = rng.choice(server.actors())
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.7 * SECONDS)
    os.kill(pid, signal.SIGCONT)
    seen.excused.append((began, time.monotonic() + 2.0))


async def killed_actor(server: Server, rng: Random, seen: Seen) -> None:
    began = time.monotonic()
    os.kill(rng.choice(server.actors()), signal.SIGKILL)
    await asyncio.sleep(SECONDS)
    seen.excused.append((began, time.monotonic()))


ANYWHERE: tuple[Fault, ...] = (
    stop_server, log_not_read, disk_full, slow_clients, long_head, large_bodies, cancels, infeasible, edges, reconnects,
)  # fmt: skip
