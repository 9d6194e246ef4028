"""The gateway over stub servers, in one process on the virtual clock: HTTP in and out, and the link, by memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.events import Finished, Offered
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.core.request import SLO
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.server_replica import ServerReplica
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.latency.affine import Model
from rubato.policy_kit.fair_share import FairShare
from rubato.serving.gateway import GatewayService, create_gateway
from tests.kit.asgi import client_of
from tests.kit.servers import Served, served, stub_servers
from tests.stubs.vllm_server import StubServer

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024, kv_blocks=256, block_size=16)
STEP = Model(k=(0.0, 0.0), b=(0.1, 0.0))  # seconds, whatever the batch
TIERS = Tiers([Tier("chat", SLO(1.0, 0.2)), Tier("strict", SLO(0.05), "refuse")])


@dataclass(kw_only=True)
class Fleet(Served):
    """A gateway and its servers, as clients and operators see them."""

    http: httpx2.AsyncClient
    app: Any

    async def complete(self, headers: Mapping[str, str] | None = None, **body: Any) -> httpx2.Response:
        defaults = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 4}
        return await self.http.post("/v1/completions", json={**defaults, **body}, headers=headers)

    async def chat(self, headers: Mapping[str, str] | None = None, **body: Any) -> httpx2.Response:
        message = {"role": "user", "content": "hi"}
        defaults = {"model": "stub", "messages": [message], "max_tokens": 4}
        return await self.http.post("/v1/chat/completions", json={**defaults, **body}, headers=headers)

    async def metric(self, name: str) -> float:
        """The sum over its series."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    async def row(self) -> dict[str, Any]:
        """The one request in flight, as the board has it."""
        board = (await self.http.get("/board.json")).json()
        (row,) = board["requests"]
        return dict(zip(board["request_columns"], row, strict=True))


def gateway_app(fleet: Served, tiers: Tiers, tenants: Sequence[Tenant] = (), **service: Any) -> Any:
    """The gateway of a cluster. service: other arguments of `GatewayService`."""
    said = {"models": fleet.fleet.homogeneity.models, "is_vllm": lambda: True, **service}
    known = Tenants(tenants, tiers)
    return create_gateway(GatewayService(fleet.cluster, "stub", 1024, fleet.trips, tenants=known, **said))


def gateway(
    scenario: Callable[[Fleet], Awaitable[None]], *, servers: int = 2, linked: bool = True, counted: int = 0,
    policy: str = "edf", router: str = "least_loaded", tenants: Sequence[Tenant] = (),
    max_in_flight: int | None = None, fair: FairShare | None = None, profile: Callable[[], Any] = lambda: None,
    change: Callable[[list[StubServer]], None] = lambda servers: None, host: str = "s", **service: Any,
) -> None:  # fmt: skip
    """Run a scenario against a fresh gateway and servers, and see that no request of it is left.

    Args:
        counted: so many of the servers have no link all the same.
        change: something about the servers before the gateway starts.
        host: what the names of the servers begin with.
        service: other arguments of `GatewayService`.
    """

    async def main() -> None:
        clock = VirtualClock()
        options = ClusterOptions(PolicyChoice(policy, {}, router), ReplicaOptions(causes=False), max_in_flight, fair)
        urls = [f"http://{host}{i}" for i in range(servers)]
        links = urls[counted:] if linked else []
        async with stub_servers(clock, urls, STEP, LIMITS, options) as there:
            change(list(there.values()))
            async with served(there, clock, options, linked=links, profile=profile) as one:
                app = gateway_app(one, TIERS, tenants, **service)
                async with client_of(app) as http:
                    fleet = Fleet(**vars(one), http=http, app=app)
                    await scenario(fleet)
                assert not fleet.trips
                hosts = [host for host in fleet.cluster.hosts.values() if isinstance(host, ServerReplica)]
                assert not any(host.requests.prompt_tokens for host in hosts)
                ends = sorted(event.id for event in fleet.of(Finished))
                assert ends == sorted(event.id for event in fleet.of(Offered))

    run_virtual(main())
