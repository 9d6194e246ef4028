"""Replicas in Ray actors: each a whole `LocalHost` with its engine, in a process of its own, on any node of a cluster.

The link to an actor is made of Ray's calls: messages go in numbered batches, reports come back by long polling. A dead
actor is noticed by the poll that waits for it; a frozen one by its silence, and it is killed; its requests go to the
others with the tokens that had arrived.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rubato.core.clock import PLAN, Clock
from rubato.core.plan import Recall
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import Request
from rubato.fleet.build import cluster_of
from rubato.fleet.cluster import Cluster, HostLost
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.event_bus import Listener
from rubato.fleet.linked_host import Cancel, EngineParts, LinkedHost, Submit, ToHost
from rubato.fleet.remote_host import LinkSession, RemoteHost, ReplicaLostError
from rubato.policies import load
from rubato.wire import messages
from rubato.wire.messages import HEARTBEAT_S, Beat
from rubato.wire.replica_report import ReplicaReport

log = logging.getLogger(__name__)

NO_KV_TRANSFER = "KV does not move between Ray actors yet: run policies that move it with `fleet: local`"

# Seconds without a report after which a replica is lost. Steps run in threads beside the event loop that reports, so
# only what holds Python's lock (a compilation, an import) can delay a report: for less than 10 s.
MAX_SILENCE_S = 10.0
CLOSE_S = 2.0  # for a replica to end by itself: SIGTERM must not take long


class RayLink:
    """Connects to an actor (`server_link.Link`); `spawn` runs a task of the host."""

    is_refused = False

    def __init__(self, replica: str, actor: Any, spawn: Callable[[Any], object]) -> None:
        self._replica, self._actor, self._spawn = replica, actor, spawn
        self._outbox: list[ToHost] = []
        self._batches_sent = 0
        self._is_closed = False
        self._inbox: deque[Beat | ReplicaReport] = deque()

    def send(self, message: ToHost) -> None:
        """Sends the message in one batch with all others of this turn of the event loop."""
        if self._is_closed:
            return
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        self._spawn(self._deliver(self._batches_sent, batch))
        self._batches_sent += 1

    async def _deliver(self, number: int, batch: Sequence[ToHost]) -> None:
        try:
            await self._actor.do.remote(number, batch)
        except RayError as error:  # the poll notices the same, and the requests move
            log.warning("replica %s did not take %d messages: %s", self._replica, len(batch), type(error).__name__)

    async def receive(self) -> Beat | ReplicaReport:
        while not self._inbox:
            try:
                self._inbox += await self._actor.say.remote()
            except RayError as error:
                raise _process_loss(self._replica, error) from error
        return self._inbox.popleft()

    def close(self) -> None:
        """Informs Ray that the actor must not go on. Ray also kills a stopped process after 5 s."""
        self._is_closed = True
        ray.kill(self._actor)


class RayHost(RemoteHost):
    """One replica in a Ray actor (`interfaces.Host`). Each actor's length predictor is a copy that learns from its own
    requests; this one learns from all.

    Args:
        make: called in the actor with its clock; returns the engine and latency model.
        step_timeout: seconds, as in `local_host.LocalHost`.
        resources: Ray's actor options, e.g. {"num_gpus": 1}.

    Raises:
        ValueError: the policy moves KV.
    """

    session: LinkSession
    why_no_kv = NO_KV_TRANSFER

    def __init__(
        self, id: str, emit: Listener, lost: HostLost, *, make: Callable[[Clock], EngineParts], clock: Clock,
        choice: PolicyChoice, options: ReplicaOptions, step_timeout: float | None, resources: Mapping[str, Any],
    ) -> None:  # fmt: skip
        if "kv_transfer" in load(choice.policy, choice.settings).needs:
            raise ValueError(f"policy {choice.policy!r} needs kv_transfer. {NO_KV_TRANSFER}")
        super().__init__(id, clock, emit=emit, lost=lost, options=options)
        actor_options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 1000, **resources}
        self.actor: Any = ray.remote(**actor_options)(LinkedHost).remote(id, make, choice, options, step_timeout)
        self._link = RayLink(id, self.actor, self.spawn)
        self.session = LinkSession(id, self._link, clock, is_idle=lambda: False, apply=self._apply, lose=self.die)

    async def start(self) -> None:
        self._mirror(*await self.actor.start.remote())
        self.session.measure_ahead(await self.actor.beat.remote(self.clock.now()))
        self.spawn(self.session.listen())
        self.spawn(self._watch())

    def submit(self, request: Request) -> None:
        """Raises ValueError for a request that is to wait for a tool: should this process die meanwhile, no other
        would know of the wait."""
        if request.uses_tools:
            raise ValueError(f"request {request.id!r} waits for a tool, which only a replica in this process does")
        self.remote.submit(request, self.clock.now())
        self._link.send(Submit(self.session.in_other_clock(request)))

    def cancel(self, id: str, reason: str) -> None:
        self._link.send(Cancel(id, reason))

    def recall(self, kind: Recall) -> None:
        self.session.send(messages.Recall(kind))

    async def close(self) -> None:
        """Ends the actor's requests as failed, reports that, and ends the actor. An actor that takes longer than
        CLOSE_S seconds is lost."""
        if not self.is_gone:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self.actor.close.remote()
                    await self.drain()  # the last report is on its way
            except TimeoutError:
                self.die(ReplicaLostError(f"replica {self.id} did not close within {CLOSE_S:g} s"))
            except RayError as error:
                self.die(_process_loss(self.id, error))
        self.is_gone = True
        await self._cancel_tasks()
        self._link.close()

    async def _watch(self) -> None:
        """Notices silence, which is counted in turns of this loop, not by a clock: a process that was itself stopped,
        or busy, heard nothing meanwhile, and would take all its replicas for lost."""
        while not self.is_gone:
            await self.clock.sleep_until(self.clock.now() + HEARTBEAT_S, PLAN)
            self.session.send_heartbeat()
            if self.session.silence_s >= MAX_SILENCE_S:
                self.die(ReplicaLostError(f"replica {self.id} has not reported for {MAX_SILENCE_S:g} s"))

    def _apply(self, report: ReplicaReport) -> None:
        if self.is_gone:  # it was lost meanwhile: its requests are elsewhere
            return
        self.remote.apply(report)  # first: the cluster may place a request here again on its hand-off
        for event in report.events:
            self._emit_outside(event)
        if not self.is_busy:
            self._idle.set()
        if report.error is not None:
            self.die(ReplicaLostError(report.error))

    def die(self, error: ReplicaLostError) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._idle.set()
        self._report_loss(self.id, error, self.remote.unfinished_requests(self.clock.now()))
        self._link.close()  # it must not go on with them


def _process_loss(replica: str, error: RayError) -> ReplicaLostError:
    return ReplicaLostError(f"the process of replica {replica} is gone ({type(error).__name__})")


def ray_cluster(
    make: Sequence[Callable[[Clock], EngineParts]], clock: Clock, options: ClusterOptions, *,
    resources: Mapping[str, Any] | None = None, step_timeout: float | None = None,
) -> Cluster:  # fmt: skip
    """Returns a cluster of Ray actors, one for each of `make`; `ray.init` has been called. Raises as
    `build.cluster_of`."""
    host = functools.partial(
        RayHost, clock=clock, choice=options.choice, options=options.replica, step_timeout=step_timeout,
        resources=resources or {},
    )  # fmt: skip
    return cluster_of([functools.partial(host, make=each) for each in make], clock, options)
