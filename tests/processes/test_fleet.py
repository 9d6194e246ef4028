"""A server whose replicas are Ray actors: the same API; what a killed or frozen actor served goes on."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import httpx2
import pytest

from rubato.core.events import Finished, Lost, Tokens
from tests.processes.conftest import Server, Start
from tests.processes.test_serving import chat, outcomes

REQUESTS, OUTPUT = 8, 100


def tree(server: Server) -> dict[int, str]:
    """Of the server and all processes below it: pid -> command line."""
    lines = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parent, name = {}, {}
    for line in lines.splitlines():
        pid, above, args = line.split(None, 2)
        parent[int(pid)], name[int(pid)] = int(above), args

    def below(pid: int) -> bool:
        return pid == server.process.pid or (pid in parent and below(parent[pid]))

    return {pid: args for pid, args in name.items() if below(pid)}


def actors(server: Server) -> list[int]:
    """Pids of the replicas' processes."""
    return [pid for pid, args in tree(server).items() if args.startswith("ray::LinkedHost")]


def wait_for_actors(server: Server) -> None:
    deadline = time.monotonic() + 30
    while len(actors(server)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)


def addresses(pids: Iterable[int]) -> set[str]:
    """What these processes listen on with TCP."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(fd))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                words = struct.iter_unpack("=I", bytes.fromhex(local.split(":")[0]))
                address = ipaddress.ip_address(b"".join(struct.pack(">I", word) for (word,) in words))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def running(pid: int) -> bool:
    """Whether there is such a process that has not ended, waited for by its parent or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def ask(server: Server, number: int, signal_number: int) -> list[httpx2.Response]:
    """All requests at once, and in the middle of them a signal to one replica."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        body = chat(max_tokens=OUTPUT, ignore_eos=True)
        answers = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(number)]
        while not any(isinstance(e, Tokens) for e in server.events_so_far()):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        os.kill(actors(server)[0], signal_number)
        return await asyncio.gather(*answers)


@pytest.mark.slow
def test_a_killed_replica_costs_no_request(start: Start) -> None:
    server = start(fleet={"kind": "ray"}, replicas=2)
    wait_for_actors(server)
    assert addresses(tree(server)) == {"127.0.0.1"}  # the server's own port among them
    answers = asyncio.run(ask(server, REQUESTS, signal.SIGKILL))
    assert [a.status_code for a in answers] == [200] * REQUESTS
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [OUTPUT] * REQUESTS
    assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1  # nothing twice, nothing missing
    assert server.metrics()("rubato_requests_in_flight") == 0
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert server.end() == 0
    events = server.events()
    assert outcomes(events) == {"completed": REQUESTS}
    assert len({e.id for e in events if isinstance(e, Lost)}) == REQUESTS // 2
    assert all(e.output == OUTPUT for e in events if isinstance(e, Finished))
    assert not actors(server)


@pytest.mark.full  # it waits for SILENT seconds; in virtual time: tests/fleet/test_silence.py
def test_a_frozen_replica_costs_no_request_and_does_not_hold_up_the_end(start: Start) -> None:
    server = start(fleet={"kind": "ray"}, replicas=2, drain_seconds=3)
    wait_for_actors(server)
    processes = tree(server)
    try:
        answers = asyncio.run(ask(server, 6, signal.SIGSTOP))
        assert [a.status_code for a in answers] == [200] * 6
        assert [a.json()["usage"]["completion_tokens"] for a in answers] == [OUTPUT] * 6
        assert len({a.json()["choices"][0]["message"]["content"] for a in answers}) == 1
        assert server.metrics()("rubato_requests_in_flight") == 0
        assert httpx2.get(f"{server.url}/health").status_code == 200
        assert "has not reported for 10 s" in server.log
        for pid in actors(server):  # the other one, too, and it is not known yet when the server is to end
            os.kill(pid, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        deadline = time.monotonic() + 30
        while (left := [pid for pid in processes if running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, [processes[pid] for pid in left]
    finally:
        for pid, args in processes.items():  # a failed test leaves no stopped process, which nothing else would end
            if args.startswith("ray::LinkedHost") and running(pid):
                os.kill(pid, signal.SIGKILL)
    events = server.events()
    assert outcomes(events) == {"completed": 6}
    assert len({e.id for e in events if isinstance(e, Lost)}) == 3
