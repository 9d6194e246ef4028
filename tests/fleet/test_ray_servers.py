"""Servers that Ray actors start: stubs in vLLM's place, which are killed in every way; nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from rubato.core.clock import WallClock, run_strict
from rubato.core.events import Event, Finished, Left, Lost, Placed, Tokens
from rubato.core.link_messages import TOKEN
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.fleet.build import cluster_of
from rubato.fleet.call import Calls
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.ray_servers import KeptFleet, RayServerHost, RayServers
from rubato.fleet.server_actor import ServerCommand
from tests.doubles import request
from tests.fleet.test_server_fleet import MemoryCall

ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # after which a test is not merely slow
GONE = 10.0  # seconds after which nothing may be left of what was killed


def stub(*words: str) -> ServerCommand:
    """A stub with a child of its own, which ignores SIGTERM, as vLLM has children."""
    program = "import subprocess,runpy,sys; subprocess.Popen(['sh','-c','trap \"\" TERM; sleep 1000 & wait']); "
    program += "sys.argv[0]='stub'; runpy.run_module('tests.stubs', run_name='__main__')"
    command = [sys.executable, "-c", program, "--host", "{host}", "--port", "{port}", *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return ServerCommand(command, {"PYTHONPATH": path}, 30.0)


@pytest.fixture(scope="module")
def a_ray_cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "of-this-test")


class Fleet:
    """A cluster of servers on Ray, its events, and the books checked at each."""

    def __init__(
        self, servers: int, command: ServerCommand, autoscaler: object | None = None, **resources: float
    ) -> None:
        self.calls: Calls = {}
        chosen = ClusterOptions(PolicyChoice("edf"), ReplicaOptions(causes=False))
        options = replace(chosen, autoscaler=autoscaler or KeptFleet(servers))
        clock = WallClock()
        self.servers = RayServers(command, clock, options, self.calls, resources=resources)
        self.cluster: Cluster = cluster_of([self.servers.host] * servers, clock, options, self.servers.host)
        self.events: list[Event] = []
        self.cluster.listen(self.hear)

    def hear(self, event: Event) -> None:
        assert self.cluster.offered == self.cluster.finished + self.cluster.in_flight
        self.events.append(event)

    def host(self, id: str) -> RayServerHost:
        found = self.cluster.hosts[id]
        assert isinstance(found, RayServerHost)
        return found

    def offer(self, *requests: Request) -> None:
        for each in requests:
            stages = (replace(each.stages[0], token_ids=tuple(range(each.stages[0].prompt))),)
            asked = replace(each, id=f"cmpl-{each.id}", stages=stages, arrival=self.cluster.clock.now())
            self.calls[asked.id] = MemoryCall(asked)
            self.cluster.offer(asked)

    async def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.02)

    def tokens(self) -> int:
        return sum(isinstance(e, Tokens) for e in self.events)

    def ends(self) -> dict[str, Finished]:
        found = [e for e in self.events if isinstance(e, Finished)]
        assert max(Counter(e.id for e in found).values()) == 1
        return {e.id: e for e in found}

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(e, kind) for e in self.events)


def of_group(pid: int) -> list[int]:
    """Pids of the processes of this process's group."""
    group = os.getpgid(pid)
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.getpgid(int(name)) == group and alive(int(name)):
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def processes(fleet: Fleet, id: str) -> tuple[int, int, list[int]]:
    """The actor's pid, the server's, and those of all processes of the server, its guard too."""
    actor, server = await fleet.host(id).actor.pids.remote()
    guard = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    mine = [*of_group(server), guard]
    assert len(mine) >= 4  # server, sh, sleep, guard
    return actor, server, mine


def seconds_until_gone(pids: list[int]) -> float:
    began = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < began + GONE, [pid for pid in pids if alive(pid)]
        time.sleep(0.05)
    return time.monotonic() - began


def work(number: int, most: int = 60) -> list[Request]:
    return [request(f"q{i}", 40, ttft=20.0, tpot=2.0, most=most) for i in range(number)]


@pytest.mark.usefixtures("a_ray_cluster")
@pytest.mark.parametrize("killed", ["actor", "server", "guard"])
def test_what_a_killed_server_served_goes_on_elsewhere(killed: str) -> None:
    """And another comes in its place; nothing of the killed one is left, nor of any at the end."""
    left: list[int] = []

    async def main() -> None:
        fleet = Fleet(2, stub("--step", "0.02"))
        await fleet.cluster.start()
        assert all(host.linked for host in map(fleet.host, ("r0", "r1")))
        actor, server, mine = await processes(fleet, "r0")
        left.extend((await processes(fleet, "r1"))[2])
        fleet.offer(*work(12))
        await fleet.until(lambda: fleet.tokens() > 100)
        os.kill({"actor": actor, "server": server, "guard": mine[-1]}[killed], signal.SIGKILL)
        began = time.monotonic()
        await fleet.until(lambda: fleet.count(Left) == 1)
        assert time.monotonic() - began < 2.0
        await fleet.until(lambda: not fleet.cluster.in_flight)
        assert {(e.outcome, e.output) for e in fleet.ends().values()} == {("completed", 60)}
        assert fleet.count(Lost) > 0
        assert await asyncio.to_thread(seconds_until_gone, mine) < GONE
        await fleet.until(lambda: len(fleet.cluster.hosts) == 2)
        assert set(fleet.cluster.hosts) == {"r1", "r2"}
        left.extend((await processes(fleet, "r2"))[2])
        fleet.offer(*[replace(r, id=f"again-{r.id}") for r in work(4, 5)])
        await fleet.until(lambda: not fleet.cluster.in_flight)
        assert {e.replica for e in fleet.events if isinstance(e, Placed) and "again" in e.id} == {"r1", "r2"}
        await fleet.cluster.close()

    run_strict(main())
    assert seconds_until_gone(left) < 1.0  # `close` has waited
