"""What the apps of our server and of the gateway share: the front door, `/health`, `/metrics`, `/debug`, errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rubato
from rubato.core.interfaces import View
from rubato.core.server_url import VERSION_HEADER, bare_host
from rubato.fleet.cluster import Cluster
from rubato.frontdoor import history
from rubato.frontdoor.admission import FrontDoor
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.metrics import Metrics
from rubato.frontdoor.paths import canonical_path, written_path
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.serving import logs, openapi
from rubato.serving.asgi_client import HEAD_AT


class AnyService(Protocol):
    """What is served, as `app.Service` and `gateway.GatewayService` say it."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def tenants(self) -> Tenants: ...
    @property
    def fair(self) -> bool: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_choices(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def log_lines_dropped(self) -> Callable[[], int]: ...
    def views(self) -> list[View]: ...
    def counted(self) -> Collection[str]: ...
    @property
    def policy(self) -> str: ...
    def urls(self) -> Mapping[str, str]: ...


class AppState:
    """A service with what the app keeps about it."""

    def __init__(self, service: AnyService) -> None:
        self.service: AnyService = service
        self.tenants = service.tenants
        cluster = service.cluster
        self.metrics = Metrics(
            service.names[0],
            service.views,
            lambda: cluster.in_flight,
            lambda: cluster.listener_errors,
            service.log_lines_dropped,
        )
        self.recorder = history.RequestHistory(logs.finished)
        self.door = FrontDoor(
            service.tenants, cluster.clock, cluster, cluster.retry_after, lambda: service.max_model_len,
            service.max_body_bytes, service.max_choices, count_client_error=self.metrics.client_error,
        )  # fmt: skip
        cluster.listen(self.metrics)
        cluster.listen(self.recorder)

    def enter(self, http: Request) -> Tenant:
        """The tenant of this request, charged before its body is read; from here on also its errors carry what is left
        to that tenant. Raises ApiError 401, 403, or 429 beyond the tenant's rate."""
        http.state.tenant = tenant = self.door.identify(http.headers)
        self.door.enter(tenant)
        self.door.authorize(tenant, http.scope["path"])
        return tenant

    def arrival(self, http: Request) -> float:
        """When the head of this request had come in: it is handled later, by what else the event loop had to do."""
        came: float | None = (http.scope.get("extensions") or {}).get(HEAD_AT)
        return self.service.cluster.clock.now() if came is None else came

    async def read(self, http: Request) -> BodyFields:
        """The fields of its body. Raises ApiError 400 and 413."""
        return self.door.read_fields(await self.door.read_body(http.stream(), http.headers.get("content-length", "")))


def add_operations(app: FastAPI, state: AppState) -> None:
    """Mount what operators ask for. Whoever runs the app tells `app.state.loop_delay` of it."""
    service = state.service
    app.state.loop_delay = state.metrics.loop_delay

    @app.head("/ready", responses=openapi.errors(503))
    @app.get("/ready", responses=openapi.errors(503))
    async def ready() -> Response:
        """200 while requests are taken and there is a replica for them, else 503."""
        if not service.cluster.hosts and not service.cluster.dead.is_set():
            return json_page({"status": "no replica, for now"}, 503)
        return await health()

    @app.head("/health", responses=openapi.errors(503))
    @app.get("/health", responses=openapi.errors(503))
    async def health() -> Response:
        """200 while requests are taken, else 503: of a server that drains, and of one that has lost its last replica
        for good."""
        if service.cluster.dead.is_set():
            return json_page({"status": "dead", "error": str(service.cluster.error)}, 503)
        return json_page({"status": "draining"}, 503) if app.state.draining else json_page({"status": "ok"})

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def prometheus() -> Response:
        """Prometheus' text format."""
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/debug/requests/{id}", responses=openapi.errors(400, 401, 404))
    async def request(http: Request, id: str) -> Response:
        """Deadlines, events and waits of a request in flight or lately ended: for its tenant, or an admin's key."""
        tenant = state.door.identify(http.headers)
        records = state.recorder.find(id)
        if not records or not (tenant.admin or records[0].request.tenant == tenant.name):
            raise ApiError(404, f"There is no request {id[:80]!r}, or no longer.", param="id", code="request_not_found")
        now = service.cluster.clock.now()
        views, counted = service.views(), service.counted()
        names = {replica: bare_host(url) for replica, url in service.urls().items()} if tenant.admin else {}
        page = history.shown(id, records, views, now, fair=service.fair, counted=counted, names=names)
        return json_page(page)


class AtTheDoor:
    """ASGI middleware: paths are read alike in every spelling, and responses that are the client's own fault count."""

    def __init__(self, app: ASGIApp, door: FrontDoor) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        send = self._door.counting(scope, send)
        try:
            path = canonical_path(scope["path"])
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self._app({**scope, "path": path, "raw_path": written_path(path).encode()}, receive, send)
        return None


class WithHeaders(Response):
    """An answer with more headers, those that hold when it begins."""

    def __init__(self, reply: Response, more: Callable[[], list[tuple[bytes, bytes]]]) -> None:
        self._reply = reply
        self._more = more
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._more()]}
            await send(message)

        await self._reply(scope, receive, marked)


def json_page(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def models_page(content: Mapping[str, Any]) -> Response:
    """A page of models, which says whose server it is: models keep the `owned_by` of the server that has them."""
    page = json_page(content)
    page.headers[VERSION_HEADER] = rubato.__version__
    return page


def add_door(app: FastAPI, door: FrontDoor) -> None:
    """Have every request come through the door, and every error leave in OpenAI's shape."""
    app.add_middleware(AtTheDoor, door=door)

    async def answer(http: Request, error: Exception) -> Response:
        reply = _as_api_error(http, error).response()
        return WithHeaders(reply, lambda: door.limit_headers(getattr(http.state, "tenant", None)))

    for kind in (ApiError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def _as_api_error(http: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # no such path, or no such method of it
        message = f"{http.method} {http.scope['path'][:80]}: {error.detail}."
        return ApiError(error.status_code, message, headers=tuple((error.headers or {}).items()))
    if isinstance(error, ClientDisconnect):
        return ApiError(400, "The client went away before its body was read.")
    return ApiError(500, f"Internal error: {type(error).__name__}.", kind="server_error")
