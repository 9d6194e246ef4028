"""Cluster and worker on the virtual clock: what happens when engines, policies and clients misbehave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container
from dataclasses import replace

import pytest

from rubato.core.clock import VirtualClock
from rubato.core.events import Event, Finished, Offered, Placed, Stepped, Tokens
from rubato.core.plan import Batch, Limits, Plan, StepResult
from rubato.engines.simulated import Engine
from rubato.fleet.build import cluster_of, local_cluster
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.event_bus import Listener
from rubato.fleet.local_host import LocalHost
from rubato.policies import load, load_router
from tests.kit import Linear, request
from tests.kit.clusters import offer, play
from tests.kit.fleets import Act, cancels

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=50, block_size=8)


class Breaks(Engine):
    """Fails at these steps (counted from 1); `starts` counts restarts."""

    def __init__(self, clock: VirtualClock, at: Container[int]) -> None:
        super().__init__(Linear(), LIMITS, clock)
        self.at, self.steps, self.starts = at, 0, 0

    async def start(self) -> None:
        self.starts += 1
        await super().start()

    async def execute(self, batch: Batch) -> StepResult:
        self.steps += 1
        if self.steps in self.at:
            raise RuntimeError("the device fell off")
        return await super().execute(batch)


def scenario(
    acts: list[tuple[float, Act]], *, policy: str = "vllm", broken: Container[int] = (), most: int | None = None
) -> tuple[Cluster, list[Event], Breaks]:
    """What happens, at its times, to a cluster of one replica; the cluster, every event and its engine."""
    engines: list[Breaks] = []

    def build(clock: VirtualClock) -> Cluster:
        engines.append(Breaks(clock, broken))
        return local_cluster(engines, [Linear()], clock, ClusterOptions(PolicyChoice(policy), max_in_flight=most))

    return *play(build, acts), engines[0]


def ends(events: list[Event]) -> dict[str, Finished]:
    found = [e for e in events if isinstance(e, Finished)]
    assert max(Counter(e.id for e in found).values()) == 1
    return {e.id: e for e in found}


def test_a_broken_step_fails_its_requests_and_the_next_are_served() -> None:
    steps = [(0.0, offer(request("a"), request("b"))), (1.0, offer(request("c")))]
    cluster, events, engine = scenario(steps, broken={3})
    assert {id: e.outcome for id, e in ends(events).items()} == {"a": "failed", "b": "failed", "c": "completed"}
    assert "the device fell off" in ends(events)["a"].reason
    assert engine.starts == 2
    assert cluster.error is None


def test_an_engine_that_goes_on_failing_is_given_up() -> None:
    steps = [(i * 1.0, offer(request(f"r{i}"))) for i in range(5)]
    cluster, events, _ = scenario(steps, broken=range(1, 100))
    assert cluster.dead.is_set()
    assert isinstance(cluster.error, RuntimeError)
    assert {e.outcome for e in ends(events).values()} == {"failed"}
    assert "no replica is left" in ends(events)["r4"].reason


def test_a_bad_plan_is_an_error_that_names_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        needs = frozenset[str]()

        def observe(self, events: object) -> None: ...
        def plan(self, view: object) -> Plan:
            return Plan(preempt=("nobody",))

    monkeypatch.setattr("rubato.fleet.build.load", lambda name, settings: Wrong())
    monkeypatch.setattr("rubato.fleet.build.router_for", lambda *_: load_router("least_loaded"))
    _, events, _ = scenario([(0.0, offer(request("a")))], policy="mine")
    assert "policy 'mine'" in ends(events)["a"].reason
    assert "'nobody'" in ends(events)["a"].reason


def test_a_client_that_leaves_stops_the_engine_within_a_step() -> None:
    free: list[int] = []
    steps = [
        (0.0, offer(request("a", most=100))),
        (0.305, lambda cluster: cluster.cancel("a", "client disconnected")),
        (0.33, lambda cluster: free.extend(host.view().kv_free for host in cluster.hosts.values())),
    ]
    _, events, _ = scenario(steps)
    end = ends(events)["a"]
    assert (end.outcome, end.at, end.reason) == ("cancelled", 0.305, "client disconnected")
    after = [e for e in events if isinstance(e, Stepped) and e.at > 0.305]
    assert len(after) <= 1
    assert not [e for e in events if isinstance(e, Tokens) and e.at > 0.305]
    assert free == [LIMITS.kv_blocks]


def test_beyond_max_in_flight_is_refused_at_once() -> None:
    _, events, _ = scenario([(0.0, offer(*(request(f"r{i}") for i in range(20))))], most=5)
    outcomes = Counter((e.outcome, e.reason) for e in ends(events).values())
    assert outcomes == {("completed", "length"): 5, ("refused", "rejected-saturated"): 15}


def test_what_comes_while_draining_is_refused() -> None:
    draining: list[asyncio.Task[None]] = []

    def drain(cluster: Cluster) -> None:
        draining.append(asyncio.ensure_future(cluster.drain()))

    steps = [(0.0, offer(request("a"))), (0.0, drain), (0.01, offer(request("late", arrival=0.01)))]
    found = ends(scenario(steps, policy="edf")[1])
    assert draining[0].done()
    assert found["a"].outcome == "completed"
    assert (found["late"].outcome, found["late"].reason) == ("refused", "rejected-shutting-down")


def test_closing_ends_what_is_in_flight() -> None:
    closing: list[asyncio.Task[None]] = []

    def close(cluster: Cluster) -> None:
        closing.append(asyncio.ensure_future(cluster.close()))

    _, events, _ = scenario([(0.0, offer(request("a", most=100))), (0.1, close)])
    assert ends(events)["a"].outcome == "failed"
    assert closing[0].done()


def test_tokens_come_before_the_end_and_nothing_after() -> None:
    steps = [(0.0, offer(request("a"), request("b", 30))), (0.05, lambda cluster: cluster.cancel("b"))]
    _, events, _ = scenario(steps)
    for id in "ab":
        own = [e for e in events if e.id == id]
        assert isinstance(own[0], Offered)
        assert isinstance(own[-1], Finished)
    assert sum(e.tokens for e in events if isinstance(e, Tokens) and e.id == "a") == 16


def test_ids_in_flight_are_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        scenario([(0.0, offer(request("a"), request("a")))])


def test_a_policy_that_needs_what_the_engine_lacks_is_refused_at_start() -> None:
    class Plain(Engine):
        supports = frozenset[str]()

    sarathi = ClusterOptions(PolicyChoice("sarathi"))
    with pytest.raises(ValueError, match="needs chunked"):
        local_cluster([Plain(Linear(), LIMITS, VirtualClock())], [Linear()], VirtualClock(), sarathi)


def production(errors: list[str]) -> None:
    """The running loop collects errors that nobody awaits, in place of ending the run: asyncio's own logs them."""
    told = lambda loop, context: errors.append(f"{context['message']}: {context['exception']}")  # noqa: E731
    asyncio.get_running_loop().set_exception_handler(told)


def test_a_listener_that_fails_costs_no_request_its_end_and_is_told_on() -> None:
    errors: list[str] = []
    heard: list[Event] = []

    def fails(event: Event) -> None:
        heard.append(event)
        raise OSError("no space left on device")

    def begin(cluster: Cluster) -> None:
        production(errors)
        cluster.listen(fails)

    steps = [(0.0, begin), (0.1, offer(request("a"))), (1.0, offer(request("b"))), (70.0, offer(request("c")))]
    cluster, events, _ = scenario(steps)
    assert {e.outcome for e in ends(events).values()} == {"completed"}
    assert cluster.in_flight == 0
    assert heard == events
    before = sum(e.at < 70.0 for e in events)
    assert [error.split(" failed on ")[1] for error in errors] == [
        "Offered of 'a', errors so far: 1: no space left on device",
        f"Offered of 'c', errors so far: {before + 1}: no space left on device",
    ]
    assert list(cluster.listener_errors.values()) == [len(events)]


def test_a_client_s_own_listener_that_fails_costs_nobody_anything() -> None:
    errors: list[str] = []

    def fails(event: Event) -> None:
        raise KeyError(event.id)

    def begin(cluster: Cluster) -> None:
        production(errors)
        cluster.offer(request("a"), fails)
        cluster.offer(request("b"))

    _, events, engine = scenario([(0.0, begin)])
    assert {id: e.outcome for id, e in ends(events).items()} == {"a": "completed", "b": "completed"}
    assert engine.starts == 1
    assert len(errors) == 1


class Dies(LocalHost):
    """A host elsewhere: from `die` on it hears nothing, and `noticed` reports its loss."""

    deaf = False

    def die(self) -> None:
        self.deaf = True
        self._emit = lambda event: None
        assert self._task is not None
        self._task.cancel()

    def cancel(self, id: str, reason: str) -> None:
        if not self.deaf:
            super().cancel(id, reason)

    def noticed(self) -> None:
        assert self.replica is not None
        seqs = [*self.replica.running.values(), *self.replica.waiting]
        left = [replace(s.request, progress=s.progress({}) if s.total_output else None) for s in seqs]
        self._lose_host(self.id, RuntimeError("gone"), left)


def lose(hosts: int) -> tuple[Cluster, list[Event]]:
    """a to d begin at r0, which dies at 0.2; a and b are cancelled at 0.3; the loss is noticed at 0.4."""

    def build(clock: VirtualClock) -> Cluster:
        def make(id: str, emit: Listener, lost: HostLost) -> Dies:
            engine = Engine(Linear(), LIMITS, clock)
            return Dies(id, engine, load("vllm"), Linear(), clock, emit=emit, lost=lost, policy="vllm")

        return cluster_of([make] * hosts, clock, ClusterOptions(PolicyChoice("vllm")))

    def first(cluster: Cluster) -> Dies:
        return cluster.hosts["r0"]  # type: ignore[return-value]

    steps: list[tuple[float, Act]] = [
        (0.0, offer(*(replace(request(id, most=100), group="g") for id in "abcd"))),
        (0.2, lambda cluster: first(cluster).die()),
        *[(0.3, cancels(id, "client disconnected")) for id in "ab"],
        (0.4, lambda cluster: first(cluster).noticed()),
    ]
    return play(build, steps)


def test_what_a_dead_host_was_asked_to_cancel_does_not_move() -> None:
    _, events = lose(2)
    for id in "ab":
        end = ends(events)[id]
        out = sum(e.tokens for e in events if isinstance(e, Tokens) and e.id == id)
        assert (end.outcome, end.reason, end.at) == ("cancelled", "client disconnected", 0.4)
        assert end.output == out > 0
        assert [e.replica for e in events if isinstance(e, Placed) and e.id == id] == ["r0"]
    for id in "cd":
        assert [e.replica for e in events if isinstance(e, Placed) and e.id == id] == ["r0", "r1"]
        assert (ends(events)[id].outcome, ends(events)[id].output) == ("completed", 100)


def test_what_the_last_host_was_asked_to_cancel_is_cancelled_not_failed() -> None:
    cluster, events = lose(1)
    outcomes = {id: e.outcome for id, e in ends(events).items()}
    assert outcomes == {"a": "cancelled", "b": "cancelled", "c": "failed", "d": "failed"}
    assert cluster.in_flight == 0
