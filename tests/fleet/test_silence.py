"""Replicas that fall silent, and wall clocks that jump, in virtual time: both sides of `ray_host` in one process."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rubato.core.clock import Clock, VirtualClock, VirtualLoop, run_virtual
from rubato.core.events import Event, Finished, Lost, Placed, Tokens
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.engines.simulated import WORDS, Engine
from rubato.fleet import linked_host, ray_host, remote_host
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.ray_host import CLOSE_S, MAX_SILENCE_S, RayHost, ray_cluster
from rubato.wire.messages import HEARTBEAT_S
from tests.kit import Linear, on_virtual_clock, request

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=500, kv_blocks=400, block_size=16)
OUTPUT = 400  # tokens; about 1.7 s


class Process:
    """An actor's handle. Frozen, it takes no call and gives no answer; both wait, as with a stopped process."""

    def __init__(self, actor: object) -> None:
        self._actor = actor
        self._awake = asyncio.Event()
        self._awake.set()
        self.freeze, self.thaw = self._awake.clear, self._awake.set

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._call(getattr(self._actor, name)(*given)))

    async def _call(self, doing: Coroutine[Any, Any, object]) -> object:
        try:
            await self._awake.wait()
        except asyncio.CancelledError:
            doing.close()  # it was never taken
            raise
        result = await doing
        await self._awake.wait()
        return result


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Those that Ray was told to kill; they live on here, to say what a dying process may still say."""
    found: list[Process] = []
    remote = lambda **_: lambda of: SimpleNamespace(remote=lambda *given: Process(of(*given)))  # noqa: E731
    monkeypatch.setattr(ray_host, "ray", SimpleNamespace(remote=remote, kill=found.append))
    monkeypatch.setattr(linked_host, "WallClock", VirtualClock)
    for module in (remote_host, linked_host):
        monkeypatch.setattr(module, "unix_time", lambda: VirtualClock().now())
    return found


def make(clock: Clock) -> tuple[Engine, LatencyModel]:
    return Engine(Linear(0.004, 0.00001), LIMITS, clock), Linear(0.004, 0.00001)


def fleet() -> tuple[Cluster, list[Process], list[Event]]:
    """Two replicas, not started, their processes, and the events to come."""
    cluster = ray_cluster([make, make], VirtualClock(), ClusterOptions(PolicyChoice("edf")))
    events: list[Event] = []
    cluster.listen(events.append)
    processes = []
    for host in cluster.hosts.values():
        assert isinstance(host, RayHost)
        processes.append(host.actor)
    return cluster, processes, events


def offer_four(cluster: Cluster) -> None:
    for n in range(4):
        cluster.offer(request(f"q{n}", 20, most=OUTPUT, arrival=cluster.clock.now()))


def later(seconds: float, do: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, do)


def stop_everything(seconds: float) -> None:
    """As for a process that is stopped and goes on: what was due meanwhile is due now, all of it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._virtual += seconds
    loop._timers = [(max(when, loop._virtual), *rest) for when, *rest in loop._timers]  # type: ignore[misc]
    heapq.heapify(loop._timers)


def outcomes(events: list[Event]) -> dict[str, tuple[str, int]]:
    return {e.id: (e.outcome, e.output) for e in events if isinstance(e, Finished)}


def test_a_frozen_replica_is_lost_and_what_it_says_later_is_not_heard(
    killed: list[Process], caplog: pytest.LogCaptureFixture
) -> None:
    """It thaws while its requests run elsewhere, and tells of tokens that these have received there."""
    events: list[Event] = []

    async def main() -> None:
        cluster, (process, _), told = fleet()

        def thaw(event: Event) -> None:
            if isinstance(event, Lost) and event.id == "q0":
                assert killed == []  # the cluster first, so that nothing waits
                later(0.5, process.thaw)

        cluster.listen(thaw)
        await cluster.start()
        offer_four(cluster)
        later(0.8, process.freeze)
        await asyncio.wait_for(cluster.drain(), 10 * MAX_SILENCE_S)
        await cluster.clock.sleep_until(cluster.clock.now() + 5, 0)
        assert killed == [process]
        await cluster.close()
        events.extend(told)

    run_virtual(main())
    lost = {e.id: e.at for e in events if isinstance(e, Lost)}
    assert set(lost) == {"q0", "q2"}
    for at in lost.values():
        assert MAX_SILENCE_S - 2 * HEARTBEAT_S < at - 0.8 < MAX_SILENCE_S + 2 * HEARTBEAT_S
    assert "replica r0 has not reported for 10 s" in caplog.text
    assert outcomes(events) == {f"q{n}": ("completed", OUTPUT) for n in range(4)}
    for n in range(4):
        text = "".join(e.text for e in events if isinstance(e, Tokens) and e.id == f"q{n}")
        assert text == "".join(WORDS[i % len(WORDS)] for i in range(1, OUTPUT + 1))


@on_virtual_clock
async def test_a_replica_with_nothing_to_tell_is_not_silent(killed: list[Process]) -> None:
    cluster, _, _ = fleet()
    await cluster.start()
    await cluster.clock.sleep_until(20 * MAX_SILENCE_S, 0)
    assert list(cluster.hosts) == ["r0", "r1"]
    assert killed == []
    assert all(host.view().as_of >= 20 * MAX_SILENCE_S - 2 * HEARTBEAT_S for host in cluster.hosts.values())
    await cluster.close()


@on_virtual_clock
async def test_a_controller_that_was_stopped_loses_nobody(killed: list[Process]) -> None:
    """It wakes up a minute later: no report has come meanwhile, and its timers are due before any does."""
    cluster, processes, events = fleet()
    await cluster.start()
    offer_four(cluster)
    for _ in range(3):
        await cluster.clock.sleep_until(cluster.clock.now() + 0.3, 0)
        for process in processes:
            process.freeze()
        stop_everything(60.0)
        await cluster.clock.sleep_until(cluster.clock.now() + 2 * HEARTBEAT_S, 0)
        for process in processes:
            process.thaw()
    await cluster.drain()
    assert killed == []
    assert len([e for e in events if isinstance(e, Placed)]) == 4
    assert outcomes(events) == {f"q{n}": ("completed", OUTPUT) for n in range(4)}
    await cluster.close()


@on_virtual_clock
async def test_closing_does_not_wait_for_the_frozen(killed: list[Process]) -> None:
    cluster, processes, events = fleet()
    await cluster.start()
    offer_four(cluster)
    await cluster.clock.sleep_until(0.8, 0)
    for process in processes:
        process.freeze()
    began = cluster.clock.now()
    await cluster.close()
    assert cluster.clock.now() - began <= 2 * CLOSE_S
    assert {outcome for outcome, _ in outcomes(events).values()} == {"failed"}
    assert cluster.finished == cluster.offered == 4
    assert cluster.in_flight == 0
    assert set(killed) == set(processes)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_wall_clock_that_jumps_moves_no_event(
    killed: list[Process], monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """It jumps at every reading, so also between a replica's and the controller's."""
    readings = itertools.count(1)

    async def main() -> list[Event]:
        cluster, _, events = fleet()
        await cluster.start()
        for n in range(4):
            cluster.offer(request(f"q{n}", 20, most=OUTPUT, ttft=1.0, tpot=0.02, arrival=cluster.clock.now()))
        await cluster.drain()
        await cluster.close()
        return events

    undisturbed = run_virtual(main())
    for module in (remote_host, linked_host):
        monkeypatch.setattr(module, "unix_time", lambda: VirtualClock().now() + next(readings) * jump)
    assert run_virtual(main()) == undisturbed
    assert next(readings) > 2, "the wall clock was never read"
    assert all(e.verdict.met for e in undisturbed if isinstance(e, Finished))
