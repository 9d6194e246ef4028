"""Clients that mean no good, over real HTTP: nothing hangs, nothing leaks, all KV is free at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rubato.serving.stalled_clients import SEND_BUFFER_BYTES
from tests.processes.conftest import Server, Start, servers
from tests.processes.test_serving import all_free, outcomes, raw_request

TIMEOUT = 60.0
STALL = 1.0
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-gold\r\n"
GOLD, BASIC, ROOT = ({"authorization": f"Bearer sk-{name}"} for name in ("gold", "basic", "root"))
CONFIG: dict[str, Any] = {
    "engine": {"kind": "simulated", "max_model_len": 20_000, "kv_blocks": 8192},
    "latency": {"kind": "affine", "k": [0.0, 0.0], "b": [0.001, 0.0]},
    "tiers": {"gold": {"ttft_ms": 500, "tpot_ms": 50}, "basic": {"ttft_ms": 20_000, "tpot_ms": 2000}},
    "default_tier": "basic",
    "tenants": {
        "gold": {"keys": ["sk-gold"], "tiers": ["gold", "basic"]},
        "basic": {"keys": ["sk-basic"], "tiers": ["basic"]},
        "root": {"keys": ["sk-root"], "admin": True},
    },
    "max_in_flight": 64,
    "max_body_bytes": 1 << 20,
    "stall_seconds": STALL,
    "log": {"format": "json"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory.mktemp("abuse")) as start:
        server = start(**CONFIG)
        ask(server)  # what is loaded at the first request is loaded
        yield server


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}


def ask(server: Server, headers: dict[str, str] = GOLD, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}/v1/chat/completions", json=chat(**fields), headers=headers, timeout=TIMEOUT)


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def settled(server: Server) -> int:
    """Open descriptors once nothing is in flight; that all is free and every book agrees."""
    server.wait_until(all_free)
    value = server.metrics()
    assert value("rubato_requests_offered_total") == value("rubato_requests_finished_total")
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    deadline = time.monotonic() + 10
    last, same = -1, 0
    while same < 5:  # connections close a moment after their answers
        assert time.monotonic() < deadline
        time.sleep(0.05)
        now = descriptors(server)
        last, same = now, same + 1 if now == last else 0
    assert "Traceback" not in server.log
    return last


def test_bodies_of_ten_megabytes(server: Server) -> None:
    before = settled(server)
    content = b" " * (10 << 20)
    for body in (content, iter([content[: 1 << 20]] * 10)):  # declared, and in chunks that say nothing beforehand
        try:
            answer = httpx2.post(f"{server.url}/v1/chat/completions", content=body, headers=GOLD, timeout=TIMEOUT)
        except httpx2.TransportError:
            continue  # told before all was sent, and the connection closed
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    long = ask(server, messages=[{"role": "user", "content": "x" * 900_000}])
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert settled(server) <= before + 1


@pytest.mark.parametrize(
    ("fields", "headers", "status", "param"),
    [
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, {}, 400, "messages"),
        ({"max_tokens": 10**12}, {}, 400, None),
        ({"slo": {"ttft_ms": -1}}, {}, 400, "slo.ttft_ms"),
        ({"slo": {"tpot_ms": 0}}, {}, 400, "slo.tpot_ms"),
        ({"slo": {"e2e_ms": "soon"}}, {}, 400, "slo.e2e_ms"),
        ({"slo": {"e2e_ms": 1e300}}, {}, 400, "slo.e2e_ms"),
        ({"slo": {"ttft_ms": 1e-300}}, {}, 400, "slo.ttft_ms"),
        ({"slo": {"ttft_ms": [1]}}, {}, 400, "slo.ttft_ms"),
        ({}, {"x-slo-ttft-ms": "NaN"}, 400, "x-slo-ttft-ms"),
        ({}, {"x-slo-tpot-ms": "-5"}, 400, "x-slo-tpot-ms"),
        ({}, {"x-slo-e2e-ms": "inf"}, 400, "x-slo-e2e-ms"),
        ({}, {"x-slo-e2e-ms": "1e300"}, 400, "x-slo-e2e-ms"),
        ({}, {"x-slo-ttft-ms": "1e-300"}, 400, "x-slo-ttft-ms"),
        ({"slo": {"tpot_ms": 1e9}}, {}, 200, None),
        ({}, {"x-slo-ttft-ms": "0.001"}, 200, None),  # clamped to the tightest of its tiers
        ({}, {"x-slo-ttft-ms": "a" * 5000}, 400, "x-slo-ttft-ms"),
        ({"service_tier": "platinum"}, {}, 400, "service_tier"),
        ({"model": "gpt-9"}, {}, 404, "model"),
        ({"n": 10**9}, {}, 400, "n"),
    ],
)
def test_absurd_wishes(server: Server, fields: Any, headers: dict[str, str], status: int, param: str | None) -> None:
    answer = ask(server, {**GOLD, **headers}, **fields)
    assert answer.status_code == status, answer.text[:500]
    if param is not None:
        assert answer.json()["error"]["param"] == param


def test_json_that_is_not_json(server: Server) -> None:
    for content in (b'{"model": "simulated", "slo": {"ttft_ms": NaN}}', b"{" * 100_000, b"\x00\xff", b""):
        answer = httpx2.post(f"{server.url}/v1/chat/completions", content=content, headers=GOLD, timeout=TIMEOUT)
        assert answer.status_code == 400


def test_a_key_used_for_another_tenants_tier(server: Server) -> None:
    answer = ask(server, BASIC, service_tier="gold", user="gold", slo={"ttft_ms": 100, "tpot_ms": 10})
    assert answer.status_code == 200
    assert answer.headers["x-rubato-tier"] == answer.json()["service_tier"] == "basic"
    assert answer.headers["x-rubato-clamped"] == "service_tier, ttft, tpot"
    targets = answer.json()["rubato"]["targets"]
    assert (targets["ttft_ms"], targets["tpot_ms"]) == (20_000, 2000)
    id = answer.json()["id"]
    assert httpx2.get(f"{server.url}/debug/requests/{id}", headers=GOLD).status_code == 404
    assert httpx2.get(f"{server.url}/debug/requests/{id}", headers=ROOT).json()["tenant"] == "basic"
    assert server.metrics()("rubato_requests_offered_total", tenant="basic", tier="gold") == 0
    assert ask(server, {"authorization": "Bearer sk-golf"}).status_code == 401
    assert ask(server, {}).status_code == 401


def test_five_hundred_at_once(server: Server) -> None:
    before = settled(server)
    already = server.metrics()("rubato_requests_offered_total")

    async def main() -> list[httpx2.Response]:
        # one connection each: one kept until the server drops it, after 5 s, may be taken in that instant
        limits = httpx2.Limits(max_connections=500, max_keepalive_connections=0)
        async with httpx2.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as http:
            posts = (
                http.post(
                    "/v1/chat/completions",
                    json=chat(max_tokens=50, stream=i % 2 == 0),
                    headers=GOLD if i % 4 else BASIC,
                )
                for i in range(500)
            )
            return await asyncio.gather(*posts)

    answers = asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    status = Counter(answer.status_code for answer in answers)
    assert status[200] + status[429] == 500
    assert status[200] >= 64
    assert all("retry-after" in a.headers for a in answers if a.status_code == 429)
    assert settled(server) <= before + 1
    assert server.metrics()("rubato_requests_offered_total") == already + 500


def slow_reader(server: Server, body: dict[str, Any], buffer: int = 1024) -> socket.socket:
    """Asks, with a small receive buffer, and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(TIMEOUT)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(content)
    connection.sendall(head + content)
    return connection


def test_clients_that_do_not_read_are_cut_off_and_hold_up_nobody(server: Server) -> None:
    before = settled(server)
    cancelled = server.metrics()("rubato_requests_finished_total", outcome="cancelled")
    stream = chat(max_tokens=15_000, stream=True)
    stalled = [slow_reader(server, stream) for _ in range(4)]
    try:
        server.wait_until(lambda value: value("vllm:num_requests_running") == 4)
        for _ in range(5):  # others are served meanwhile
            assert ask(server, max_tokens=3).status_code == 200
        server.wait_until(
            lambda value: value("rubato_requests_finished_total", outcome="cancelled") == cancelled + 4, seconds=40
        )
        assert settled(server) <= before + 1  # while these clients still hold their ends
    finally:
        for connection in stalled:
            connection.close()


@pytest.mark.full
def test_a_slow_but_steady_reader_gets_all_of_its_answer(server: Server) -> None:
    connection = slow_reader(server, chat(max_tokens=6000, stream=True), buffer=32_768)
    got = bytearray()
    started = time.monotonic()
    try:
        while b"[DONE]" not in got[-200:]:
            assert time.monotonic() - started < TIMEOUT
            part = connection.recv(4096 if time.monotonic() - started < 5 * STALL else 65_536)
            assert part, f"cut off after {len(got)} bytes"
            got += part
            if time.monotonic() - started < 5 * STALL:
                time.sleep(0.05)
    finally:
        connection.close()
    assert len(got) > 2 * SEND_BUFFER_BYTES  # more than the kernel holds: the server did wait for it
    text = bytes(got).count(b'"content":"')
    assert 2 <= text <= 6001  # one token in a piece, or several where they came faster than they were read


def test_requests_that_are_never_finished_are_cut_off(server: Server) -> None:
    before = settled(server)
    host, port = server.url.removeprefix("http://").split(":")
    head = HEAD + b"Content-Length: 100\r\n"
    begun = (b"", b"POST /v1/ch", head, head + b"\r\n" + b'{"model"')
    with contextlib.ExitStack() as stack:  # all at once: each takes as long as the server waits
        connections = []
        for sent in begun:
            connections.append(socket.create_connection((host, int(port)), timeout=10 * STALL))
            stack.enter_context(connections[-1]).sendall(sent)
        for sent, connection in zip(begun, connections, strict=True):
            with contextlib.suppress(ConnectionResetError):
                answer = connection.makefile("rb").read()
                assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
    assert settled(server) <= before + 1


def test_clients_that_leave_at_any_moment(server: Server) -> None:
    before = settled(server)

    def leave(after: float) -> None:
        connection = slow_reader(server, chat(max_tokens=2000, stream=True))
        time.sleep(after)
        connection.close()

    threads = [threading.Thread(target=leave, args=(i * 0.005,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settled(server) <= before + 1


def test_in_the_end_the_books_agree_and_no_key_was_written(server: Server) -> None:
    settled(server)
    assert server.end() == 0
    assert outcomes(server.events())["failed"] == 0
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["logger"] == "rubato.requests"]
    assert Counter(line["outcome"] for line in ended) == outcomes(server.events())
    assert {"starting", "serving", "exit"} <= {line["message"] for line in lines}
    assert "sk-" not in server.log


@pytest.mark.slow
def test_a_stalled_drain_ends(start: Start) -> None:
    server = start(**{**CONFIG, "tenants": {}, "drain_seconds": 20})
    connection = raw_request(server, chat(max_tokens=15_000, stream=True), read=1)
    try:
        assert server.end() == 0  # the client reads no more: it is cut off, not waited for
    finally:
        connection.close()
    assert outcomes(server.events()) in ({"cancelled": 1}, {"completed": 1})
