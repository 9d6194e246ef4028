"""A cluster over OpenAI servers that run elsewhere, given by address."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence, Set
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
from rubato.fleet.served_models import Models, ServedModels
from rubato.fleet.server_kv import Trips
from rubato.fleet.server_link import Link, ZmqLink
from rubato.fleet.server_replica import ServerAbout, ServerReplica, UnlikeServerError
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
    """One server. link: its engine core's address for gateways; empty: as the server says. key: for its API."""

    url: str
    link: str = ""
    key: str = ""


@dataclass
class WaitForLost:
    """An `Autoscaler` that wants a replica for each server, and waits for lost servers. unused_count: counts servers
    without a replica."""

    unused_count: Callable[[], int]

    def observe(self, events: Sequence[Event]) -> None:
        """Ignores events: the views are enough."""

    def scale(self, held: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        unused_count = self.unused_count()
        return Scaling(add=unused_count, wake_at=now + RECHECK_S if unused_count else None)  # a start may fail


class HomogeneityCheck:
    """Checks that all servers of a fleet are like the first one. policy: of the gateway's router. urls: of the servers,
    if known."""

    def __init__(self, policy: str, urls: Iterable[str] = ()) -> None:
        self.first_server: ServerAbout | None = None
        self.models = ServedModels(urls)
        self._first_url = ""  # its address
        self._policy = policy

    def check_models(self, url: str, models: Models) -> None:
        """Takes the models of a starting server. Raises ValueError if the fleet's model, the first of the first server,
        is not among them."""
        main = self.models.main = self.models.main or next(iter(models))
        if main not in models:
            raise ValueError(f"server {url} lists the models {', '.join(models):.200}, and not the fleet's, {main!r}")
        self.models.read(url, models)

    def check(self, url: str, about_server: ServerAbout) -> None:
        """Raises UnlikeServerError for a server of another vLLM version, or another policy, than the first server."""
        if self.first_server is None:
            self.first_server, self._first_url = about_server, url
        first = self.first_server
        for what, ours, theirs in (
            ("vLLM", first.version, about_server.version),
            ("policy", first.policy, about_server.policy),
        ):
            if ours and theirs and ours != theirs:
                raise UnlikeServerError(
                    f"server {url} has {what} {theirs!r}, and {self._first_url} {ours!r}: a gateway is for servers "
                    "that are alike; start another gateway for those"
                )
        if about_server.policy and about_server.policy != self._policy:
            raise UnlikeServerError(
                f"server {url} schedules by policy {about_server.policy!r}, and the gateway is to route for "
                f"{self._policy!r}: give the gateway --policy {about_server.policy}, or start the server with "
                f"{self._policy!r}"
            )


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
        self._needs: Set[str] = frozenset()  # of the router
        self._replicas: dict[str, ServerReplica] = {}  # the last one of each server, by its address
        self._urls: dict[str, str] = {}  # of the server of each replica
        self.homogeneity = HomogeneityCheck(options.choice.policy, [server.url for server in servers])

    def _unused_servers(self) -> list[Server]:
        """Servers without a replica."""
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

    def routed_by(self, router: Router) -> Router:
        """A router that places requests at servers that have their model. From now on a server that lacks what the
        router needs is waited for while others serve."""
        self._needs = router.needs
        return self.homogeneity.models.placed_by(router, self._trips, lambda id: self._urls[id])

    def host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """One of the fleet's first hosts: its server must be ready."""
        return self._host(id, emit, lost, wait_until_ready=False)

    def extra_host(self, id: str, emit: Listener, lost: HostLost) -> ServerReplica:
        """A host for a lost server: its start waits until the server is ready."""
        return self._host(id, emit, lost, wait_until_ready=True)

    def _host(self, id: str, emit: Listener, lost: HostLost, *, wait_until_ready: bool) -> ServerReplica:
        server = self._unused_servers()[0]
        upstream = self._transport(server.url)
        models: Models = {}

        async def open_link() -> Link | None:
            nonlocal models
            models = await server_probe.ready_models(server.url, upstream, server.key)
            self.homogeneity.check_models(server.url, models)
            if self._link is None:
                return None
            address = server.link or await server_probe.link_address(server.url, upstream, server.key)
            return None if address is None else self._link(address)

        async def about(core: CoreAbout | None) -> ServerAbout:
            profile = self._profile()
            main = self.homogeneity.models.main
            about_server = await server_probe.about(server.url, upstream, core, profile, models, main)
            self.homogeneity.check(server.url, about_server)
            if wait_until_ready and (missing := self._needs - about_server.supports):
                lacks = f"server {server.url} lacks {', '.join(sorted(missing))}, which the router needs"
                raise ValueError(f"{lacks}: {cure(missing)}")
            log.info("replica %s is server %s", id, server.url)  # elsewhere it has its id alone: clients see that
            if core is None:
                choice, rule = self._options.choice, self._options.replica.slo_rule
                plug_in: dict[str, object] = {"policy": choice.policy}
                plug_in |= {"settings": dict(choice.settings)} if choice.settings else {}
                plug_in |= {"slo_rule": rule} if rule != SLO_RULES[0] else {}
                plug_in |= {"link": {}} if self._link is not None else {}  # an endpoint picker has none
                log.warning(NO_LINK_WARNING, server.url, json.dumps({"rubato": plug_in}))
            return about_server

        async def read_models() -> None:
            listed = await server_probe.models(server.url, upstream, server.key, server_probe.MODELS_ANSWER_S)
            self.homogeneity.models.read(server.url, listed)

        replica = self._replicas[server.url] = ServerReplica(
            id, server.url, upstream, self._clock, about=about, link=open_link, trips=self._trips, emit=emit,
            lost=lost, options=self._options.replica, step_timeout=self._step_timeout,
            wait_until_ready=wait_until_ready, kv_used=lambda: server_probe.kv_used(upstream),
            read_models=read_models,
        )  # fmt: skip
        self._urls = {one.id: url for url, one in self._replicas.items()}
        return replica


async def server_cluster(
    fleet: ServerFleet, clock: Clock, options: ClusterOptions, *,
    around: Callable[[Router], Router] = lambda router: router,
) -> Cluster:  # fmt: skip
    """A cluster over a fleet's servers. One that is not ready yet is waited for while others serve. around: as
    `build.cluster_of`. Raises ValueError where none is ready, else as that."""
    ready = await fleet.find_ready()
    options = replace(options, autoscaler=WaitForLost(lambda: fleet.unused_count))
    return cluster_of(
        [fleet.host] * ready, clock, options, fleet.extra_host, around=lambda router: around(fleet.routed_by(router))
    )
