"""Floods of connections, heads and bodies, against a server with few file descriptors."""

from __future__ import annotations

import contextlib
import http.client
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.processes.conftest import Server, Start, servers

TIMEOUT = 60.0
STALL = 1.0
KEYS = {"a": {"keys": ["sk-a"]}}


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


@contextlib.contextmanager
def held(server: Server, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection(address(server), timeout=TIMEOUT))
            client.sendall(sent)
            client.setblocking(False)
            clients.append(client)
        yield clients


def is_open(client: socket.socket) -> bool:
    try:
        client.send(b"a")
        return client.recv(1 << 16) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("begun", ["head", pytest.param("body", marks=pytest.mark.full)])
@pytest.mark.slow
def test_health_answers_beside_more_trickling_connections_than_descriptors(start: Start, begun: str) -> None:
    server = start(stall_seconds=STALL, descriptors=256)
    head = b"POST /v1/completions HTTP/1.1\r\n"
    with held(server, 300, head + (b"X: " if begun == "head" else b"Content-Length: 1000000\r\n\r\n")) as clients:
        deadline = time.monotonic() + TIMEOUT
        left = len(clients)
        while left:
            assert httpx2.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
            assert len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 200
            assert time.monotonic() < deadline
            left = sum(map(is_open, clients))
            assert left <= 128
            time.sleep(0.2)
    assert server.end() == 0
    assert len(server.log) < 100_000
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_health_comes_back_after_all_descriptors_were_used_up(start: Start) -> None:
    server = start()
    open_ = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (open_ + 10, open_ + 10))  # less than at the start
    with held(server, 30, b"GET"):
        deadline = time.monotonic() + TIMEOUT
        while "no connection can be accepted (Too many open files)" not in server.log:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.5)  # it tries again each second
    assert httpx2.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
    assert server.end() == 0
    assert len(server.log) < 10_000
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that asks for a key, for the tests of bodies."""
    with servers(tmp_path_factory.mktemp("keyed")) as start:
        server = start(tenants=KEYS)
        yield server
        assert server.end() == 0


def test_an_endless_body_without_a_key_is_not_read(keyed: Server) -> None:
    sent, block = 0, b"10000\r\n" + b"a" * 65536 + b"\r\n"
    with socket.create_connection(address(keyed), timeout=TIMEOUT) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 1 << 30:
                client.sendall(block)
                sent += len(block)
        assert sent < 100 << 20  # what the server drops, and what two kernels hold


@pytest.mark.parametrize(("key", "status"), [("no", 401), ("sk-a", 413)])
def test_a_client_that_sends_all_of_its_body_first_gets_its_answer(keyed: Server, key: str, status: int) -> None:
    headers = {"authorization": f"Bearer {key}"}
    content = b" " * (10 << 20)
    for body in (content, iter([content[: 1 << 20]] * 10)):
        client = http.client.HTTPConnection(*address(keyed), timeout=TIMEOUT)
        client.request("POST", "/v1/completions", body=body, headers=headers)  # raises where the connection is reset
        answer = client.getresponse()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.read().startswith(b'{"error":')
        client.close()
    head = httpx2.head(f"{keyed.url}/health", timeout=TIMEOUT)
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.full
def test_a_kept_connection_is_not_closed_on_a_request_that_came_while_the_server_was_stopped(start: Start) -> None:
    """Its own timer of 5 s is due when it goes on, and so is the request."""
    server = start()
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    connection.request("GET", "/health")
    server.process.send_signal(signal.SIGCONT)
    assert connection.getresponse().status == 200
    connection.close()
    assert server.end() == 0
