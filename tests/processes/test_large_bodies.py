"""Bodies that would take long to parse or to tokenize, against a real server: each is answered at once, for little CPU
time, and is charged.

What is asserted is the server's CPU time, which holds up its event loop while it is spent there; generously, since it
depends on the machine. How long /health took meanwhile is printed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.processes.conftest import Server, Start, servers

MOST = 4 << 20  # above the default
CPU_SECONDS = 0.5  # per body; before they were bounded the worst took 1.0 s, at 4 MiB
TIMEOUT = 60.0
KEY = {"authorization": "Bearer sk-a"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = b'{"model":"simulated","max_tokens":2,"messages":[{"role":"user","content":"a"'
WORD = b'{"model":"simulated","max_tokens":2,"prompt":'
FIELDS = b",".join(b'"%x":1' % number for number in range(420_000))
ROOM = MOST - 200

# name -> path, body, status
BODIES: dict[str, tuple[str, bytes, int]] = {
    "token ids": (TEXT, WORD + b"[" + b"1," * (ROOM // 2) + b"1]}", 400),
    "prompts of an id": (TEXT, WORD + b"[" + b"[1]," * (ROOM // 4) + b"[1]]}", 400),
    "prompts of a letter": (TEXT, WORD + b"[" + b'"a",' * (ROOM // 4) + b'"a"]}', 400),
    "a text": (TEXT, WORD + b'"' + b"a b " * (ROOM // 4) + b'"}', 400),
    "a stop string": (TEXT, WORD + b'"a","stop":"' + b"do " * (ROOM // 3) + b'"}', 200),
    "a model's name": (TEXT, b'{"prompt":"a","model":"' + b"a" * ROOM + b'"}', 404),
    "unknown fields": (TEXT, WORD + b'"a",' + FIELDS + b"}", 400),
    "fields of metadata": (CHAT, HELLO + b'}],"metadata":{' + FIELDS + b"}}", 400),
    "lists in metadata": (CHAT, HELLO + b'}],"metadata":[' + b"[]," * (ROOM // 3) + b"[]]}", 400),
    "fields of a message": (CHAT, HELLO + b"," + FIELDS + b"}]}", 400),
    "parts of a message": (
        CHAT,
        b'{"model":"simulated","max_tokens":2,"messages":[{"role":"user","content":['
        + b'{"type":"text","text":""},' * (ROOM // 27)
        + b'{"type":"text","text":"a"}]}]}',
        400,
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory.mktemp("bodies")) as start:
        yield _server(start)


def _server(start: Start) -> Server:
    tenants = {"a": {"keys": ["sk-a"], "requests_per_minute": 20}}
    server = start(engine={"kind": "simulated", "max_model_len": 8192}, tenants=tenants, max_body_bytes=MOST)
    _post(server, TEXT, WORD + b'"a"}')  # what is loaded at the first request is loaded
    return server


def _post(server: Server, path: str, body: bytes) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", content=body, headers=KEY, timeout=TIMEOUT)


def _cpu_seconds(server: Server) -> float:
    user, system = Path(f"/proc/{server.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / 100


def _longest_ping(server: Server, until: threading.Event, found: list[float]) -> None:
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:
        while not until.wait(0.01):
            began = time.perf_counter()
            assert http.get("/health").status_code == 200
            found.append(time.perf_counter() - began)


@pytest.mark.full
@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_four_mebibytes(server: Server, name: str) -> None:
    path, body, status = BODIES[name]
    assert MOST * 0.95 < len(body) <= MOST
    before, pings, over = _cpu_seconds(server), [0.0], threading.Event()
    pinging = threading.Thread(target=_longest_ping, args=(server, over, pings))
    pinging.start()
    try:
        answer = _post(server, path, body)
    finally:
        over.set()
        pinging.join()
    spent = _cpu_seconds(server) - before
    print(f"{name}: {spent:.2f} s of CPU time, longest ping {max(pings) * 1e3:.0f} ms")
    assert answer.status_code == status, answer.text[:500]
    assert int(answer.headers["x-ratelimit-remaining-requests"]) < 20
    assert spent < CPU_SECONDS


def test_beyond_its_rate_a_tenants_body_is_not_waited_for(start: Start) -> None:
    """The answer comes before any of the body has been sent."""
    server = start(tenants={"a": {"keys": ["sk-a"], "requests_per_minute": 1}})
    assert _post(server, TEXT, b"{").status_code == 400
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-a\r\nContent-Length: 1000\r\n\r\n"
        )
        assert connection.recv(65_536).startswith(b"HTTP/1.1 429 ")
    value = server.metrics()
    assert value("rubato_requests_offered_total") == value("rubato_requests_finished_total") == 1
