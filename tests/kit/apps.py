"""The HTTP edge over a simulated replica, in one process on the virtual clock: no socket, no waiting, exact times."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx2
from fastapi import FastAPI

from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.events import Event
from rubato.core.interfaces import LengthPredictor
from rubato.core.plan import Batch, Limits, StepResult
from rubato.core.replica_options import ReplicaOptions
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.frontdoor.slo_fields import Tiers
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.latency.affine import Model
from rubato.policy_kit.fair_share import FairShare
from rubato.serving.app import Service, create_app
from tests.kit.asgi import client_of

STEP = 0.1  # seconds, whatever the batch


@dataclass
class Edge:
    """A running server, as its client and its operator see it."""

    http: httpx2.AsyncClient
    app: FastAPI
    cluster: Cluster
    clock: VirtualClock
    events: list[Event]

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        message = {"role": "user", "content": "hi"}
        defaults = {"model": "simulated", "messages": [message], "max_tokens": 3}
        return await self.http.post("/v1/chat/completions", json={**defaults, **body}, headers=headers)

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> httpx2.Response:
        defaults = {"model": "simulated", "prompt": "abc", "max_tokens": 3}
        return await self.http.post("/v1/completions", json={**defaults, **body}, headers=headers)


class Failing(Engine):
    """Fails at these steps, counted from 1."""

    at: ClassVar[Container[int]] = {3}
    steps = 0

    async def execute(self, batch: Batch) -> StepResult:
        self.steps += 1
        if self.steps in self.at:
            raise RuntimeError("cosmic ray")
        return await super().execute(batch)


Scenario = Callable[[Edge], Awaitable[None]]


def edge(
    scenario: Scenario,
    *,
    policy: str = "edf",
    max_in_flight: int | None = None,
    engine: type[Engine] = Engine,
    limits: Limits | None = None,
    tenants: Sequence[Tenant] = (),
    fair: FairShare | None = None,
    prefix_cache: bool = False,
    lengths: LengthPredictor | None = None,
    tiers: Tiers | None = None,
    **service: Any,
) -> None:
    """Run a scenario against a fresh server."""

    async def main() -> None:
        clock = VirtualClock()
        limits_ = limits or Limits(
            max_num_seqs=8, max_num_batched_tokens=512, max_model_len=256, kv_blocks=64, block_size=16
        )
        model = Model(k=(0.0, 0.0), b=(STEP, 0.0))
        engine_ = engine(model, limits_, clock)
        options = ClusterOptions(
            PolicyChoice(policy), ReplicaOptions(lengths, prefix_cache=prefix_cache), max_in_flight, fair
        )
        cluster = local_cluster([engine_], [model], clock, options)
        events: list[Event] = []
        await cluster.start()
        settings = {
            "model": "simulated",
            "max_model_len": limits_.max_model_len,
            "has_fair_share": fair is not None,
            **service,
        }
        known = Tenants(tenants, tiers or Tiers())
        app = create_app(Service(cluster, text=engine_.text, tenants=known, **settings))
        cluster.listen(events.append)
        try:
            async with client_of(app) as http:
                await scenario(Edge(http, app, cluster, clock, events))
        finally:
            await cluster.close()

    run_virtual(main())
