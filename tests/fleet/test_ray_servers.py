"""Servers that Ray actors start: stubs in vLLM's place, which are killed in every way; nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
import ray
import ray.cluster_utils

from rubato.core.clock import WallClock, run_strict
from rubato.core.events import Event, Finished, HandedOff, Joined, Left, Lost, Tokens
from rubato.core.interfaces import Scaling
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Progress, Request
from rubato.fleet import ray_servers
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.ray_servers import RayServerReplica, RayServers, ReplaceLost
from rubato.fleet.relay import Trips
from rubato.fleet.server_actor import ServerCommand
from rubato.fleet.server_guard import descendants
from rubato.fleet.upstream import Headers
from rubato.wire.link_keys import TOKEN_ENV
from tests.fleet.test_server_fleet import MemoryTrip
from tests.kit import request
from tests.processes.conftest import servers as processes_of_ours

ROOT = Path(__file__).parents[2]
SECONDS = 60.0  # after which a test is not merely slow
GONE = 10.0  # seconds after which nothing may be left of what was killed


def stub(*words: str, stubborn: bool = False) -> ServerCommand:
    """A stub with children, as vLLM has some. stubborn: they ignore SIGTERM."""
    ignore = 'trap \\"\\" TERM;' if stubborn else ""
    program = f"import subprocess,runpy,sys; subprocess.Popen(['sh','-c','{ignore} sleep 1000 & wait']); "
    program += "sys.argv[0]='stub'; runpy.run_module('tests.stubs', run_name='__main__')"
    command = [sys.executable, "-c", program, "--host", "{host}", "--port", "{port}", *words]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return ServerCommand(command, {"PYTHONPATH": path}, 30.0)


@dataclass
class Nodes:
    """Two nodes on this machine, of 2 GPUs each as they say; the second can be killed."""

    all: Any
    second: Any


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    shape = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20}
    made = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={**shape, "include_dashboard": False})
    second = made.add_node(**shape)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield Nodes(made, second)
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "of-this-test")


class Continued(MemoryTrip):
    """Goes on elsewhere from what has come, whether or not the link has told its ids."""

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        received = 0 if progress is None else sum(map(len, progress.times))
        prompt = [*self.request.stages[0].token_ids, *[7] * received]
        body = {"prompt": prompt, "max_tokens": self.request.sampling.max_tokens - received, "stream": True}
        return [("x-request-id", self.answer.removeprefix("cmpl-"))], orjson.dumps(body)


class Fleet:
    """A cluster of servers on Ray, its events, and the books checked at each."""

    def __init__(
        self, servers: int, command: ServerCommand, autoscaler: object | None = None, **resources: float
    ) -> None:
        self.trips: Trips = {}
        self.sent: list[Continued] = []
        chosen = ClusterOptions(PolicyChoice("edf"), ReplicaOptions(causes=False))
        options = replace(chosen, autoscaler=autoscaler or ReplaceLost(servers))
        clock = WallClock()
        self.servers = RayServers(command, clock, options, self.trips, resources=resources)
        self.cluster: Cluster = cluster_of([self.servers.host] * servers, clock, options, self.servers.host)
        self.events: list[Event] = []
        self.cluster.listen(self.hear)

    def hear(self, event: Event) -> None:
        assert self.cluster.offered == self.cluster.finished + self.cluster.in_flight
        self.events.append(event)

    def host(self, id: str) -> RayServerReplica:
        found = self.cluster.hosts[id]
        assert isinstance(found, RayServerReplica)
        return found

    def offer(self, *requests: Request) -> None:
        for each in requests:
            stages = (replace(each.stages[0], token_ids=tuple(range(each.stages[0].prompt))),)
            asked = replace(each, id=f"cmpl-{each.id}", stages=stages, arrival=self.cluster.clock.now())
            self.trips[asked.id] = call = Continued(asked)
            self.sent.append(call)
            self.cluster.offer(asked)

    async def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def tokens(self) -> int:
        return sum(isinstance(e, Tokens) for e in self.events)

    def responses_ended(self) -> bool:
        """The link tells of a request's end before the last bytes of its response come."""
        return not self.cluster.in_flight and all(call.ends for call in self.sent)

    def ends(self) -> dict[str, Finished]:
        found = [e for e in self.events if isinstance(e, Finished)]
        assert max(Counter(e.id for e in found).values()) == 1
        return {e.id: e for e in found}

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(e, kind) for e in self.events)


def all_of(fleet: Fleet, tokens: int) -> bool:
    """Whether all ended with so many tokens, as events tell and as came."""
    wrong = {
        id: (end.outcome, end.reason, end.output, fleet.trips[id].streamed)
        for id, end in fleet.ends().items()
        if (end.outcome, end.output, fleet.trips[id].streamed) != ("completed", tokens, tokens)
    }
    assert not wrong
    return True


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


def processes(fleet: Fleet, id: str) -> tuple[int, int, list[int]]:
    """The actor's pid, the server's, and those of all processes of the server, its guard too."""
    at = fleet.host(id).started
    guard = int(Path(f"/proc/{at.pid}/stat").read_text().rpartition(")")[2].split()[1])
    mine = [*of_group(at.pid), guard]
    assert len(mine) >= 4  # server, sh, sleep, guard
    return at.actor, at.pid, mine


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def environment(pid: int) -> dict[str, str]:
    """As it was started with."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(word.decode().split("=", 1) for word in words if b"=" in word)


def seconds_until_gone(pids: list[int]) -> float:
    began = time.monotonic()
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < began + GONE, [command(pid) for pid in pids if alive(pid)]
        time.sleep(0.05)
    return time.monotonic() - began


def work(number: int, most: int = 60) -> list[Request]:
    return [request(f"q{i}", 40, ttft=20.0, tpot=2.0, most=most) for i in range(number)]


def test_a_fleet_keeps_its_number_and_waits_longer_after_each_loss() -> None:
    fleet = ReplaceLost(3)
    three = [None] * 3
    assert fleet.scale((), three, 0, 0.0) == Scaling()  # type: ignore[arg-type]
    assert fleet.scale((), three[:2], 1, 0.0) == Scaling(wake_at=5.0)  # type: ignore[arg-type]
    fleet.observe([Left(10.0, "r0")])
    assert fleet.scale((), three[:2], 0, 10.0) == Scaling(add=1, wake_at=15.0)  # type: ignore[arg-type]
    for at, waits in ((20.0, 2.0), (30.0, 4.0), (40.0, 8.0), (50.0, 16.0), (60.0, 32.0), (70.0, 60.0), (80.0, 60.0)):
        fleet.observe([Left(at, "r1")])
        assert fleet.scale((), three[:1], 0, at) == Scaling(wake_at=at + waits)  # type: ignore[arg-type]
        assert fleet.scale((), three[:1], 0, at + waits).add == 2  # type: ignore[arg-type]
    fleet.observe([Left(1000.0, "r2")])
    assert fleet.scale((), three[:2], 0, 1000.0).add == 1  # type: ignore[arg-type]


@pytest.mark.full  # a node that is killed, below, kills all of these at once
def test_what_killed_servers_served_goes_on_elsewhere(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor, then a server, then a guard is killed; another comes in its place, and nothing is left of any."""
    monkeypatch.setattr(ray_servers, "LOSS_WINDOW_S", 0.0)  # no waiting after the second
    left: list[int] = []

    async def main() -> None:
        fleet = Fleet(2, stub("--step", "0.02", stubborn=True), num_gpus=2)
        await fleet.cluster.start()
        assert all(host.is_linked for host in map(fleet.host, ("r0", "r1")))
        assert len({host.url.rpartition(":")[0] for host in map(fleet.host, ("r0", "r1"))} - {"http://127.0.0.1"}) == 1
        gpus = [environment(fleet.host(id).started.pid)["CUDA_VISIBLE_DEVICES"] for id in ("r0", "r1")]
        assert gpus == ["0,1", "0,1"]  # of each node
        for turn, killed in enumerate(("actor", "server", "guard")):
            id = next(iter(fleet.cluster.hosts))
            actor, server, mine = processes(fleet, id)
            fleet.offer(*[replace(r, id=f"{killed}-{r.id}") for r in work(8)])
            before = fleet.tokens()
            await fleet.until(lambda least=before + 60: fleet.tokens() > least)  # type: ignore[misc]
            os.kill({"actor": actor, "server": server, "guard": mine[-1]}[killed], signal.SIGKILL)
            await fleet.until(lambda losses=turn + 1: fleet.count(Left) == losses)  # type: ignore[misc]
            await fleet.until(fleet.responses_ended)
            assert any(isinstance(e, Lost | HandedOff) and killed in e.id for e in fleet.events)
            assert await asyncio.to_thread(seconds_until_gone, mine) < GONE
            await fleet.until(lambda: len(fleet.cluster.hosts) == 2)
        assert all_of(fleet, 60)
        assert set(fleet.cluster.hosts) == {"r3", "r4"}
        for id in fleet.cluster.hosts:
            left.extend(processes(fleet, id)[2])
        await fleet.cluster.close()

    run_strict(main())
    assert seconds_until_gone(left) < 1.0  # `close` has waited


@pytest.mark.slow
def test_an_autoscaler_adds_and_drains_servers(nodes: Nodes) -> None:
    class AsTold:
        add, drain = 1, ""

        def observe(self, events: object) -> None: ...

        def scale(self, unplaced: object, fleet: object, starting: int, now: float) -> Scaling:
            add, drain, self.add, self.drain = self.add, self.drain, 0, ""
            return Scaling(add=add, drain=[drain] if drain else [])

    async def main() -> None:
        told = AsTold()
        fleet = Fleet(1, stub("--step", "0.02"), told)
        await fleet.cluster.start()
        fleet.offer(*work(4, 20))
        await fleet.until(lambda: fleet.count(Joined) == 1)
        told.drain = "r0"
        mine = processes(fleet, "r0")[2]
        fleet.offer(*[replace(r, id=f"more-{r.id}") for r in work(4, 40)])
        await fleet.until(lambda: fleet.count(Left) == 1)
        assert await asyncio.to_thread(seconds_until_gone, mine) < GONE
        await fleet.until(fleet.responses_ended)
        assert {e.outcome for e in fleet.ends().values()} == {"completed"}
        assert not fleet.count(Lost)
        await fleet.cluster.close()

    run_strict(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], r"status 3.*\n    no such model"),
        (["/no/such/python"], "its command cannot be run: .*No such file"),
        ([sys.executable, "-c", "import time; print('loads', flush=True); time.sleep(99)"], r"not serve .*\n    loads"),
    ],
)
def test_a_server_that_does_not_start_says_why(nodes: Nodes, command: list[str], says: str) -> None:
    async def main() -> None:
        fleet = Fleet(1, ServerCommand(command, start_seconds=1.0))
        with pytest.raises(ValueError, match=f"(?s)server r0 did not start: .*{says}"):
            await fleet.cluster.start()
        await fleet.cluster.close()

    run_strict(main())


@pytest.mark.slow
def test_without_room_the_start_says_so(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_servers, "PLACEMENT_S", 0.5)

    async def main() -> None:
        fleet = Fleet(1, stub(), num_gpus=3)
        with pytest.raises(ValueError, match=r"no place for server r0 .* needs \{'num_gpus': 3\} on one node"):
            await fleet.cluster.start()
        await fleet.cluster.close()

    run_strict(main())


FAKE = """#!{python}
import json, sys, runpy
asked = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
told = json.loads(asked["additional-config"])["rubato"]
assert told["link"] == {{"host": asked["host"]}}, told
sys.path[:0] = {path!r}
sys.argv = ["stub", "--host", asked["host"], "--port", asked["port"], "--policy", told["policy"], "--step", "0.02"]
runpy.run_module("tests.stubs", run_name="__main__")
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_command_that_is_killed(tmp_path: Path) -> None:
    """`rubato serve --engine vllm` with a Ray of its own, and stubs in the place of vLLM's interpreter."""
    fake = tmp_path / "python"
    fake.write_text(FAKE.format(python=sys.executable, path=[str(ROOT), str(ROOT / "src")]))
    fake.chmod(0o755)
    (tmp_path / "server").mkdir()
    with processes_of_ours(tmp_path / "server") as start:
        server = start(
            model="stub", engine={"kind": "vllm", "python": str(fake)}, latency=None, replicas=2, event_log=None,
            fleet={"kind": "ray", "num_gpus": 0}, tiers={"chat": {"ttft_ms": 5000, "tpot_ms": 500}},
        )  # fmt: skip
        told = re.findall(r"replica r\d serves at http://127.0.0.1:\d+ \(process (\d+), actor (\d+)", server.log)
        assert len(told) == 2
        mine = [pid for at in told for pid in (*of_group(int(at[0])), int(at[1]))]
        ray_agents = (
            "ray::DashboardAgent",
            "ray::RuntimeEnvAgent",
        )  # they ask a dead Ray for up to 30 s
        mine += [pid for pid in descendants(server.process.pid) if not command(pid).startswith(ray_agents)]
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "service_tier": "chat", "model": "stub"}
        done = [httpx2.post(f"{server.url}/v1/completions", json=body, timeout=20.0) for _ in range(4)]
        assert [reply.status_code for reply in done] == [200] * 4
        assert [reply.json()["rubato"]["met"] for reply in done] == [True] * 4
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert seconds_until_gone(mine) < GONE


@pytest.mark.slow
def test_a_node_is_killed_and_requests_finish_on_the_other(nodes: Nodes) -> None:
    """Last: the second node is gone after it."""

    async def main() -> None:
        fleet = Fleet(2, stub("--step", "0.02"), num_gpus=2)
        await fleet.cluster.start()
        there = nodes.second.node_id
        where = await asyncio.gather(*(fleet.host(id).actor.node.remote() for id in ("r0", "r1")))
        assert sorted(node == there for node in where) == [False, True]
        lost = f"r{where.index(there)}"
        mine = processes(fleet, lost)[2]
        fleet.offer(*work(12, 150))
        await fleet.until(lambda: fleet.tokens() > 100)
        await asyncio.to_thread(nodes.all.remove_node, nodes.second, allow_graceful=False)
        await fleet.until(lambda: fleet.count(Left) == 1)
        await fleet.until(fleet.responses_ended)
        assert all_of(fleet, 150)
        assert {e.id for e in fleet.events if isinstance(e, Left)} == {lost}
        assert await asyncio.to_thread(seconds_until_gone, mine) < GONE
        await fleet.cluster.close()

    run_strict(main())
