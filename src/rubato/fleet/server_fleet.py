"""A cluster over OpenAI servers that run elsewhere, given by address."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from rubato.core.capabilities import cure
from rubato.core.clock import Clock
from rubato.core.events import Event
from rubato.core.interfaces import LatencyModel, Router, Scaling, SeqView, View
from rubato.core.slo import SLO_RULES
from rubato.fleet import server_probe
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.event_bus import Listener
from rubato.fleet.http_client import HttpServer
from rubato.fleet.relay import Trips
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_probe import FleetProbe, HomogeneityCheck, ServerAbout
from rubato.fleet.server_replica import ServerReplica
from rubato.fleet.upstream import Upstream
from rubato.wire.messages import CoreAbout

log = logging.getLogger(__name__)

NO_LINK_WARNING = (  # of a server: its address, what vLLM's --additional-config is to be
    "server %s has no link: its load is known from what is sent there, and without Rubato's plug-in its batches follow "
    "its own order, so that SLOs decide only what is admitted and where it goes. For batches that follow SLOs install "
    "Rubato where vLLM is and start it with --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware "
    "--additional-config '%s' (docs/vllm.md)"
)

RECHECK_S = 1.0  # interval of checks while a server has no replica


@dataclass(frozen=True)
class Server:
    """Describes one server.

    Args:
        link: address of its engine core for gateways; empty: as the server says.
        key: for its API.
    """

    url: str
    link: str = ""
    key: str = ""


@dataclass
class WaitForLost:
    """Is an `Autoscaler` that wants a replica for each server, and waits for lost servers.

    Args:
        unused_count: counts servers without a replica.
    """

    unused_count: Callable[[], int]

    def observe(self, events: Sequence[Event]) -> None:
        """Ignores events: the views are enough."""

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        unused_count = self.unused_count()
        return Scaling(add=unused_count, wake_at=now + RECHECK_S if unused_count else None)  # a start may fail


class ServerFleet:
    """Makes hosts for servers, each for a server without one.

    Args:
        trips: the gateway's, by request.
        profile: predicts step times of servers that do not report them.
        transport: opens HTTP to a server's address.
        link: opens the link to a core's address; None: servers are not asked for links.
        step_timeout: seconds, as in `local_host.LocalHost`.
    """

    def __init__(
        self, servers: Sequence[Server], clock: Clock, options: ClusterOptions, trips: Trips, *,
        profile: Callable[[], LatencyModel | None] = lambda: None, transport: Callable[[str], Upstream] = HttpServer,
        link: Callable[[str], Link] | None = ZmqLink, step_timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._servers = servers
        self._clock = clock
        self._options = options
        self._trips = trips
        self._profile, self._transport, self._link = profile, transport, link
        self._step_timeout = step_timeout
        self._needs: Set[str] = frozenset()  # of the router
        self._replicas: dict[str, ServerReplica] = {}  # the last one of each server, by its address
        self._urls: dict[str, str] = {}  # of the server of each replica
        self.homogeneity = HomogeneityCheck(options.choice.policy, [server.url for server in servers])

    def _unused_servers(self) -> list[Server]:
        """Returns the servers without a replica."""
        return [s for s in self._servers if s.url not in self._replicas or self._replicas[s.url].is_gone]

    @property
    def unused_count(self) -> int:
        return len(self._unused_servers())

    async def find_ready(self) -> int:
        """Returns how many servers are ready, and moves these to the front. Raises ValueError if none is."""
        upstreams = [self._transport(server.url) for server in self._servers]
        questions = [
            server_probe.ready_models(server.url, one, server.key)
            for server, one in zip(self._servers, upstreams, strict=True)
        ]
        answers = await asyncio.gather(*questions, return_exceptions=True)
        for upstream in upstreams:
            await upstream.close()
        ready, errors = list[Server](), dict[str, BaseException]()
        for server, answer in zip(self._servers, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                self.homogeneity.check_models(server.url, answer)
                ready.append(server)
            except ValueError as error:
                errors[server.url] = error
        if not ready:
            raise ValueError("; ".join(map(str, errors.values())))
        self._servers = [*ready, *(server for server in self._servers if server.url in errors)]
        return len(ready)

    def restrict_router(self, router: Router) -> Router:
        """Returns a router that places requests at servers that have their model. From now on a server that lacks what
        the router needs is waited for while others serve."""
        self._needs = router.needs
        return self.homogeneity.models.restrict_router(router, self._trips, lambda id: self._urls[id])

    def host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """Returns one of the fleet's first hosts, whose server must be ready."""
        return self._host(id, emit, lost, wait_until_ready=False)

    def extra_host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """Returns a host for a lost server, whose start waits until the server is ready."""
        return self._host(id, emit, lost, wait_until_ready=True)

    def _host(self, id: str, emit: Listener, lost: HostLost, *, wait_until_ready: bool) -> ServerReplica:
        server = self._unused_servers()[0]

        def check(about_server: ServerAbout, core: CoreAbout | None) -> None:
            if wait_until_ready and (missing := self._needs - about_server.supports):
                lacks = f"server {server.url} lacks {', '.join(sorted(missing))}, which the router needs"
                raise ValueError(f"{lacks}: {cure(missing)}")
            log.info("replica %s is server %s", id, server.url)  # elsewhere it has its id alone: clients see that
            if core is None:
                log.warning(NO_LINK_WARNING, server.url, json.dumps({"rubato": self._plug_in_settings()}))

        probe = FleetProbe(
            server.url, self._transport(server.url), self.homogeneity, self._profile, self._link, key=server.key,
            link_address=server.link, check=check,
        )  # fmt: skip
        replica = self._replicas[server.url] = ServerReplica(
            id, probe, self._clock, trips=self._trips, emit=emit, lost=lost,
            options=self._options.replica, step_timeout=self._step_timeout, wait_until_ready=wait_until_ready,
        )  # fmt: skip
        self._urls = {one.id: url for url, one in self._replicas.items()}
        return replica

    def _plug_in_settings(self) -> dict[str, object]:
        """Returns settings of the plug-in, for a server that is to have it."""
        choice, rule = self._options.choice, self._options.replica.slo_rule
        settings: dict[str, object] = {"policy": choice.policy}
        settings |= {"settings": dict(choice.settings)} if choice.settings else {}
        settings |= {"slo_rule": rule} if rule != SLO_RULES[0] else {}
        return settings | ({"link": {}} if self._link is not None else {})  # an endpoint picker has none


async def server_cluster(
    fleet: ServerFleet, clock: Clock, options: ClusterOptions, *,
    wrap_router: Callable[[Router], Router] = lambda router: router,
) -> Cluster:  # fmt: skip
    """Returns a cluster over a fleet's servers. One that is not ready yet is waited for while others serve.

    Args:
        wrap_router: as in `build.cluster_of`.

    Raises:
        ValueError: no server is ready; or as in `build.cluster_of`.
    """
    ready = await fleet.find_ready()
    options = replace(options, autoscaler=WaitForLost(lambda: fleet.unused_count))
    return cluster_of(
        [fleet.host] * ready, clock, options, fleet.extra_host,
        wrap_router=lambda router: wrap_router(fleet.restrict_router(router)),
    )  # fmt: skip
