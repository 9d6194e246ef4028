"""The checks that other tests rely on can fail: a broken invariant is seen, wherever it is asserted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import pytest

from rubato.core.clock import Clock, VirtualClock, WallClock, run_strict, run_virtual
from rubato.core.events import Event, Finished
from rubato.core.interfaces import View
from rubato.core.plan import Limits, Plan
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.policies import load
from rubato.replica.sequence import Seq
from rubato.simulation.simulate import simulate_events
from rubato.simulation.simulated_host import HostOptions
from tests.core import test_speculation
from tests.fleet import test_cluster, test_handoff
from tests.kit import Linear, integrity, request, run_spec
from tests.kit.clusters import offer
from tests.policies import test_properties
from tests.simulation import test_equal

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, kv_blocks=50, block_size=8)
LOAD = test_properties.Load((request("a"), request("b", 30)), {"a": (5,), "b": (9,)}, LIMITS)
VLLM = ClusterOptions(PolicyChoice("vllm"))
FAST = run_spec(Linear(), LIMITS, "vllm", learns=False)


class Broken(AssertionError):
    """What these tests break."""


def breaks(*args: object) -> None:
    raise Broken("not what it should be")


HARNESSES: dict[str, tuple[object, str, Callable[[], object]]] = {
    "properties, replica": (integrity, "check", lambda: test_properties.run(LOAD, "edf")),
    "properties, several replicas": (integrity, "check", lambda: test_properties.run(LOAD, "distserve")),
    "speculation, replica": (integrity, "check", lambda: test_speculation.run("vllm_spec", LOAD.requests, {})),
    "hand-off, replica": (
        integrity, "check",
        lambda: test_handoff.scenario([(0.0, offer(request("a", 20)))], (1, 1)),
    ),
    "simulated host, replica": (
        integrity, "check", lambda: test_equal.run_fast(LOAD.requests, LOAD.truth, FAST),
    ),
    "worker, books": (
        integrity, "check_cluster", lambda: test_cluster.scenario([(0.0, offer(request("a")))]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARNESSES)
def test_a_broken_invariant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, run = HARNESSES[name]
    run()
    monkeypatch.setattr(where, what, breaks)
    with pytest.raises(Broken):
        run()


def test_books_that_do_not_balance_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "in_flight", property(lambda self: len(self._requests) + 1))
    with pytest.raises(AssertionError):
        test_properties.run(LOAD, "edf")
    with pytest.raises(AssertionError):
        test_cluster.scenario([(0.0, offer(request("a")))])


class Meddling(test_properties.Amnesiac):
    """A policy that writes to what it is shown; what it plans is fine."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        for seq in view.running:
            assert isinstance(seq, Seq)
            seq.demoted = True
        return plan


def test_a_policy_that_changes_what_it_sees_is_seen() -> None:
    def watching(policy: str) -> test_properties.Watching:
        watching = test_properties.Watching(policy)
        watching.inner = Meddling(policy, 1000)
        return watching

    test_properties.run_watched(LOAD, "vllm")
    with pytest.raises(AssertionError, match="changed"):
        test_properties.run_watched(LOAD, "vllm", watching)


class Fails:
    """A policy that fails at its third step."""

    needs = frozenset[str]()

    def __init__(self) -> None:
        self.inner = load("vllm")
        self.plans = 0

    def observe(self, events: Sequence[Event]) -> None:
        self.inner.observe(events)

    def plan(self, view: View) -> Plan:
        self.plans += 1
        if self.plans == 3:
            raise RuntimeError("a policy's own error")
        return self.inner.plan(view)


def test_a_failed_step_is_seen_in_every_property(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubato.fleet.build.load", lambda name, settings: Fails())
    with pytest.raises(AssertionError, match="a policy's own error"):
        test_properties.run(LOAD, "vllm")


def broken_once(event: Event) -> None:
    if isinstance(event, Finished):
        breaks()


def test_a_listener_s_error_ends_a_simulation() -> None:
    with pytest.raises(Broken):
        simulate_events(LOAD.requests, LOAD.truth, FAST, watch=lambda cluster, event: broken_once(event))


def test_a_listener_s_error_ends_a_run_of_the_fast_driver() -> None:
    def ready(cluster: Cluster) -> None:
        cluster.listen(broken_once)

    with pytest.raises(Broken):
        test_equal.drive(LOAD.requests, LOAD.truth, FAST, HostOptions(), ready)


async def one_request(clock: Clock) -> None:
    cluster = local_cluster([Engine(Linear(1e-4, 0), LIMITS, clock)], [Linear()], clock, VLLM)
    cluster.listen(broken_once)
    await cluster.start()
    cluster.offer(request("a", most=2))
    await cluster.drain()
    await cluster.close()


def test_a_listener_s_error_ends_a_strict_run_in_real_time() -> None:
    with pytest.raises(Broken):
        run_strict(one_request(WallClock()))


def test_an_error_that_main_outlives_is_raised_all_the_same() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(breaks)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1.0)

    with pytest.raises(Broken):
        run_virtual(main())


def test_an_error_at_the_very_end_is_raised() -> None:
    """In the last turn of the loop that `main` takes, with nothing left to await."""

    async def main() -> None:
        clock = VirtualClock()
        cluster = local_cluster([Engine(Linear(), LIMITS, clock)], [Linear()], clock, VLLM)
        await cluster.start()
        await cluster.close()
        cluster.listen(breaks)
        cluster.offer(request("late"))

    with pytest.raises(Broken):
        run_virtual(main())
