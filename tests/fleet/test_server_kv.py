"""Prompts that are prefilled at one server, and go on at another that reads their KV."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import orjson
import pytest

from rubato.core.clock import ARRIVAL, VirtualClock, run_virtual
from rubato.core.events import Finished, HandedOff, Placed, Transferred
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from tests.fleet.test_server_fleet import LIMITS, STEP, MemoryTrip, offered
from tests.kit import on_virtual_clock
from tests.kit.servers import Served, served, stub_servers
from tests.stubs.vllm_server import StubCore

LEASE = 30.0
PD = {"mode": "pd", "tiers": (0.03, 0.06)}
POLICIES = [("distserve", {}), ("polyserve", PD)]


@dataclass(kw_only=True)
class Fleet(Served):
    """Stub servers behind a cluster, with what happened at it. kept: the trips, which a cluster forgets."""

    kept: dict[str, MemoryTrip] = field(default_factory=dict)

    @property
    def cores(self) -> list[StubCore]:
        return [server.core for server in self.servers]

    def offer(self, request: Request, call: type[MemoryTrip] = MemoryTrip) -> None:
        request = replace(request, arrival=self.clock.now())
        self.kept[request.id] = self.trips[request.id] = call(request)
        self.cluster.offer(request)

    async def until(self, at: float) -> None:
        await self.clock.sleep_until(at, ARRIVAL)

    async def settle(self) -> None:
        """Until nothing is in flight, and no KV is kept any more."""
        while self.cluster.in_flight:
            await self.until(self.clock.now() + 0.5)
        await self.until(self.clock.now() + 1.0)

    def ends(self) -> dict[str, Finished]:
        found = [event for event in self.events if isinstance(event, Finished)]
        assert len({event.id for event in found}) == len(found)
        return {event.id: event for event in found}

    def ways(self, id: str) -> list[tuple[str, str]]:
        """Where a request was placed, and why it left."""
        found = []
        for event in self.events:
            if event.id != id:
                continue
            if isinstance(event, Placed):
                found.append(("at", event.replica))
            elif isinstance(event, HandedOff) and event.request.handoff is not None:
                found.append((event.request.handoff.reason, "KV" if event.request.handoff.cached else ""))
            elif isinstance(event, Transferred):
                found.append(("read", event.source))
        return found


def one(id: str, prompt: int = 40, output: int = 6) -> Request:
    stage = Stage(prompt, SLO(1.0, 0.05), token_ids=tuple(range(prompt)))
    return Request(id, (stage,), 0.0, sampling=Sampling(max_tokens=output, ignore_eos=True))


@asynccontextmanager
async def opened(
    policy: str, settings: dict[str, Any], replicas: int, limits: Limits = LIMITS, lease: float = LEASE
) -> AsyncIterator[Fleet]:
    """A fleet that has nothing left of its requests at the end. settings: of the router."""
    clock = VirtualClock()
    chosen = ClusterOptions(PolicyChoice(policy, {}, policy, settings), ReplicaOptions(causes=False))
    urls = [f"http://s{i}" for i in range(replicas)]
    async with stub_servers(clock, urls, STEP, limits, chosen, kv_lease=lease) as servers:
        async with served(servers, clock, chosen, linked=urls) as one:
            yield (fleet := Fleet(**vars(one)))
        for core in fleet.cores:
            assert core.host.replica is not None
            assert core.host.replica.kv.free == core.limits.kv_blocks


@pytest.mark.parametrize(("policy", "settings"), POLICIES)
@on_virtual_clock
async def test_a_prompt_is_prefilled_at_one_server_and_decoded_at_another(
    policy: str, settings: dict[str, Any]
) -> None:
    async with opened(policy, settings, 2) as fleet:
        for request in offered(3, 20.0, 4.0):
            await fleet.until(request.arrival)
            fleet.offer(request)
        await fleet.settle()
        assert not any(core.kept for core in fleet.cores)
        assert all(host.view().kv_free == LIMITS.kv_blocks for host in fleet.cluster.hosts.values())
        assert not any(host.view().moving for host in fleet.cluster.hosts.values())
    ends = fleet.ends()
    assert {end.outcome for end in ends.values()} == {"completed"}
    moves = Counter(tuple(kind for kind, _ in fleet.ways(id)) for id in ends)
    apart = moves["at", "prefilled", "at", "read"]
    assert apart == len(ends) if policy == "distserve" else apart > 0.5 * len(ends)
    assert sum(core.reads for core in fleet.cores) == apart
    for id, call in fleet.kept.items():
        assert call.ends == 1
        assert call.came.count(b'"text"') == call.request.sampling.max_tokens + 1, id  # and the last, with the reason


def serving(requests: Sequence[Request], act: Callable[[Fleet], Any], **more: Any) -> Fleet:
    """The first server prefills, the second decodes; `act` is awaited while they do."""

    async def main() -> Fleet:
        async with opened("distserve", {}, more.pop("replicas", 2), **more) as fleet:
            for request in requests:
                fleet.offer(request)
            await act(fleet)
            await fleet.settle()
            await fleet.until(fleet.clock.now() + LEASE)
            assert not any(core.kept for core in fleet.cores)
        return fleet

    return run_virtual(main())


@pytest.mark.parametrize("after", [0.001, 0.012, 0.0165, 0.018, 0.05])
def test_a_client_may_leave_at_any_moment(after: float) -> None:
    """While its prompt runs, as it ends, while its KV is on its way, and while it decodes."""

    async def leave(fleet: Fleet) -> None:
        await fleet.until(fleet.clock.now() + after)
        fleet.cluster.cancel("cmpl-a")

    fleet = serving([one("cmpl-a", 40, 20), one("cmpl-b", 30, 20)], leave)
    assert {id: end.outcome for id, end in fleet.ends().items()} == {"cmpl-a": "cancelled", "cmpl-b": "completed"}


def test_kv_that_cannot_be_read_is_made_again() -> None:
    async def fail(fleet: Fleet) -> None:
        fleet.cores[1].reading_fails = True
        await fleet.until(fleet.clock.now() + 1.0)
        fleet.cores[1].reading_fails = False

    fleet = serving([one("cmpl-a")], fail)
    assert fleet.ends()["cmpl-a"].outcome == "completed"
    ways = fleet.ways("cmpl-a")
    assert ways.count(("prefilled", "KV")) > 1
    assert ways[-1] == ("read", "r0")


def test_a_server_that_does_not_take_the_request_is_asked_again_with_kv_made_anew() -> None:
    async def break_(fleet: Fleet) -> None:
        fleet.servers[1].broken = 503
        await fleet.until(fleet.clock.now() + 0.5)
        fleet.servers[1].broken = 0

    fleet = serving([one("cmpl-a")], break_)
    assert fleet.ends()["cmpl-a"].outcome == "completed"
    assert fleet.ways("cmpl-a").count(("prefilled", "KV")) > 1


def test_kv_waits_for_a_place_for_less_than_its_lease() -> None:
    """The second server is full of a long request: the prompt's KV is given up, and made again when there is room."""

    async def wait(fleet: Fleet) -> None:
        await fleet.until(fleet.clock.now() + 7.0)
        fleet.offer(one("cmpl-waits", 700, 5))
        await fleet.settle()

    limits = replace(LIMITS, kv_blocks=110)
    fleet = serving([one("cmpl-long", 100, 1600)], wait, limits=limits, lease=1.5)
    assert {end.outcome for end in fleet.ends().values()} == {"completed"}
    ways = fleet.ways("cmpl-waits")
    assert ways[:3] == [("at", "r0"), ("prefilled", "KV"), ("failed", "")]
    given_up = [e.at for e in fleet.events if isinstance(e, HandedOff) and e.id == "cmpl-waits"]
    assert given_up[1] - given_up[0] == pytest.approx(1.0)
    assert ways[-1] == ("read", "r0")


@pytest.mark.parametrize(("lost", "after"), [(0, 0.01), (0, 0.3), (1, 0.0165), (1, 0.05)])
def test_a_server_that_is_lost_takes_its_kv_with_it(lost: int, after: float) -> None:
    """The one that prefills, or the one that reads: with a third one, all ends well."""

    async def kill(fleet: Fleet) -> None:
        await fleet.until(fleet.clock.now() + after)
        fleet.servers[lost].kill()
        await fleet.until(fleet.clock.now() + 20.0)

    requests = [one(f"cmpl-{i}", 40, 20) for i in range(6)]
    fleet = serving(requests, kill, replicas=4)
    assert {end.outcome for end in fleet.ends().values()} == {"completed"}
    assert all(call.ends == 1 for call in fleet.kept.values())


@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_comes_back_takes_the_part_of_the_one_that_was_lost(lost: int) -> None:
    async def kill(fleet: Fleet) -> None:
        await fleet.until(fleet.clock.now() + 2.0)
        server = fleet.servers[lost]
        server.kill()
        await fleet.until(fleet.clock.now() + 10.0)
        server.down = server.core.silent = False
        await fleet.until(fleet.clock.now() + 10.0)
        for i in range(5):
            fleet.offer(one(f"cmpl-{i}"))

    fleet = serving([one("cmpl-a")], kill)
    assert {end.outcome for end in fleet.ends().values()} == {"completed"}
    assert sum(core.reads for core in fleet.cores) == 6


@pytest.mark.parametrize("silent", [0, 1])
def test_without_reports_kv_moves_all_the_same(silent: int) -> None:
    async def hush(fleet: Fleet) -> None:
        await fleet.until(fleet.clock.now() + 2.0)
        fleet.cores[silent].silent = True
        await fleet.until(fleet.clock.now() + 8.0)
        for i in range(5):
            fleet.offer(one(f"cmpl-{i}"))
        await fleet.until(fleet.clock.now() + 3.0)
        assert all(fleet.kept[f"cmpl-{i}"].ends == 1 for i in range(5))
        fleet.cores[silent].silent = False
        await fleet.until(fleet.clock.now() + 5.0)

    fleet = serving([one("cmpl-a")], hush)
    assert {end.outcome for end in fleet.ends().values()} == {"completed"}
    assert sum(core.reads for core in fleet.cores) == 6


class Odd(MemoryTrip):
    """A call that cannot be served in two places."""

    fields: ClassVar[dict[str, Any]] = {}

    def build_request(self, progress: Any, ids: Any = None) -> Any:
        headers, body = super().build_request(progress, ids)
        return headers, orjson.dumps({**orjson.loads(body), **self.fields})


class WithLogprobs(Odd):
    fields: ClassVar[dict[str, Any]] = {"prompt_logprobs": 1}


class OfMessages(Odd):
    path = "/v1/messages"


@pytest.mark.parametrize(("call", "says"), [(WithLogprobs, "prompt_logprobs"), (OfMessages, "/v1/messages")])
def test_what_cannot_be_served_in_two_places_is_refused(call: type[MemoryTrip], says: str) -> None:
    async def offer(fleet: Fleet) -> None:
        fleet.offer(one("cmpl-odd"), call)

    end = serving([], offer).ends()["cmpl-odd"]
    assert end.outcome == "refused"
    assert end.reason.startswith("rejected-invalid")
    assert says in end.reason


def test_a_prompt_of_one_token_is_refused() -> None:
    async def offer(fleet: Fleet) -> None:
        fleet.offer(one("cmpl-odd", 1))

    end = serving([], offer).ends()["cmpl-odd"]
    assert (end.outcome, "one token" in end.reason) == ("refused", True)


def test_a_server_that_says_nothing_of_its_kv_fails_the_request() -> None:
    async def offer(fleet: Fleet) -> None:
        fleet.servers[0].says_nothing_of_kv = True
        fleet.offer(one("cmpl-a"))

    end = serving([], offer).ends()["cmpl-a"]
    assert (end.outcome, "KV connector" in end.reason) == ("failed", True)


@pytest.mark.parametrize(("policy", "settings"), POLICIES)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.full) for i in (2, 3, 4, 5))])
@on_virtual_clock
async def test_whatever_happens_each_request_ends_once_and_no_kv_is_left(
    policy: str, settings: dict[str, Any], seed: int
) -> None:
    """Random cancels, failures and losses of what is read, with little memory."""
    rng = random.Random(seed)
    async with opened(policy, settings, 3, replace(LIMITS, kv_blocks=60), lease=3.0) as fleet:
        for number, request in enumerate(offered(seed, 40.0, 6.0)):
            await fleet.until(request.arrival)
            fleet.offer(request)
            if rng.random() < 0.1:
                fleet.cluster.cancel(f"cmpl-{rng.randrange(number + 1)}")
            core = rng.choice(fleet.cores)
            core.reading_fails = rng.random() < 0.1
            core.silent = rng.random() < 0.05
        for core in fleet.cores:
            core.reading_fails = core.silent = False
        await fleet.settle()
        await fleet.until(fleet.clock.now() + 10.0)
        assert all(host.view().kv_free == 60 for host in fleet.cluster.hosts.values())
        assert not any(host.view().moving for host in fleet.cluster.hosts.values())
    ends = fleet.ends()
    assert len(ends) == len(fleet.kept) == fleet.cluster.offered == fleet.cluster.finished
    kinds = Counter(end.outcome for end in ends.values())
    assert kinds["completed"] > 0.6 * len(ends), kinds
    for id, end in ends.items():
        if end.outcome == "completed":
            assert fleet.kept[id].came.count(b'"text"') == fleet.kept[id].request.sampling.max_tokens + 1
