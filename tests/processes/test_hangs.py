"""Servers in which something hangs end when they are told to, with an exit status that says so."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import httpx2
import pytest

from tests.processes.conftest import Server, Start
from tests.processes.test_serving import chat, outcomes, raw_request

SECONDS = 30.0  # after which a test is not merely slow


def asked(server: Server) -> socket.socket:
    """A request that nothing will answer."""
    return raw_request(server, chat(), read=0)


@pytest.mark.slow
def test_sigterm_ends_a_server_whose_step_or_whose_policy_hangs(start: Start) -> None:
    engine = start(engine="tests.processes.hanging", drain_seconds=0)
    policy = start(policy="tests.processes.hanging", drain_seconds=0)
    connections = [asked(engine), asked(policy)]
    try:
        engine.wait_until(lambda value: value("vllm:num_requests_running") == 1)
        assert httpx2.get(f"{engine.url}/ready").status_code == 200  # it may merely be slow
        time.sleep(0.5)  # the other one cannot say that it has begun
        for server in (engine, policy):
            server.process.send_signal(signal.SIGTERM)
        assert [server.end(None) for server in (engine, policy)] == [1, 1]
    finally:
        for connection in connections:
            connection.close()
    assert outcomes(engine.events()) == {"failed": 1}  # only its thread hung: its client was told
    assert "exit: the server has not ended by itself" in policy.log


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_process_with_an_error(start: Start) -> None:
    server = start(engine="tests.processes.hanging", step_timeout_seconds=0.3)
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=chat(), timeout=SECONDS)
    assert answer.status_code == 500
    assert "the engine hangs: a step of" in answer.json()["error"]["message"]
    assert server.end(None) == 1


def test_sigterm_ends_a_server_that_still_starts(start: Start) -> None:
    server = start(wait=False, engine={"kind": "tests.processes.hanging", "loads": True}, drain_seconds=20)
    until = time.monotonic() + SECONDS
    while "starting" not in server.log:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert server.end() == 0


@pytest.mark.full
def test_a_policy_that_computes_for_five_seconds_loses_nothing(start: Start) -> None:
    server = start(policy={"name": "tests.processes.hanging", "seconds": 5.0}, stall_seconds=1)
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=chat(), timeout=SECONDS)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 5)
    assert server.end() == 0


def test_a_log_whose_reader_has_stopped_holds_up_no_request(start: Start) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:  # full before the server writes its first line
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    try:
        server = start(stderr=writer)
        answers = [httpx2.post(f"{server.url}/v1/chat/completions", json=chat(), timeout=SECONDS) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert server.metrics()("rubato_log_lines_dropped_total") == 0  # they wait in memory
        assert server.end() == 0  # the lines are lost, and the process does not wait for their reader
    finally:
        os.close(reader)
        os.close(writer)
