"""The four doors, each before servers that answer alike: our own server, the gateway, the middleware in vLLM's API
server, and the endpoint picker. In one process, on the virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingRequest, ProcessingResponse
from prometheus_client import CollectorRegistry

from rubato.config.build import fair_share_of, in_flight_bound
from rubato.config.schema import load
from rubato.core.clock import VirtualClock, run_virtual
from rubato.core.plan import Limits
from rubato.core.replica_options import ReplicaOptions
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.frontdoor.metrics import SLOMetrics
from rubato.frontdoor.tenants import Tenants, tenants_of, tiers_of
from rubato.latency.affine import Model
from rubato.serving.app import Service, create_app
from rubato.serving.epp import picker_of
from rubato.serving.vllm_middleware import FrontEnd, Middleware
from rubato.serving.vllm_reports import EngineReports, PluginMetrics
from tests.kit.asgi import Answer, call_asgi
from tests.kit.gateways import gateway_app
from tests.kit.servers import served, stub_servers
from tests.serving.test_epp import head, part, request_head, wire
from tests.stubs.vllm_app import VLLM, Link
from tests.stubs.vllm_server import StubServer

LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024, kv_blocks=2048, block_size=16)
STEP = Model(k=(0.0, 0.0), b=(0.1, 0.0))  # seconds, whatever the batch
CHOSEN = ClusterOptions(PolicyChoice("edf", {}, "least_loaded"), ReplicaOptions(causes=False))
CONFIG: dict[str, Any] = {
    "tiers": {"chat": {"ttft_ms": 1000, "tpot_ms": 200}, "batch": {"e2e_ms": 60_000}},
    "max_body_bytes": 100_000,
}
TENANTS: dict[str, Any] = {
    "acme": {"keys": ["acme-key"], "tiers": ["chat", "flex"]},
    "bulk": {"keys": ["bulk-key"], "requests_per_minute": 20, "max_in_flight": 8},
    "ops": {"keys": ["ops-key"], "admin": True},
}


@dataclass
class Seen:
    """What a server behind a door has got."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Door:
    """One door. model: that is served; in_flight: at the cluster; places: choices that the front door has under way;
    seen: by servers, None where there is none behind it."""

    name: ClassVar[str]
    model: ClassVar[str] = "stub"
    checks_keys: ClassVar[bool] = True
    metrics: Callable[[], Any] = lambda: None
    in_flight: Callable[[], int] = lambda: 0
    places: Callable[[], int] = lambda: 0
    seen: list[Seen] | None = None
    clock: Any = None
    open: Callable[..., Awaitable[Answer]] = field(default=lambda: None)  # type: ignore[assignment, return-value]

    async def ask(
        self,
        path: str = "/v1/chat/completions",
        body: Mapping[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        leaves: bool = False,
    ) -> Answer:
        """A chat, with these fields in its body, or another body. leaves: the client, before an answer."""
        if not isinstance(body, bytes):
            defaults = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            if "chat" not in path:
                defaults = {"model": self.model, "prompt": "hi", "max_tokens": 4}
            body = json.dumps({**defaults, **(body or {})}).encode()
        given = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        return await self.open(method, path, given, body, leaves)

    def count(self, name: str, **labels: str) -> float:
        """The sum over a metric's series with these labels."""
        return sum(
            sample.value
            for family in self.metrics().collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


# --------------------------------------------------------------------------- the doors


class OwnServer(Door):
    name, model = "server", "simulated"

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: dict[str, Any]) -> AsyncIterator[Door]:
        clock, config = VirtualClock(), load({**CONFIG, **settings}, [])
        engine = Engine(STEP, LIMITS, clock)
        options = ClusterOptions(
            PolicyChoice("edf"), ReplicaOptions(), in_flight_bound(config, LIMITS.max_num_seqs), fair_share_of(config)
        )
        cluster = local_cluster([engine], [STEP], clock, options)
        await cluster.start()
        tenants = Tenants(tenants_of(config), tiers_of(config))
        app = create_app(
            Service(
                cluster, "simulated", LIMITS.max_model_len, engine.text, tenants=tenants,
                has_fair_share=bool(config.tenants), max_body_bytes=config.max_body_bytes,
                max_choices=config.max_choices,
            )
        )  # fmt: skip
        try:
            yield _asgi(cls(), app, cluster)
        finally:
            await cluster.close()


class Gateway(Door):
    name, linked = "gateway", False

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: dict[str, Any]) -> AsyncIterator[Door]:
        config = load({**CONFIG, **settings}, [])
        clock = VirtualClock()
        async with _servers(clock) as there:
            bound = in_flight_bound(config, LIMITS.max_num_seqs)
            options = replace(CHOSEN, max_in_flight=bound, fair=fair_share_of(config))
            async with served(there, clock, options, link=None) as fleet:
                app = gateway_app(
                    fleet, tiers_of(config), tenants_of(config), has_fair_share=bool(config.tenants),
                    max_body_bytes=config.max_body_bytes, max_choices=config.max_choices,
                )  # fmt: skip
                door = _asgi(cls(), app, fleet.cluster)
                door.seen = _Recorded(there)
                yield door


class InVLLM(Door):
    name = "middleware"

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: dict[str, Any]) -> AsyncIterator[Door]:
        config = load({**CONFIG, **settings}, [])
        link = Link()
        reports = EngineReports(link, PluginMetrics(CollectorRegistry(), counts=True))  # type: ignore[arg-type]
        reports.clock = VirtualClock()  # type: ignore[assignment]
        vllm = VLLM(link)
        app = Middleware(vllm)
        app._front = FrontEnd(config, LIMITS.max_num_seqs, LIMITS.max_model_len, reports)
        door = cls()
        door.clock = reports.clock
        door.metrics = lambda: reports.metrics.registry
        door.in_flight = door.places = lambda: app._front.door.in_flight.total()  # type: ignore[union-attr]
        door.open = _opener(app)
        door.seen = _SeenByVLLM(vllm)
        yield door


class Picker(Door):
    """Envoy is played here: it sends on what the picker says, changed as it says."""

    name, checks_keys = "picker", False

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: dict[str, Any]) -> AsyncIterator[Door]:
        clock = VirtualClock()
        async with _servers(clock) as there:
            config = load({**CONFIG, **settings, "servers": list(there), "router": "least_loaded"}, [])
            picker = await picker_of(config, clock, transport=there.__getitem__)
            await picker.cluster.start()
            metrics = SLOMetrics(CollectorRegistry())
            picker.door.count_client_error = metrics.client_error
            picker.cluster.listen(metrics)
            door = cls()
            door.metrics = lambda: metrics.registry
            door.in_flight = lambda: picker.cluster.in_flight
            door.places = lambda: picker.door.in_flight.total()
            door.open = _Envoy(picker, there).request  # type: ignore[assignment]
            door.seen = _Recorded(there)
            try:
                yield door
            finally:
                await picker.cluster.close()


class _Envoy:
    def __init__(self, picker: Any, there: Mapping[str, StubServer]) -> None:
        self._picker, self._there, self._numbers = picker, there, count()

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes, leaves: bool) -> Answer:
        said: asyncio.Queue[bytes | None] = asyncio.Queue()
        answers: asyncio.Queue[ProcessingResponse] = asyncio.Queue()

        async def come() -> AsyncIterator[ProcessingRequest]:
            while (raw := await said.get()) is not None:
                yield ProcessingRequest.parse(raw)

        task = asyncio.ensure_future(self._picker.process(come(), answers.put))
        named = {name.replace("-", "_"): value for name, value in headers.items()}
        said.put_nowait(request_head(path, method, **named))
        said.put_nowait(wire(4, part(body, last=True)))
        first = await answers.get()
        try:
            if (refused := first.immediate_response) is not None:
                assert refused.headers is not None
                assert refused.status is not None
                return Answer(int(refused.status.code), _set(refused.headers), bytes(refused.body))
            assert first.request_headers is not None
            assert first.request_headers.response is not None
            mutation = first.request_headers.response.header_mutation
            assert mutation is not None
            sent = {**headers, ":path": path, **_set(mutation)}
            sent = {name: value for name, value in sent.items() if name not in mutation.remove_headers}
            passed = b"".join([_piece(await answers.get()) for _ in range(-(-len(body) // 62_000))])
            assert int(sent["content-length"]) == len(passed)
            server = self._there["http://" + sent["x-gateway-destination-endpoint"]]
            pairs = [*sent.items(), ("x-request-id", f"r{next(self._numbers)}")]  # as Envoy names it
            reply = await server.open(method, sent[":path"], pairs, passed)
            if leaves:
                return Answer(0, {}, b"")
            said.put_nowait(wire(3, head({":status": str(reply.status), **dict(reply.headers)})))
            whole = b""
            while data := await reply.part():
                whole += data
                said.put_nowait(wire(5, part(data)))
            said.put_nowait(wire(5, part(b"", last=True)))
            await asyncio.sleep(0.01)
            return Answer(reply.status, dict(reply.headers), whole)
        finally:
            said.put_nowait(None)
            await task
            assert first.immediate_response is None or answers.empty()


def _set(mutation: Any) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}


def _piece(message: ProcessingResponse) -> bytes:
    found: Any = message
    return bytes(found.request_body.response.body_mutation.streamed_response.body)


class _Recorded(list[Seen]):
    """Completions that came to stub servers."""

    def __init__(self, there: Mapping[str, StubServer]) -> None:
        self.servers = there.values()

    def __iter__(self) -> Any:
        for server in self.servers:
            for body, headers in zip(server.bodies, server.heads, strict=True):
                yield Seen(headers.get(":path", ""), headers, body)


class _SeenByVLLM(list[Seen]):
    def __init__(self, vllm: VLLM) -> None:
        self.servers = [vllm]

    def __iter__(self) -> Any:
        for body, scope in zip(self.servers[0].went_in, self.servers[0].scopes, strict=True):
            yield Seen(scope["path"], {n.decode(): v.decode("latin-1") for n, v in scope["headers"]}, body)


def _servers(clock: VirtualClock) -> AbstractAsyncContextManager[dict[str, StubServer]]:
    return stub_servers(clock, [f"http://10.0.0.{i}:8000" for i in (1, 2)], STEP, LIMITS, CHOSEN)


def _opener(app: Any) -> Callable[..., Awaitable[Answer]]:
    def open(method: str, path: str, headers: Mapping[str, str], body: bytes, leaves: bool) -> Awaitable[Answer]:
        leave = (lambda answer: asyncio.sleep(0.25)) if leaves else None
        return call_asgi(app, path, body, headers, method=method, leaves=leave)

    return open


def _asgi(door: Door, app: Any, cluster: Any) -> Door:
    """With the state behind an app's /metrics."""
    (route,) = [route for route in app.routes if getattr(route, "path", "") == "/metrics"]
    closure = dict(zip(route.endpoint.__code__.co_freevars, route.endpoint.__closure__, strict=True))
    state = closure["state"].cell_contents
    door.metrics = lambda: state.metrics.registry
    door.clock = cluster.clock
    door.in_flight = lambda: cluster.in_flight
    door.places = lambda: state.door.in_flight.total()
    door.open = _opener(app)
    return door


DOORS: tuple[Any, ...] = (OwnServer, Gateway, InVLLM, Picker)


def asked_of_doors(cases: Sequence[Any]) -> pytest.MarkDecorator:
    """A test of each of these cases, which have an `id`, at each door that is among its `doors`."""
    asked = [(door, case) for case in cases for door in DOORS if door.name in case.doors]
    params = [pytest.param(door, case, id=f"{case.id}-{door.name}") for door, case in asked]
    return pytest.mark.parametrize(("door", "case"), params)


def at(scenario: Callable[[Door], Awaitable[None]], *, door: Any, **settings: Any) -> None:
    """Run a scenario at one door, of a fresh server, whatever its clock."""

    async def main() -> None:
        async with door.opened(settings) as opened:
            await asyncio.wait_for(scenario(opened), 600.0)

    run_virtual(main())
