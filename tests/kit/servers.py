"""Stub servers in this process, and a cluster in front of them as a gateway has one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rubato.core.clock import Clock
from rubato.core.events import Event
from rubato.core.interfaces import Router
from rubato.core.plan import Limits
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.relay import Trips
from rubato.fleet.server_fleet import Server, ServerFleet, server_cluster
from rubato.latency.affine import Model
from tests.stubs.vllm_server import MemoryLink, StubCore, StubServer


@asynccontextmanager
async def stub_servers(
    clock: Clock, urls: Iterable[str], step: Model, limits: Limits, options: ClusterOptions, *, seed: int = 0,
    **core: Any,
) -> AsyncIterator[dict[str, StubServer]]:  # fmt: skip
    """Servers at these URLs, and those that are added to them, as long as the context.

    Args:
        options: of a cluster of them: its scheduler and what their replicas are is theirs, too.
        core: other arguments of `StubCore`.
    """
    choice = options.choice
    policy = (choice.policy, options.replica)
    settings = dict(choice.settings)
    cores = [
        StubCore(step, limits, clock, *policy, seed=seed + i, settings=settings, **core) for i, _ in enumerate(urls)
    ]
    for one in cores:
        await one.start()
    servers = {url: StubServer(one) for url, one in zip(urls, cores, strict=True)}
    try:
        yield servers
    finally:
        for server in servers.values():
            await server.core.host.close()


def fleet_of(
    servers: Mapping[str, StubServer], clock: Clock, options: ClusterOptions, trips: Trips, *,
    linked: Collection[str] = (), **more: Any,
) -> ServerFleet:  # fmt: skip
    """The fleet of these servers.

    Args:
        linked: the URLs of those of which is said that they have the link; others may say so themselves.
        more: other arguments of `ServerFleet`.
    """

    def link(address: str) -> MemoryLink:
        return MemoryLink(servers[f"http://{urlsplit(address).hostname}"].core)

    urls = [Server(url, url if url in linked else "") for url in servers]
    return ServerFleet(urls, clock, options, trips, **{"transport": servers.__getitem__, "link": link, **more})


@dataclass
class Served:
    """A cluster and the servers that it routes to."""

    clock: Clock
    servers: list[StubServer]
    fleet: ServerFleet
    cluster: Cluster
    trips: Trips
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def served(
    servers: Mapping[str, StubServer], clock: Clock, options: ClusterOptions, *,
    wrap_router: Callable[[Router], Router] = lambda router: router, **more: Any,
) -> AsyncIterator[Served]:  # fmt: skip
    """A cluster of these servers, started, as long as the context.

    Args:
        wrap_router: as in `server_cluster`.
        more: as in `fleet_of`.
    """
    trips: Trips = {}
    fleet = fleet_of(servers, clock, options, trips, **more)
    cluster = await server_cluster(fleet, clock, options, wrap_router=wrap_router)
    one = Served(clock, list(servers.values()), fleet, cluster, trips)
    cluster.listen(one.events.append)
    try:
        await cluster.start()
        yield one
    finally:
        await cluster.close()
