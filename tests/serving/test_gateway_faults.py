"""Three minutes of load and faults over a gateway and its servers, on the virtual clock: seconds of CPU time.

Faults are drawn from a seed: servers killed, frozen, deaf, slow, out of step with the clock, reports that stop, more
than can be served meanwhile. Every request offered ends once, none hangs, nothing is streamed twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.events import Event, Finished, Offered
from rubato.core.interfaces import Scaling, SeqView, View
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO
from rubato.engines.simulated import WORDS
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import HostLost, HostMaker
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.event_bus import Listener
from rubato.fleet.relay import Trips
from rubato.fleet.server_fleet import Server, ServerFleet, server_cluster
from rubato.fleet.server_replica import ServerReplica
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.latency.affine import Model
from tests.kit import on_virtual_clock
from tests.kit.asgi import call_asgi, chunks
from tests.kit.gateways import gateway_app
from tests.kit.servers import Served, fleet_of, served, stub_servers
from tests.stubs.vllm_server import StubCore, StubServer

LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024, kv_blocks=600, block_size=16)
STEP = Model(k=(0.0, 2e-4), b=(0.02, 0.0), host_per_seq=1e-3)
TIERS = {"chat": SLO(1.0, 0.15), "tools": SLO(4.0, 0.3), "flex": SLO()}
NAMED_TIERS = Tiers([Tier(name, slo) for name, slo in TIERS.items()])
HUNG = 60.0  # seconds
SECONDS = 180.0


@dataclass
class Client:
    """One ASGI app, called without a socket; what came of each request."""

    app: Any
    clock: VirtualClock
    outcomes: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, bool]] = field(default_factory=Counter)
    longest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    async def complete(self, tier: str, prompt: list[int], most: int, leaves_after: float = 0.0) -> None:
        began = self.clock.now()
        body = {"model": "stub", "prompt": prompt, "max_tokens": most, "stream": True, "service_tier": tier}
        leaves = (lambda answer: asyncio.sleep(leaves_after)) if leaves_after else None
        answer = await call_asgi(self.app, "/v1/completions", orjson.dumps(body), leaves=leaves)
        self.longest = max(self.longest, self.clock.now() - began)
        if leaves_after:
            self.outcomes["left"] += 1
            return
        self._look(tier, answer.status, answer.body, most)

    def _look(self, tier: str, status: int, raw: bytes, most: int) -> None:
        met = False
        if status == 200 and raw.endswith(b"data: [DONE]\n\n"):
            self.outcomes["completed"] += 1
            said = chunks(raw)
            text = "".join(choice["text"] for chunk in said for choice in chunk["choices"])
            if text != "".join(WORDS[(1 + i) % len(WORDS)] for i in range(most)):
                self.wrong.append(text)
            met = bool(said[-1].get("rubato", {}).get("met"))
        else:
            self.outcomes[str(status) if status != 200 else "broke off"] += 1
        self.met[tier, met] += 1


@dataclass(kw_only=True)
class Setup(Served):
    client: Client
    rng: random.Random


def chosen(policy: str, router: str) -> ClusterOptions:
    return ClusterOptions(PolicyChoice(policy, {}, router), ReplicaOptions(causes=False), 1500)


def urls(servers: int) -> list[str]:
    return [f"http://s{i}" for i in range(servers)]


Fault = Callable[[Setup, StubServer], Awaitable[None]]


async def killed(setup: Setup, server: StubServer) -> None:
    """kill -9, and started again 15 s later with nothing of what it had."""
    server.kill()
    for id in list(server.core.listeners):
        server.core.host.cancel(id, "killed")
    await asyncio.sleep(15.0)
    server.down = server.core.silent = False


async def frozen(setup: Setup, server: StubServer) -> None:
    """SIGSTOP for 20 s: nothing answers, no connection breaks."""
    server.hangs = server.core.silent = server.core.deaf = True
    _mute(server, True)
    await asyncio.sleep(20.0)
    server.hangs = server.core.silent = server.core.deaf = False
    _mute(server, False)


async def half_open(setup: Setup, server: StubServer) -> None:
    """What was connected brings nothing any more, and is never closed; new connections do."""
    old = list(server.open_replies)
    for reply in old:
        reply.flows.clear()
    await asyncio.sleep(10.0)
    for reply in old:
        reply.flows.set()


async def never_answers(setup: Setup, server: StubServer) -> None:
    server.hangs = True
    await asyncio.sleep(12.0)
    server.hangs = False


async def reports_stop(setup: Setup, server: StubServer) -> None:
    server.core.silent = True
    await asyncio.sleep(12.0)
    server.core.silent = False


async def says_503(setup: Setup, server: StubServer) -> None:
    server.broken = 503
    await asyncio.sleep(5.0)
    server.broken = 0


async def slow(setup: Setup, server: StubServer) -> None:
    until = setup.clock.now() + 8.0
    while setup.clock.now() < until:
        for reply in server.open_replies:
            reply.delay = 0.05
        await asyncio.sleep(0.2)
    for reply in server.open_replies:
        reply.delay = 0.0


async def clock_off(setup: Setup, server: StubServer) -> None:
    server.core.unix_off += 2.0
    await asyncio.sleep(5.0)


async def cuts(setup: Setup, server: StubServer) -> None:
    for _ in range(5):
        server.cut = setup.rng.randint(1, 4)
        await asyncio.sleep(1.0)
    server.cut = 0


async def overload(setup: Setup, server: StubServer) -> None:
    """Twice what can be served, for 10 s."""
    asked = []
    for _ in range(10):
        asked += [asyncio.ensure_future(setup.client.complete(*_asked(setup.rng))) for _ in range(40)]
        await asyncio.sleep(1.0)
    await asyncio.gather(*asked)


FAULTS: tuple[Fault, ...] = (
    killed, frozen, half_open, never_answers, reports_stop, says_503, slow, clock_off, cuts, overload,
)  # fmt: skip


def _mute(server: StubServer, on: bool) -> None:
    for reply in server.open_replies:
        (reply.flows.clear if on else reply.flows.set)()


def _asked(rng: random.Random) -> tuple[str, list[int], int]:
    tier = rng.choice(list(TIERS))
    return tier, [rng.randrange(250) for _ in range(rng.randint(5, 80))], rng.randint(1, 24)


def soak(
    seed: int, policy: str, router: str, *, servers: int = 3, rate: float = 20.0, seconds: float = SECONDS,
    faults: bool = True, linked: bool = True, flood: float = 0.0, scales: bool = False,
) -> tuple[Client, list[Event]]:  # fmt: skip
    """Open-loop load for so long, a fault every 8 s, and then until nothing is in flight. flood: best-effort requests a
    second beside it. scales: servers come and drain meanwhile."""

    async def main() -> tuple[Client, list[Event]]:
        clock, trips, options = VirtualClock(), Trips(), chosen(policy, router)
        async with stub_servers(clock, urls(servers), STEP, LIMITS, options, seed=seed, noise=0.03) as there:
            fleet = fleet_of(there, clock, options, trips, linked=there if linked else (), step_timeout=5.0)
            if scales:
                options = replace(options, autoscaler=Sways(servers))
                cluster = cluster_of([fleet.host] * servers, clock, options, _further(fleet, there))
            else:
                cluster = await server_cluster(fleet, clock, options)
            await cluster.start()
            one = Served(clock, list(there.values()), fleet, cluster, trips)
            setup = Setup(**vars(one), client=Client(gateway_app(one, NAMED_TIERS), clock), rng=random.Random(seed))
            cluster.listen(setup.events.append)
            await _load(setup, rate, seconds, faults, flood)
            assert not trips
            for host in cluster.hosts.values():
                assert host.view().count == 0, host.view()
            await cluster.close()
            return setup.client, setup.events

    return run_virtual(main())


async def _load(setup: Setup, rate: float, seconds: float, faults: bool, flood: float) -> None:
    clock, rng, cluster = setup.clock, setup.rng, setup.cluster
    disturbing = [asyncio.ensure_future(_disturb(setup, seconds))] if faults else []
    flooding = [asyncio.ensure_future(_flood(setup, flood, seconds))] if flood else []
    asked = []
    while clock.now() < seconds:
        await asyncio.sleep(rng.expovariate(rate))
        if flooding:
            _, prompt, most = _asked(rng)
            asked.append(asyncio.ensure_future(setup.client.complete("chat", prompt, most)))
            continue
        leaves = rng.uniform(0.05, 1.0) if rng.random() < 0.05 else 0.0
        asked.append(asyncio.ensure_future(setup.client.complete(*_asked(rng), leaves)))
        assert cluster.offered == cluster.finished + cluster.in_flight
    await asyncio.gather(*asked, *disturbing, *flooding)
    await cluster.drain()
    await asyncio.sleep(5.0)


@dataclass
class Sways:
    """An `Autoscaler` that drains the newest server, or starts another, in turn; and one in the place of each that is
    lost."""

    least: int
    at: float = 20.0

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        missing = max(0, self.least - len(fleet) - starting)
        if now < self.at or missing:
            return Scaling(add=missing, wake_at=max(now + 1.0, self.at))
        self.at = now + 12.0
        if len(fleet) > self.least:
            return Scaling(drain=(fleet[-1].id,), wake_at=self.at)
        return Scaling(add=1, wake_at=self.at)


def _further(fleet: ServerFleet, there: dict[str, StubServer]) -> HostMaker:
    """A new server for each host beyond the first ones."""

    def make(id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        first, url = there["http://s0"].core, f"http://s{len(there)}"
        core = StubCore(STEP, LIMITS, first.clock, first.policy, ReplicaOptions(causes=False), seed=len(there))
        core.clock.spawn(core.start(), "start of a server")
        there[url] = StubServer(core)
        fleet._servers = [*fleet._servers, Server(url, url)]
        return fleet.extra_host(id, emit, lost)

    return make


async def _flood(setup: Setup, rate: float, seconds: float) -> None:
    rng, asked = random.Random("flood"), []
    while setup.clock.now() < seconds:
        await asyncio.sleep(rng.expovariate(rate))
        _, prompt, most = _asked(rng)
        asked.append(asyncio.ensure_future(setup.client.complete("flex", prompt, most)))
    await asyncio.gather(*asked)


async def _disturb(setup: Setup, seconds: float) -> None:
    under_way = []
    while setup.clock.now() < seconds - 30.0:
        await asyncio.sleep(8.0)
        server = setup.rng.choice(setup.servers[1:])  # one is never touched: overload is bounded
        under_way.append(asyncio.ensure_future(setup.rng.choice(FAULTS)(setup, server)))
    await asyncio.gather(*under_way)


@pytest.mark.parametrize(
    ("seed", "policy", "router", "linked", "seconds", "rate"),
    [
        pytest.param(1, "edf", "least_loaded", True, SECONDS / 2, 8.0, marks=pytest.mark.slow),
        pytest.param(1, "edf", "least_loaded", True, SECONDS, 20.0, marks=pytest.mark.full),
        pytest.param(2, "polyserve", "auto", True, SECONDS, 20.0, marks=pytest.mark.full),
        pytest.param(3, "edf", "least_loaded", False, SECONDS, 20.0, marks=pytest.mark.full),
    ],
)
def test_faults_lose_nothing_hang_nothing_and_stream_nothing_twice(
    seed: int, policy: str, router: str, linked: bool, seconds: float, rate: float
) -> None:
    client, events = soak(seed, policy, router, linked=linked, seconds=seconds, rate=rate)
    ends = [event.id for event in events if isinstance(event, Finished)]
    assert len(ends) == len(set(ends)) == sum(isinstance(event, Offered) for event in events)
    assert len(ends) > 0.8 * rate * seconds
    assert not client.wrong
    assert client.longest < HUNG
    assert client.outcomes["completed"] > 0.9 * len(ends) * 0.95
    served = {tier: client.met[tier, True] / (client.met[tier, True] + client.met[tier, False]) for tier in TIERS}
    assert served["chat"] > 0.6, served


@pytest.mark.full
@pytest.mark.parametrize(("seed", "policy", "router"), [(5, "edf", "least_loaded"), (6, "polyserve", "auto")])
def test_servers_that_come_and_drain_under_faults_lose_nothing(seed: int, policy: str, router: str) -> None:
    client, events = soak(seed, policy, router, scales=True)
    ends = [event.id for event in events if isinstance(event, Finished)]
    assert len(ends) == len(set(ends)) == sum(isinstance(event, Offered) for event in events)
    assert not client.wrong
    assert client.longest < HUNG
    assert client.outcomes["completed"] > 0.9 * len(ends) * 0.95
    kinds = Counter(type(event).__name__ for event in events)
    assert min(kinds["Joined"], kinds["Draining"], kinds["Left"]) > 3, kinds


@pytest.mark.parametrize(
    ("policy", "router", "seconds"),
    [("edf", "least_loaded", 5.0),
     *(pytest.param(*case, 20.0, marks=pytest.mark.full) for case in (("edf", "least_loaded"), ("polyserve", "auto")))],
)  # fmt: skip
def test_the_top_tier_is_served_at_twice_what_can_be_served_as_if_it_were_alone(
    policy: str, router: str, seconds: float
) -> None:
    """Best effort floods the fleet; refusals count as offered."""
    alone, _ = soak(4, policy, router, servers=2, rate=10.0, seconds=seconds, faults=False, flood=0.001)
    beside, _ = soak(4, policy, router, servers=2, rate=10.0, seconds=seconds, faults=False, flood=130.0)

    def attained(client: Client) -> float:
        return client.met["chat", True] / (client.met["chat", True] + client.met["chat", False])

    assert beside.met["flex", True] + beside.met["flex", False] > 100 * seconds
    assert attained(beside) >= 0.99 * attained(alone) > 0.9, (attained(beside), attained(alone), beside.outcomes)


@pytest.mark.parametrize(("policy", "router"), [("edf", "least_loaded"), ("polyserve", "auto")])
@on_virtual_clock
async def test_a_gateway_that_is_restarted_ends_what_it_had_and_finds_the_fleet_as_it_is(
    policy: str, router: str
) -> None:
    """Streams through the first one end with an error; the servers stop serving them, and another gateway takes over,
    which sees what is still there as a stranger's."""

    clock, rng, options = VirtualClock(), random.Random(7), chosen(policy, router)

    async def offer(client: Client, count: int) -> list[asyncio.Future[None]]:
        asked = []
        for _ in range(count):
            await asyncio.sleep(rng.expovariate(30.0))
            asked.append(asyncio.ensure_future(client.complete(*_asked(rng))))
        return asked

    async with stub_servers(clock, urls(2), STEP, LIMITS, options) as there:
        async with served(there, clock, options, linked=there) as one:
            first, old = one.cluster, Client(gateway_app(one, NAMED_TIERS), clock)
            asked = await offer(old, 60)
            assert first.in_flight > 5
            async with served(there, clock, options, linked=there) as one:
                second, new = one.cluster, Client(gateway_app(one, NAMED_TIERS), clock)
                assert sum(host.view().count for host in second.hosts.values()) > 5  # strangers'
                closing = asyncio.ensure_future(first.close())
                more = await offer(new, 60)
                await asyncio.gather(*asked, *more, closing)
                assert first.offered == first.finished == 60
                assert second.offered == second.finished == 60
                assert not old.wrong + new.wrong
                assert old.outcomes["completed"] < 60
                assert sum(old.outcomes.values()) == 60
                assert new.outcomes == {"completed": 60}
                await asyncio.sleep(5.0)
                assert not sum(host.view().count for host in second.hosts.values())
        for server in there.values():
            assert server.core.host.replica is not None
            assert server.core.host.replica.kv.free == LIMITS.kv_blocks
