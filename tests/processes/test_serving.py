"""Servers under load, with clients that go away, engines that fail and operators that stop them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import pytest

from rubato.core.events import Event, Finished, Offered, Tokens
from tests.processes.conftest import STEP, Server, Start

TIMEOUT = 60.0


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}


async def ask_all(server: Server, bodies: Sequence[dict[str, Any]]) -> list[httpx2.Response]:
    limits = httpx2.Limits(max_connections=len(bodies))
    async with httpx2.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as http:
        return await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))


def outcomes(events: Sequence[Event]) -> Counter[str]:
    """How many ended how; that each request offered ended exactly once."""
    offered = [e.id for e in events if isinstance(e, Offered)]
    finished = [e.id for e in events if isinstance(e, Finished)]
    assert len(set(offered)) == len(offered)
    assert sorted(offered) == sorted(finished)
    return Counter(e.outcome for e in events if isinstance(e, Finished))


def raw_request(server: Server, body: dict[str, Any], read: int) -> socket.socket:
    """A request over a bare socket, of which `read` SSE chunks have been read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    got = b""
    while got.count(b"data: ") < read:
        part = connection.recv(4096)
        assert part, got
        got += part
    return connection


def all_free(value: Callable[..., float]) -> bool:
    return value("rubato_kv_blocks_free") == value("rubato_kv_blocks_total") and value("rubato_requests_in_flight") == 0


@pytest.mark.slow
def test_two_hundred_at_once_with_a_bounded_queue(start: Start) -> None:
    server = start(max_in_flight=32)
    sums: list[tuple[float, float]] = []

    async def watch(done: asyncio.Event) -> None:
        while not done.is_set():
            value = await asyncio.to_thread(server.metrics)
            ended = value("rubato_requests_finished_total") + value("rubato_requests_in_flight")
            sums.append((value("rubato_requests_offered_total"), ended))

    async def main() -> list[httpx2.Response]:
        done = asyncio.Event()
        watcher = asyncio.create_task(watch(done))
        answers = await ask_all(server, [chat(max_tokens=20, stream=i % 2 == 0) for i in range(200)])
        done.set()
        await watcher
        return answers

    answers = asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    status = Counter(answer.status_code for answer in answers)
    assert status[200] + status[429] == 200
    assert status[200] >= 29  # best effort: a tenth of the places is kept for requests with an SLO
    assert status[429] > 0
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["x-rubato-reject-reason"] == "rejected-saturated"
    assert len(sums) >= 2
    assert all(offered <= ended for offered, ended in sums)  # what waits may yet be the client's mistake
    assert sums[-1][0] <= 200
    server.wait_until(all_free)
    assert server.end() == 0
    assert outcomes(server.events()) == {"completed": status[200], "refused": status[429]}


def test_a_client_that_leaves_mid_stream_stops_its_request_within_a_step(start: Start) -> None:
    server = start()
    for rude in (False, True):
        connection = raw_request(server, chat(max_tokens=5000, stream=True), read=3)
        if rude:  # RST in place of FIN
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        connection.close()
        server.wait_until(all_free)
    left = server.metrics()("vllm:generation_tokens_total")
    time.sleep(5 * STEP)
    assert server.metrics()("vllm:generation_tokens_total") == left
    assert server.end() == 0
    events = server.events()
    assert outcomes(events) == {"cancelled": 2}
    for end in (e for e in events if isinstance(e, Finished)):
        after = [e for e in events if isinstance(e, Tokens) and e.id == end.id and e.at > end.at]
        assert after == []
        assert end.reason == "client disconnected"
        assert end.output < 1000


@pytest.mark.full
def test_a_client_that_leaves_before_the_answer_takes_its_request_with_it(start: Start) -> None:
    server = start()
    connection = raw_request(server, chat(max_tokens=5000), read=0)
    server.wait_until(lambda value: value("vllm:generation_tokens_total") >= 3)
    connection.close()
    server.wait_until(all_free)
    assert server.end() == 0
    assert outcomes(server.events()) == {"cancelled": 1}


CLIENT = """
import sys, httpx2
body = {"model": "simulated", "prompt": "abc", "max_tokens": 5000, "stream": True}
with httpx2.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


def test_a_client_that_is_killed_takes_its_request_with_it(start: Start) -> None:
    server = start()
    client = subprocess.Popen([sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"data: ")
    finally:
        client.kill()
        client.communicate(timeout=TIMEOUT)
    server.wait_until(all_free)
    assert server.end() == 0
    assert outcomes(server.events()) == {"cancelled": 1}


def test_sigterm_under_load_finishes_what_runs_and_refuses_the_rest(start: Start) -> None:
    server = start(drain_seconds=30)

    async def main() -> tuple[list[httpx2.Response], httpx2.Response, httpx2.Response]:
        running = asyncio.create_task(ask_all(server, [chat(max_tokens=100, stream=i % 2 == 0) for i in range(16)]))
        await asyncio.to_thread(server.wait_until, lambda value: value("vllm:num_requests_running") == 16)
        server.process.send_signal(signal.SIGTERM)
        async with httpx2.AsyncClient(base_url=server.url, timeout=TIMEOUT) as http:
            while (health := await http.get("/health")).status_code == 200:
                pass
        await asyncio.sleep(0.5)  # the door stays open, for new connections too
        async with httpx2.AsyncClient(base_url=server.url, timeout=TIMEOUT) as http:
            late = await http.post("/v1/chat/completions", json=chat(stream=True))
        return await running, late, health

    answers, late, health = asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    assert (late.status_code, late.headers["x-rubato-reject-reason"]) == (503, "rejected-shutting-down")
    assert int(late.headers["retry-after"]) == 1
    assert [a.status_code for a in answers] == [200] * 16
    assert all(a.text.endswith("data: [DONE]\n\n") for a in answers[::2])
    assert [a.json()["usage"]["completion_tokens"] for a in answers[1::2]] == [100] * 8
    assert server.end(None) == 0
    assert outcomes(server.events()) == {"completed": 16, "refused": 1}


@pytest.mark.parametrize("how", ["drain_seconds", "second signal"])
def test_a_drain_has_an_end(start: Start, how: str) -> None:
    server = start(drain_seconds=0.2 if how == "drain_seconds" else 60)

    async def main() -> list[httpx2.Response]:
        running = asyncio.create_task(ask_all(server, [chat(max_tokens=5000), chat(max_tokens=5000, stream=True)]))
        await asyncio.to_thread(server.wait_until, lambda value: value("vllm:generation_tokens_total") >= 6)
        server.process.send_signal(signal.SIGINT)
        if how == "second signal":
            await asyncio.to_thread(server.wait_until, lambda value: "draining" in server.log)
            server.process.send_signal(signal.SIGINT)
        return await running

    whole, stream = asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    assert json.loads(stream.text.split("data: ")[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in stream.text
    assert server.end(None) == 0
    assert outcomes(server.events()) == {"failed": 2}


def test_an_engine_that_fails_once_ends_its_requests_and_the_server_goes_on(start: Start) -> None:
    server = start(engine={"kind": "tests.processes.failing", "first": 10, "times": 1})
    answers = asyncio.run(ask_all(server, [chat(max_tokens=50), chat(max_tokens=50, stream=True)]))
    assert answers[0].status_code == 500
    assert "injected failure" in answers[0].json()["error"]["message"]
    assert "injected failure" in json.loads(answers[1].text.split("data: ")[-1])["error"]["message"]
    (again,) = asyncio.run(ask_all(server, [chat()]))
    assert again.json()["usage"]["completion_tokens"] == 5
    server.wait_until(all_free)
    assert server.end() == 0
    assert outcomes(server.events()) == {"failed": 2, "completed": 1}


def test_an_engine_beyond_recovery_ends_the_process_with_an_error(start: Start) -> None:
    server = start(engine={"kind": "tests.processes.failing", "first": 1, "times": 10_000})
    with httpx2.Client(base_url=server.url, timeout=TIMEOUT) as http:
        for _ in range(3):
            assert http.post("/v1/chat/completions", json=chat()).status_code == 500
    assert server.end(None) == 1
    assert "injected failure" in server.log
    assert outcomes(server.events()) == {"failed": 3}


def test_a_server_at_an_ipv6_address_prints_a_url_that_a_client_can_use(start: Start) -> None:
    server = start(host="::1")
    assert server.url.startswith("http://[::1]:")
    assert httpx2.get(f"{server.url}/health", timeout=TIMEOUT).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"policy": "eddf"}, "did you mean 'edf'"),
        pytest.param({"max_inflight": 3}, "did you mean 'max_in_flight'", marks=pytest.mark.full),
        pytest.param({"latency": "afine"}, "did you mean 'affine'", marks=pytest.mark.full),
        ({"host": "203.0.113.1"}, "give another --port, such as 0 for any free one, or --host"),
        pytest.param({"host": "2001:db8::1"}, "cannot listen on [2001:db8::1]:", marks=pytest.mark.full),
    ],
)
def test_an_impossible_configuration_is_one_sentence_and_status_2(start: Start, config: Any, says: str) -> None:
    server = start(wait=False, **config)
    assert server.end(None) == 2
    assert says in server.log
    assert "Traceback" not in server.log
