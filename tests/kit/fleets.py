"""What goes wrong in a fleet: engines that fail, replicas that are lost, clients that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from rubato.core.plan import Batch, StepResult
from rubato.engines.simulated import Engine, KVLink
from rubato.fleet.cluster import Cluster
from rubato.fleet.local_host import LocalHost

Act = Callable[[Cluster], None]
LINK = KVLink(kv_bytes=8, bandwidth=1e4, latency=0.002)


class Breaks(Engine):
    """Fails its next step once `fails` is set, and does not start again once it is `dead`."""

    fails = dead = False

    async def start(self) -> None:
        if self.dead:
            raise RuntimeError("the device fell off")
        await super().start()

    async def execute(self, batch: Batch) -> StepResult:
        if self.fails:
            self.fails = False
            raise RuntimeError("a cosmic ray")
        return await super().execute(batch)


class Elsewhere(LocalHost):
    """It may be lost as a host in another process is: what it served goes elsewhere."""

    def vanish(self) -> None:
        replica = self._started_replica()
        self._flush()  # a controller elsewhere knows what it was told
        self._emit = lambda event: None
        assert self._task is not None
        self._task.cancel()
        left = [s for s in replica.seqs.values() if not s.ended]
        requests = [replace(s.request, progress=s.progress({}) if s.total_output or s.demoted else None) for s in left]
        self._lose_host(self.id, RuntimeError("gone"), requests)


def breaks(replica: int, *, dead: bool = False) -> Act:
    """Has its engine fail its next step, and not start again where it is dead."""

    def act(cluster: Cluster) -> None:
        host = cluster.hosts.get(f"r{replica}")
        if isinstance(host, LocalHost):
            host.engine.fails, host.engine.dead = True, dead  # type: ignore[attr-defined]

    return act


def vanishes(replica: int) -> Act:
    def act(cluster: Cluster) -> None:
        host = cluster.hosts.get(f"r{replica}")
        if isinstance(host, Elsewhere):
            host.vanish()

    return act


def cancels(id: str, reason: str = "client disconnected") -> Act:
    return lambda cluster: cluster.cancel(id, reason)


class Disturbances(NamedTuple):
    """When, in seconds, which replica is lost, which engine fails, which request is cancelled."""

    gone: list[tuple[float, int]]
    broken: list[tuple[float, int]]
    cancelled: list[tuple[float, int]]

    @property
    def acts(self) -> list[tuple[float, Act]]:
        acts = [(at, vanishes(i)) for at, i in self.gone] + [(at, breaks(i)) for at, i in self.broken]
        return [*acts, *((at, cancels(f"q{i}")) for at, i in self.cancelled)]


def disturbances() -> st.SearchStrategy[Disturbances]:
    """Of three replicas and twelve requests q0, q1, ..."""

    def at(which: int, most: int) -> st.SearchStrategy[list[tuple[float, int]]]:
        times = st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3])
        return st.lists(st.tuples(times, st.integers(0, which)), max_size=most)

    return st.builds(Disturbances, at(2, 2), at(2, 2), at(11, 3))
