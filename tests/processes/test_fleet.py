"""A server whose replicas are Ray actors: the same API; what a killed actor served goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import httpx2

from rubato.core.events import Finished, Lost, Tokens
from tests.processes.conftest import Server, Start
from tests.processes.test_serving import chat, outcomes

REQUESTS, OUTPUT = 8, 100


def actors(server: Server) -> list[int]:
    """Pids of the replicas' processes, below the server's."""
    lines = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parent, name = {}, {}
    for line in lines.splitlines():
        pid, above, args = line.split(None, 2)
        parent[int(pid)], name[int(pid)] = int(above), args

    def below(pid: int) -> bool:
        return pid == server.process.pid or (pid in parent and below(parent[pid]))

    return [pid for pid in name if name[pid].startswith("ray::_Actor") and below(pid)]


async def ask(server: Server) -> list[httpx2.Response]:
    """All requests at once, and in the middle of them one replica is killed."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http:
        body = chat(max_tokens=OUTPUT, ignore_eos=True)
        answers = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(REQUESTS)]
        while not any(isinstance(e, Tokens) for e in server.events_so_far()):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        os.kill(actors(server)[0], signal.SIGKILL)
        return await asyncio.gather(*answers)


def test_a_killed_replica_costs_no_request(start: Start) -> None:
    server = start(fleet={"kind": "ray"}, replicas=2)
    deadline = time.monotonic() + 30
    while len(actors(server)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    answers = asyncio.run(ask(server))
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
