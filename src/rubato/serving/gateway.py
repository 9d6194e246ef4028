"""The gateway's app: OpenAI's endpoints of a fleet of servers, each request routed by what it was promised.

What a client states (headers, `slo` in the body, `service_tier`) is granted by its tenant's tiers, as in our own
server; the request is then held, placed and judged by the cluster, and its body goes to a server as it came. All other
paths go to some server of the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from rubato.core.interfaces import View
from rubato.core.request import Request
from rubato.fleet.call import Calls
from rubato.fleet.cluster import Cluster
from rubato.fleet.server_host import ServerHost
from rubato.fleet.upstream import UpstreamError
from rubato.frontdoor import body_fields
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.prompt_length import PromptSize
from rubato.frontdoor.rate_limits import TenantGate
from rubato.frontdoor.slo_fields import Tiers
from rubato.frontdoor.tenants import Tenants
from rubato.serving.app_state import AppState, add_error_shapes, add_operations, read_body
from rubato.serving.board import add_board
from rubato.serving.gateway_intake import GENERATE, RESPONSES, From, answer_of, asked, new_id
from rubato.serving.gateway_metrics import GatewayMetrics
from rubato.serving.relayed_call import CHAT, TEXT, RelayedCall, passed_on

HARMLESS = ("/v1/models", "/tokenize", "/detokenize", "/v1/embeddings", "/version", "/score", "/rerank")

Message = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class GatewayService:
    """What is served. calls: where the hosts find each request's body. key: for the servers' API, "" to pass on the
    client's. The rest as `app.Service`."""

    cluster: Cluster
    calls: Calls
    model: str
    longest: int
    key: str = ""
    tenants: Tenants = field(default_factory=lambda: Tenants((), Tiers()))
    fair: bool = False
    max_body_bytes: int = 16 << 20
    created_offset: float = 0.0
    log_lines_dropped: Callable[[], int] = int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model,)

    def views(self) -> list[View]:
        return [host.view() for host in self.cluster.hosts.values()]

    def servers(self) -> list[ServerHost]:
        """Those that are not lost."""
        return [host for host in self.cluster.hosts.values() if isinstance(host, ServerHost)]


def create_gateway(service: GatewayService) -> FastAPI:
    """The app. The cluster is started and ended by the caller."""
    app = FastAPI(title="Rubato gateway", summary="A fleet of LLM servers behind one address", redoc_url=None)
    state = AppState(service)
    app.state.draining = False
    gateway = Gateway(service, state)
    add_error_shapes(app, service.cluster.clock)
    add_operations(app, state)
    add_board(app, state)
    service.cluster.listen(GatewayMetrics(state.metrics, service.calls, service.servers))
    for path in GENERATE:
        app.add_api_route(path, gateway.generate, methods=["POST"], response_model=None)
    app.add_api_route(
        "/{path:path}", gateway.other, methods=["GET", "POST", "PUT", "DELETE", "HEAD"], include_in_schema=False
    )
    return app


class Gateway:
    """The endpoints."""

    def __init__(self, service: GatewayService, state: AppState) -> None:
        self._service, self._state = service, state
        self._cluster = service.cluster
        self._size = PromptSize()
        self._turn = 0

    async def generate(self, http: HttpRequest) -> Response:
        """A completion of any form: chat, text, responses, messages."""
        path = http.url.path
        arrival = self._cluster.clock.now()
        tenant = self._state.enter(http, arrival, "chat" if path == CHAT else "text")
        usage = self._state.usage.get(tenant.name)
        raw = await read_body(http, self._service.max_body_bytes)
        found = asked(
            From(path, http.headers, arrival), raw,
            new_id(path, http.headers.get("x-request-id", ""), self._service.calls),
            tiers=self._state.tenants.tiers(tenant), tenant=tenant.name, longest=self._service.longest,
            sizes=self._size, by_link=self._by_link(),
        )  # fmt: skip
        requests, fields, raw = found.requests, found.fields, found.raw
        if path == RESPONSES and "request_id" not in fields:  # where vLLM takes no id from a header
            fields = {**fields, "request_id": answer_of(requests)}
            raw = body_fields.written(fields)
        gate = self._cluster if usage is None else TenantGate(self._cluster, usage, requests)
        clamped = [(b"x-rubato-clamped", ", ".join(found.clamped).encode())] if found.clamped else []

        def more() -> list[tuple[bytes, bytes]]:
            return clamped + (usage.headers(self._cluster.clock.now()) if usage is not None else [])

        return _Relay(
            self, gate, requests, found.n, self._headers(http), fields, raw, http.url.query, found.size, more
        )  # fmt: skip

    def relayed(self, relay: _Relay, path: str, send: Send) -> RelayedCall:
        """The call of a response that is about to be sent, registered for the hosts."""

        def counted(tokens: int) -> None:
            self._size.learn(relay.size, tokens)

        call = RelayedCall(
            path, relay.query, answer_of(relay.requests), relay.requests, relay.n,
            relay.for_server, relay.fields, relay.raw, send, relay.more, counted,
        )  # fmt: skip
        for id in call.ids:
            self._service.calls[id] = call
        return call

    def forget(self, call: RelayedCall) -> None:
        for id in call.ids:
            self._service.calls.pop(id, None)

    async def other(self, http: HttpRequest) -> Response:
        """Whatever else servers have: it goes to one of them, in turn."""
        tenant = self._state.enter(http, self._cluster.clock.now(), "text")
        path = http.url.path
        plain = _plain(path)
        if plain.startswith("/rubato") or (
            self._state.tenants.configured and not tenant.admin and not _harmless(plain)
        ):
            raise ApiError(403, f"Only an admin's key may use {path[:80]} here.", code="admin_only")
        raw = await read_body(http, self._service.max_body_bytes)
        hosts = self._service.servers()
        for _ in range(len(hosts)):
            self._turn += 1
            host = hosts[self._turn % len(hosts)]
            query = f"?{http.url.query}" if http.url.query else ""
            try:
                reply = await host.upstream.open(http.method, path + query, self._headers(http), raw)
            except UpstreamError:
                continue  # the next one; this one's own probes tell that it is gone
            return _Passed(reply)
        raise ApiError(503, "No server of the fleet can be reached.", code="no_server", kind="server_error")

    def _by_link(self) -> bool:
        """Whether servers are told what is promised by their links: they may not know the tiers of this gateway."""
        return any(host.has_link for host in self._cluster.hosts.values() if isinstance(host, ServerHost))

    def _headers(self, http: HttpRequest) -> list[tuple[str, str]]:
        """Of a request, those for a server."""
        ours = self._state.tenants.configured or self._service.key
        kept = [
            (name, value)
            for name, value in passed_on(http.headers.items())
            if not (ours and name in ("authorization", "x-api-key")) and not name.startswith(("x-slo-", "x-llm-d-slo-"))
        ]
        return [*kept, ("authorization", f"Bearer {self._service.key}")] if self._service.key else kept


class _Relay(Response):
    """Offers the requests of an API request when sent, and passes on what a server makes of them."""

    def __init__(
        self, gateway: Gateway, gate: Any, requests: tuple[Request, ...], n: int, headers: list[tuple[str, str]],
        fields: dict[str, Any], raw: bytes, query: str, size: int, more: Callable[[], list[tuple[bytes, bytes]]],
    ) -> None:  # fmt: skip
        self.requests, self.n, self.for_server, self.fields, self.raw = requests, n, headers, fields, raw
        self.query, self.size, self.more = query, size, more
        self._gateway, self._gate = gateway, gate
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lock = asyncio.Lock()

        async def one_at_a_time(message: Message) -> None:
            async with lock:
                await send(message)

        call = self._gateway.relayed(self, scope["path"], one_at_a_time)
        gone = asyncio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            call.breaks("the client left")

        watcher = asyncio.create_task(watch())
        try:
            for request in self.requests:
                self._gate.offer(request, call.hear)
            await call.done.wait()
            if not call.over and not gone.is_set():
                self._cancel(call)
                await self._error(call, scope, receive, one_at_a_time)
        finally:
            watcher.cancel()
            self._cancel(call)
            self._gateway.forget(call)

    def _cancel(self, call: RelayedCall) -> None:
        for id in call.ids:
            self._gate.cancel(id)

    async def _error(self, call: RelayedCall, scope: Scope, receive: Receive, send: Send) -> None:
        """The response is no answer: a status of its own, or the end of a stream that has begun."""
        end = call.failed
        if end is not None:
            error = from_finished(end, self._gate.retry_after())
        else:
            error = ApiError(502, f"The response broke off: {call.broken}", code="server_failed", kind="server_error")
        call.over = True
        if call.begun:  # no [DONE]: what came is not an answer
            piece = b"data: " + error.body() + b"\n\n"
            if call.path not in (CHAT, TEXT):  # a stream of named events
                about = {"type": "error", "code": error.code, "message": error.message, "param": None}
                piece = b"event: error\ndata: " + orjson.dumps({**about, **orjson.loads(error.body())}) + b"\n\n"
            await send({"type": "http.response.body", "body": piece, "more_body": False})
            return
        reply = error.response()
        for name, value in self.more():
            reply.headers[name.decode()] = value.decode()
        await reply(scope, receive, send)


class _Passed(Response):
    """A server's response, as it comes."""

    def __init__(self, reply: Any) -> None:
        self._reply = reply
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in passed_on(self._reply.headers)]
        await send({"type": "http.response.start", "status": self._reply.status, "headers": head})
        try:
            while part := await self._reply.part():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        finally:
            self._reply.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _plain(path: str) -> str:
    """A path as a server may read it. Raises ApiError 400 for one that goes up: a server, or what is in between, would
    make another path of it than the one that is judged here."""
    while (once := unquote(path)) != path:
        path = once
    parts = [part for part in path.replace("\\", "/").split("/") if part]
    if "." in parts or ".." in parts:
        raise ApiError(400, "The path has a part . or .. in it: write it without.", code="invalid_path")
    return "/" + "/".join(parts)


def _harmless(path: str) -> bool:
    """Whether any tenant may use a path that generates nothing."""
    return path.startswith(HARMLESS)
