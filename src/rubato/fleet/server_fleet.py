"""A cluster over OpenAI servers that run elsewhere, given by address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rubato.core.clock import Clock
from rubato.core.events import Event
from rubato.core.interfaces import LatencyModel, Router, Scaling, SeqView, View
from rubato.core.link_messages import Message
from rubato.fleet import server_probe
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.event_bus import Listener
from rubato.fleet.http_client import HttpServer
from rubato.fleet.server_kv import Trips
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_replica import ServerAbout, ServerReplica
from rubato.fleet.upstream import Upstream, UpstreamError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """One server. link: its engine core's address for gateways; empty: as the server says. key: for its API."""

    url: str
    link: str = ""
    key: str = ""


@dataclass
class FixedFleet:
    """An `Autoscaler` that wants as many replicas as there are servers: one that is lost is waited for."""

    servers: int

    def observe(self, events: Sequence[Event]) -> None:
        """The views say it all."""

    def scale(self, held: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        return Scaling(add=max(0, self.servers - len(fleet) - starting))


class Alike:
    """What the first server is, as `known`, and all others must be. policy: the one that is routed for."""

    def __init__(self, policy: str) -> None:
        self.known: ServerAbout | None = None
        self._first = ""  # its address
        self._policy = policy

    def check(self, url: str, found: ServerAbout) -> None:
        """Raises ValueError for a server that serves another model, or is another vLLM, than the first."""
        if self.known is None:
            self.known, self._first = found, url
        first = self.known
        for what, ours, theirs in (
            ("model", first.model, found.model),
            ("vLLM", first.version, found.version),
            ("policy", first.policy, found.policy),
        ):
            if ours and theirs and ours != theirs:
                raise ValueError(
                    f"server {url} has {what} {theirs!r}, and {self._first} {ours!r}: a gateway is for servers "
                    "that are alike; start another gateway for those"
                )
        if found.policy and found.policy != self._policy:
            raise ValueError(
                f"server {url} schedules by policy {found.policy!r}, and the gateway is to route for "
                f"{self._policy!r}: give the gateway --policy {found.policy}, or start the server with "
                f"{self._policy!r}"
            )


class ServerFleet:
    """Makes hosts for servers, each time for one that has none. transport, link: of a server; for tests, others than
    HTTP and ZeroMQ; no link: servers are not asked for theirs. profile: step times of servers that do not tell them."""

    def __init__(
        self,
        servers: Sequence[Server],
        clock: Clock,
        options: ClusterOptions,
        trips: Trips,
        *,
        profile: Callable[[], LatencyModel | None] = lambda: None,
        transport: Callable[[str], Upstream] = HttpServer,
        link: Callable[[str], Link] | None = ZmqLink,
        step_timeout: float | None = None,
    ) -> None:
        self._servers = servers
        self._clock = clock
        self._options = options
        self._trips = trips
        self._profile, self._transport, self._link = profile, transport, link
        self._step_timeout = step_timeout
        self._taken: dict[str, Server] = {}  # by the replica's id
        self.alike = Alike(options.choice.policy)

    @property
    def size(self) -> int:
        return len(self._servers)

    async def look(self) -> int:
        """How many servers answer; these come first from now on. Raises ValueError if none does."""
        upstreams = [self._transport(server.url) for server in self._servers]
        asked = [self._reachable(server, one) for server, one in zip(self._servers, upstreams, strict=True)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        for upstream in upstreams:
            await upstream.close()
        found = list(zip(self._servers, errors, strict=True))
        for _, error in found:
            if error is not None and not isinstance(error, ValueError):
                raise error
        there = [server for server, error in found if error is None]
        if not there:
            raise ValueError("; ".join(str(error) for _, error in found))
        self._servers = [*there, *(server for server, error in found if error is not None)]
        return len(there)

    def host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """One of the fleet's first hosts: its server must be there."""
        return self._host(id, emit, lost, patient=False)

    def extra_host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """One for a server that was lost: its start waits until it is back."""
        return self._host(id, emit, lost, patient=True)

    def _host(self, id: str, emit: Listener, lost: HostLost, *, patient: bool) -> ServerReplica:
        server = next(one for one in self._servers if one not in self._taken.values())
        self._taken[id] = server
        upstream = self._transport(server.url)

        def gone(id: str, error: BaseException, requests: Sequence[object]) -> None:
            del self._taken[id]
            lost(id, error, requests)  # type: ignore[arg-type]

        async def open_link() -> Link | None:
            await self._reachable(server, upstream)
            if self._link is None:
                return None
            address = server.link or await server_probe.link_address(server.url, upstream, server.key)
            if address is None:
                log.warning("server %s has no link: its load is known from what is sent there", server.url)
            return None if address is None else self._link(address)

        async def about(told: Message | None) -> ServerAbout:
            found = await server_probe.about(server.url, upstream, told, self._profile(), server.key)
            self.alike.check(server.url, found)
            log.info("replica %s is server %s", id, server.url)  # elsewhere it has its id alone: clients see that
            return found

        return ServerReplica(
            id, server.url, upstream, self._clock, about=about, link=open_link, trips=self._trips, emit=emit,
            lost=gone, options=self._options.replica, step_timeout=self._step_timeout, patient=patient,
            kv_used=lambda: server_probe.kv_used(upstream),
        )  # fmt: skip

    async def _reachable(self, server: Server, upstream: Upstream) -> None:
        """Raises ValueError for a server that does not answer."""
        try:
            reply = await upstream.open("GET", "/health", (), b"", seconds=server_probe.SECONDS)
            reply.close()
            why = "" if reply.status == 200 else f"/health answered {reply.status}"
        except UpstreamError as error:
            why = str(error)
        if why:
            raise ValueError(f"server {server.url} is not there ({why}): start it first, or correct its address")


async def server_cluster(
    fleet: ServerFleet, clock: Clock, options: ClusterOptions, *,
    around: Callable[[Router], Router] = lambda router: router,
) -> Cluster:  # fmt: skip
    """A cluster over a fleet's servers. One that does not answer yet is waited for while others serve. around: as
    `build.cluster_of`. Raises ValueError where none answers, else as that."""
    there = await fleet.look()
    options = replace(options, autoscaler=FixedFleet(fleet.size))
    return cluster_of([fleet.host] * there, clock, options, fleet.extra_host, around=around)
