"""A fleet of servers makes the same decisions as replicas in this process, and keeps its books right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson
import pytest

from rubato.core.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.core.events import Assigned, Event, Finished, HandedOff, Offered, Placed
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import KV, Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Handoff, Progress, Request, Sampling, Stage
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.disaggregation import decode_body, prefill_body
from rubato.fleet.relay import Ask, Carrier, Trip
from rubato.fleet.remote_host import ReplicaLostError
from rubato.fleet.resume import NotResumableError
from rubato.fleet.server_replica import RESPONSE_END_S, ServerReplica
from rubato.fleet.upstream import Headers, Reply
from rubato.latency.affine import Model
from tests.kit import on
from tests.kit.servers import Served, served, stub_servers
from tests.stubs.vllm_server import StubServer

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048, kv_blocks=2000, block_size=16)
STEP = Model(k=(0.0, 2e-4), b=(6e-3, 1e-3), a=1e-7, host_per_seq=1e-4)
TIERS = {"chat": SLO(0.4, 0.03), "tools": SLO(1.5, 0.06), "batch": SLO(e2e=20.0)}


class Nobody:
    """A client that only takes."""

    flow = None
    direct = None

    def start(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None: ...


class MemoryTrip(Trip):
    """A trip of which all is kept that came back."""

    path = "/v1/completions"

    def __init__(self, request: Request) -> None:
        ask = Ask(self.path, self.path, request.id, 1, True, True, True, (), lambda answer: b"")
        super().__init__(ask, (request,), Nobody(), self.learn)
        self.request = request
        self.came = b""
        self.ends = 0
        self.prompt = 0

    def learn(self, prompt: int) -> None:
        self.prompt = prompt

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        received = 0 if progress is None else len(progress.token_ids)
        if progress is not None and sum(map(len, progress.times)) > received:
            raise NotResumableError("its tokens are not known")
        prompt = [*self.request.stages[0].token_ids, *(progress.token_ids if progress is not None else ())]
        body = {"prompt": prompt, "max_tokens": self.request.sampling.max_tokens - received, "stream": True}
        return [("x-request-id", self.answer.removeprefix("cmpl-"))], orjson.dumps(body)

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        headers, body = self.build_request(request.progress)
        if kv is not None:
            body = decode_body(body, kv)
        elif prefills:
            body = prefill_body(self.ask.path, len(self.ids), body)
        return await replica.upstream.open("POST", self.ask.target, headers, body)

    def write(self, data: bytes) -> None:
        self.came += data

    def finish(self, data: bytes) -> None:
        self.came += data
        self.ends += 1
        self.is_over = True

    def answer_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.came = body
        self.ends += 1
        self.is_over = True


def offered(seed: int, rate: float, seconds: float) -> list[Request]:
    """Three tiers, Poisson arrivals."""
    rng = random.Random(seed)
    at, found = 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        tier = rng.choice(list(TIERS))
        prompt = tuple(rng.randrange(251) for _ in range(rng.randint(10, 120)))
        found.append(
            Request(
                f"cmpl-{len(found)}", (Stage(len(prompt), TIERS[tier], token_ids=prompt),), at, tier=tier,
                sampling=Sampling(max_tokens=rng.randint(1, 20), ignore_eos=True),
            )
        )  # fmt: skip
    return found


def options(policy: str, settings: dict[str, Any], router: str) -> ClusterOptions:
    return ClusterOptions(PolicyChoice(policy, settings, router), ReplicaOptions(causes=False))


CHOSEN = options("edf", {}, "least_loaded")


async def offer_all(cluster: Cluster, requests: list[Request], before: Callable[[Request], None]) -> None:
    """Offer them as they arrive, and wait until none is in flight. before: each is offered."""
    clock = cluster.clock
    began = clock.now()
    for request in requests:
        await clock.sleep_until(began + request.arrival, ARRIVAL)
        request = replace(request, arrival=clock.now())
        before(request)
        cluster.offer(request)
    while cluster.in_flight:
        await clock.sleep_until(clock.now() + 0.5, ARRIVAL)


def here(requests: list[Request], chosen: ClusterOptions, replicas: int) -> list[Event]:
    async def main() -> list[Event]:
        clock, events = VirtualClock(), list[Event]()
        engines = [Engine(STEP, LIMITS, clock, seed=i) for i in range(replicas)]
        cluster = local_cluster(engines, [replace(STEP) for _ in engines], clock, chosen)
        cluster.listen(events.append)
        await cluster.start()
        await offer_all(cluster, requests, lambda request: None)
        await cluster.close()
        return events

    return run_virtual(main())


def serving(
    scenario: Callable[[Served], Awaitable[None]], *, servers: int = 3, chosen: ClusterOptions = CHOSEN,
    change: Callable[[list[StubServer]], None] = lambda servers: None, **more: Any,
) -> None:  # fmt: skip
    """Run a scenario with a cluster over so many stub servers. change: something about them before it starts; more: of
    `served`."""

    async def main() -> None:
        clock, urls = VirtualClock(), [f"http://s{i}" for i in range(servers)]
        async with stub_servers(clock, urls, STEP, LIMITS, chosen) as by_url:
            change(list(by_url.values()))
            async with served(by_url, clock, chosen, **more) as fleet:
                await scenario(fleet)

    run_virtual(main())


def there(
    requests: list[Request], chosen: ClusterOptions, replicas: int, linked: bool = True,
    profile: Callable[[], Any] = lambda: None,
) -> tuple[list[Event], dict[str, MemoryTrip]]:  # fmt: skip
    found, kept = list[Event](), dict[str, MemoryTrip]()

    async def scenario(fleet: Served) -> None:
        def before(request: Request) -> None:
            kept[request.id] = fleet.trips[request.id] = MemoryTrip(request)

        await offer_all(fleet.cluster, requests, before)
        found.extend(fleet.events)

    links = [f"http://s{i}" for i in range(replicas if linked else 0)]
    serving(scenario, servers=replicas, chosen=chosen, linked=links, profile=profile)
    return found, kept


def decisions(events: list[Event]) -> list[tuple[Any, ...]]:
    """What a router decided, in order."""
    found: list[tuple[Any, ...]] = []
    for event in events:
        if isinstance(event, Placed):
            found.append(("placed", event.id, event.replica))
        elif isinstance(event, HandedOff) and event.request.handoff is not None:
            found.append(("handed off", event.id, event.request.handoff.reason))
        elif isinstance(event, Assigned):
            found.append(("assigned", event.id, event.role))
        elif isinstance(event, Finished) and event.outcome == "refused":
            found.append(("refused", event.id, event.reason))
    return found


@pytest.mark.parametrize(
    ("policy", "router"), [("edf", "least_loaded"), ("polyserve", "auto"), ("slos_serve", "auto"), ("ascendra", "auto")]
)
@pytest.mark.parametrize("seconds", [1.5, pytest.param(60.0, marks=pytest.mark.full)])
def test_servers_with_the_link_are_routed_to_as_replicas_here_are(policy: str, router: str, seconds: float) -> None:
    """Above what two replicas can serve in time: requests are recalled, offloaded and demoted."""
    requests = offered(1, 200.0, seconds)
    chosen = options(policy, {}, router)
    ours = here(requests, chosen, 2)
    theirs, trips = there(requests, chosen, 2)
    kinds = Counter(type(event).__name__ for event in theirs if isinstance(event, Offered | Finished))
    assert kinds == {"Offered": len(requests), "Finished": len(requests)}
    assert decisions(ours) == decisions(theirs)
    assert met(ours) == met(theirs)
    assert all(call.ends == 1 for call in trips.values())


def met(events: list[Event]) -> dict[str, bool]:
    return {event.id: event.verdict.met for event in events if isinstance(event, Finished)}


@pytest.mark.parametrize("comes", [True, False])
@on(serving, servers=1, linked=["http://s0"])
async def test_a_response_ends_whose_server_is_lost_between_its_last_token_and_its_last_bytes(
    fleet: Served, comes: bool
) -> None:
    clock, cluster = fleet.clock, fleet.cluster
    request = replace(offered(1, 200.0, 1.0)[0], arrival=clock.now())
    call = fleet.trips[request.id] = MemoryTrip(request)
    cluster.offer(request)
    while not fleet.servers[0].open_replies:
        await clock.sleep_until(clock.now() + 0.001, ARRIVAL)
    (reply,) = fleet.servers[0].open_replies
    reply.flows.clear()
    while cluster.in_flight:
        await clock.sleep_until(clock.now() + 0.01, ARRIVAL)
    (host,) = cluster.hosts.values()
    assert isinstance(host, ServerReplica)
    host.die(ReplicaLostError("its machine is gone"))
    if comes:
        reply.flows.set()
    await clock.sleep_until(clock.now() + 2 * RESPONSE_END_S, ARRIVAL)
    assert (call.ends, bool(call.break_reason)) == ((1, False) if comes else (0, True))


class MostFree:
    """A router: each request to the replica with most KV free, and not the one that has just handed it off."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        def best(seq: SeqView) -> View:
            source = seq.request.handoff.source if seq.request.handoff is not None else ""
            return max(fleet, key=lambda view: (view.id != source, view.kv_free))

        return Dispatch({seq.id: best(seq).id for seq in held})


def used(share: str, more: str = "") -> str:
    """A page of vLLM's metrics."""
    return (
        '# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        f'# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {share}\n{more}'
    )


def without_link(scenario: Callable[[Served], Awaitable[None]], pages: Sequence[str]) -> None:
    """A cluster with `MostFree` over servers without a link, which have these pages of metrics."""

    def change(servers: list[StubServer]) -> None:
        for server, page in zip(servers, pages, strict=True):
            server.metrics = page

    serving(scenario, servers=len(pages), change=change, wrap_router=lambda router: MostFree())


def free(cluster: Cluster) -> list[int]:
    return [host.view().kv_free for host in cluster.hosts.values()]


@on(without_link, pages=[used("0.9"), used("0.4")])
async def test_without_a_link_a_router_sees_the_free_kv_of_metrics(fleet: Served) -> None:
    clock, cluster = fleet.clock, fleet.cluster

    def offer(id: str, prompt: int, most: int) -> None:
        request = Request(
            id, (Stage(prompt, token_ids=(1,) * prompt),), clock.now(),
            sampling=Sampling(max_tokens=most, ignore_eos=True),
        )  # fmt: skip
        fleet.trips[id] = MemoryTrip(request)
        cluster.offer(request)

    assert free(cluster) == [100, 100]
    await clock.sleep_until(1.5, ARRIVAL)
    assert free(cluster) == [10, 60]
    offer("cmpl-a", 100, 2)
    fleet.servers[0].metrics = used("0.25")
    await clock.sleep_until(2.5, ARRIVAL)
    assert free(cluster) == [75, 60]
    offer("cmpl-b", 100, 200)
    await clock.sleep_until(2.6, ARRIVAL)
    assert [event.replica for event in fleet.of(Placed)] == ["r1", "r0"]
    output = cluster.hosts["r0"].view().running[0].output
    assert output > 0
    assert free(cluster) == [75 - LIMITS.blocks(100 + output), 60]  # it is not in what was read
    await clock.sleep_until(3.5, ARRIVAL)
    assert free(cluster) == [75, 60]  # now it is
    fleet.servers[1].metrics = ""
    await clock.sleep_until(10.0, ARRIVAL)
    assert free(cluster) == [75, 60]
    assert cluster.in_flight == 0


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([""], 16384),  # as many as are assumed of a server that says nothing
        ([used("nan")], 100),
        ([used("inf")], 100),
        ([used("1.01")], 100),
        ([used("-0.5")], 100),
        ([used("full")], 100),
        ([used("0.5").replace("usage_perc{", "usage_perc_of_another{")], 100),
        (["\ufffd" * 1000], 16384),
        ([used("0.5", more="vllm:kv_cache_usage_perc NaN\n")], 100),
        ([used("1")], 0),
        ([used("1e-3")], 100),
        ([used("0.5 1732000000000")], 50),
        ([used("0.5", more='vllm:kv_cache_usage_perc{engine="1",model_name="} m"} 0.1\n')], 70),
        (['sglang:token_usage{model_name="m"} 0.25\n'], 12288),
    ],
)
@on(without_link, "pages")
async def test_metrics_that_do_not_say_how_much_kv_is_in_use_change_nothing(fleet: Served, expected: int) -> None:
    await fleet.clock.sleep_until(3.5, ARRIVAL)
    assert free(fleet.cluster) == [expected]


@on(without_link, pages=[used("0.5")])
async def test_metrics_that_do_not_come_hold_nothing_up(fleet: Served) -> None:
    cluster, (server,) = fleet.cluster, fleet.servers
    server.no_metrics = True
    await cluster.clock.sleep_until(20.0, ARRIVAL)
    assert free(cluster) == [100]
    server.down = True
    await cluster.clock.sleep_until(30.0, ARRIVAL)
    assert not cluster.hosts


@on(without_link, pages=[used("0.1"), used("0.5")])
async def test_what_schedulers_handed_on_uses_up_none_of_the_retries_after_a_failure(fleet: Served) -> None:
    cluster = fleet.cluster
    fleet.servers[0].broken = 500
    request = replace(offered(1, 200.0, 1.0)[0], handoff=Handoff("elsewhere", "declined", 0.0, hops=9))
    fleet.trips[request.id] = MemoryTrip(request)
    cluster.offer(replace(request, arrival=cluster.clock.now()))
    while cluster.in_flight:
        await cluster.clock.sleep_until(cluster.clock.now() + 0.1, ARRIVAL)
    assert [end.outcome for end in fleet.of(Finished)] == ["completed"]
    assert [len(server.bodies) for server in fleet.servers] == [1, 1]
