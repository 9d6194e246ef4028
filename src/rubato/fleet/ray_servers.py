"""OpenAI servers in Ray actors: each actor starts a server on its node and ends it, wherever Ray has room.

Requests go to the server as they do to one that runs already (`server_replica`); Ray starts, watches and ends it. A
server that ends, or whose actor dies, is lost at once; Ray restarts none, the cluster starts another.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError

from rubato.core.clock import Clock
from rubato.core.events import Event, Left
from rubato.core.interfaces import LatencyModel, Router, Scaling, SeqView, View
from rubato.fleet.cluster import HostLost
from rubato.fleet.cluster_options import ClusterOptions
from rubato.fleet.event_bus import Listener
from rubato.fleet.http_client import HttpServer
from rubato.fleet.relay import Trips
from rubato.fleet.remote_host import ReplicaLostError
from rubato.fleet.server_actor import ServerActor, ServerCommand, ServerStart
from rubato.fleet.server_link import ZmqLink
from rubato.fleet.server_probe import FleetProbe, HomogeneityCheck
from rubato.fleet.server_replica import ServerReplica
from rubato.wire.link_keys import TOKEN_ENV

log = logging.getLogger(__name__)

_ray: Any = ray  # some of it has no types

PLACEMENT_S = 60.0  # for Ray to find a place; a cluster that grows may take longer, and is asked again
CLOSE_S = 5.0  # for a server to end; its guard kills it before that
RECHECK_S = 5.0  # interval of checks while servers are missing
LOSS_WINDOW_S = 600.0  # losses within it delay the next start
MAX_RESTART_DELAY_S = 60.0  # before another server replaces a lost one


class _Actor(ServerActor):
    """Starts and ends one server on its node.

    Args:
        is_remote: whether the server is to be reached from other nodes.
    """

    def __init__(self, name: str, command: ServerCommand, is_remote: bool) -> None:
        super().__init__(name, command, _ray.util.get_node_ip_address() if is_remote else "127.0.0.1")

    async def node(self) -> str:
        """Returns Ray's id of this node."""
        node_id: str = _ray.get_runtime_context().get_node_id()
        return node_id


class RayServerReplica(ServerReplica):
    """A `Host` over a server that a Ray actor starts. `actor` and `started` are set once the actor runs.

    Args:
        command: starts the server.
        resources: Ray's options for the actor on one node, e.g. {"num_gpus": 2}.
        server: HTTP to the server; gets its address once it serves.
        host: other arguments of `ServerReplica`.
    """

    def __init__(
        self, id: str, probe: FleetProbe, clock: Clock, *, command: ServerCommand, resources: Mapping[str, Any],
        server: HttpServer, **host: Any,
    ) -> None:  # fmt: skip
        super().__init__(id, probe, clock, **host)
        self._server_command, self._resources = command, resources
        self._server = server
        self.actor: Any = None
        self.started = ServerStart()
        self._has_place = False
        self._actor_end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the server.

        Raises:
            ValueError: it does not start, or cannot be used; the message has the end of its log.
        """
        try:
            await self._start_server()
            await super().start()
        except BaseException:
            self._begin_end()  # it must not keep its GPUs
            raise
        self.spawn(self._watch_actor())

    async def close(self) -> None:
        """Leaves the server, and ends it and its actor, within CLOSE_S seconds."""
        ending = self._begin_end()
        await super().close()
        await asyncio.shield(ending)

    async def _start_server(self) -> None:
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000, **self._resources}
        is_remote = sum(bool(node["Alive"]) for node in _ray.nodes()) > 1
        self.actor = ray.remote(**options)(_Actor).remote(self.id, self._server_command, is_remote)
        try:
            await self._wait_for_place()
            at: ServerStart = await self.actor.start.remote()
        except RayError as error:
            raise ValueError(f"the actor of server {self.id} died at its start ({_short(error)})") from error
        if not at.url:
            raise ValueError(f"server {self.id} did not start: {at.why}")
        self.started, self.probe.url = at, at.url
        self._server.set_url(at.url)
        log.info("replica %s serves at %s (process %d, actor %d, node %s)", self.id, at.url, at.pid, at.actor, at.node)

    async def _wait_for_place(self) -> None:
        """Waits until Ray has started the actor.

        Raises:
            ValueError: Ray finds no place for it.
        """
        try:
            async with asyncio.timeout(PLACEMENT_S):
                await self.actor.__ray_ready__.remote()
            self._has_place = True
        except TimeoutError:
            needs = {name: n for name, n in self._resources.items() if n and name != "runtime_env"}
            raise ValueError(
                f"Ray has found no place for server {self.id} in {PLACEMENT_S:g} s: it needs {needs} on one "
                f"node, and of {_ray.cluster_resources()} there are free {_ray.available_resources()}; ask for fewer "
                "replicas or less for each"
            ) from None

    async def _watch_actor(self) -> None:
        """Loses the server when it or its actor ends. Only the log says how: the reason has addresses, and the end of
        the server's own log."""
        try:
            what, how = "server", await self.actor.wait.remote()
        except RayError as error:
            what, how = "actor", _short(error)
        log.error("replica %s: its %s is gone: %s", self.id, what, how)
        self.die(ReplicaLostError(f"the {what} of replica {self.id} is gone"))

    def _begin_end(self) -> asyncio.Task[None]:
        """Begins to end the actor, once. The task is not one of those that `close` cancels."""
        if self._actor_end is None:
            self._actor_end = asyncio.ensure_future(self._end_actor())
        return self._actor_end

    async def _end_actor(self) -> None:
        if self.actor is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S if self._has_place else 0.0):
                await self.actor.close.remote()
        except (TimeoutError, RayError) as error:  # its guard ends the server when the actor dies
            log.info("replica %s: its actor did not say that it had closed (%s)", self.id, type(error).__name__)
        ray.kill(self.actor)


def _short(error: BaseException) -> str:
    """Returns the error without Ray's guesses about its causes."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].partition(' Some common causes')[0][:300]}".rstrip(": ")


@dataclass
class ReplaceLost:
    """An `Autoscaler` that replaces lost servers: the first one at once, further ones within LOSS_WINDOW_S seconds
    after 2, 4, 8 ... s, at most MAX_RESTART_DELAY_S.

    Args:
        servers: number of servers to keep.
    """

    servers: int
    _losses: deque[float] = field(init=False, repr=False, default_factory=deque)

    def observe(self, events: Sequence[Event]) -> None:
        self._losses.extend(event.at for event in events if isinstance(event, Left))

    def scale(self, unplaced: Sequence[SeqView], fleet: Sequence[View], starting: int, now: float) -> Scaling:
        missing = max(0, self.servers - len(fleet) - starting)
        while self._losses and self._losses[0] < now - LOSS_WINDOW_S:
            self._losses.popleft()
        if not missing:
            return Scaling(wake_at=now + RECHECK_S if starting else None)  # the start may fail
        lost = len(self._losses)
        not_before = self._losses[-1] + min(MAX_RESTART_DELAY_S, 2.0 ** (lost - 1)) if lost > 1 else now
        if now < not_before:
            return Scaling(wake_at=not_before)
        return Scaling(add=missing, wake_at=now + RECHECK_S)


class RayServers:
    """Makes hosts of servers in Ray actors, all of one command; `ray.init` has been called.

    It sets the link's token in the servers' environment, and in that of this process if it has none.

    Args:
        command: starts each server.
        trips: of the gateway, by request.
        resources: as `RayServerReplica`.
        key: of the servers' API, which their command or its environment sets.
        profile: as `ServerFleet`.
        step_timeout: as `ServerFleet` (s).
    """

    def __init__(
        self, command: ServerCommand, clock: Clock, options: ClusterOptions, trips: Trips, *,
        resources: Mapping[str, Any] | None = None, key: str = "",
        profile: Callable[[], LatencyModel | None] = lambda: None, step_timeout: float | None = None,
    ) -> None:  # fmt: skip
        token = os.environ.setdefault(TOKEN_ENV, uuid4().hex)  # random bits of the operating system
        self._command = ServerCommand(
            command.words, {**command.environment, TOKEN_ENV: token}, command.start_seconds
        )  # fmt: skip
        self._clock, self._options, self._trips = clock, options, trips
        self._resources = resources or {}
        self._key = key
        self._profile, self._step_timeout = profile, step_timeout
        self._replicas: dict[str, RayServerReplica] = {}
        self.homogeneity = HomogeneityCheck(options.choice.policy)

    def restrict_router(self, router: Router) -> Router:
        """Returns a router that places requests at servers that have their model."""
        return self.homogeneity.models.restrict_router(router, self._trips, lambda id: self._replicas[id].url)

    def host(self, id: str, emit: Listener, lost: HostLost) -> RayServerReplica:
        """Returns a host for one more server, which it starts."""
        for gone in [replica for replica in self._replicas.values() if replica.is_gone]:
            self.homogeneity.models.forget(gone.url)
            del self._replicas[gone.id]
        server = HttpServer("")  # until it has started
        probe = FleetProbe("", server, self.homogeneity, self._profile, ZmqLink, key=self._key)
        replica = self._replicas[id] = RayServerReplica(
            id, probe, self._clock, command=self._command, resources=self._resources, server=server,
            trips=self._trips, emit=emit, lost=lost, options=self._options.replica, step_timeout=self._step_timeout,
        )  # fmt: skip
        return replica
