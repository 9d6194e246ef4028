"""The parts that our server's app and the gateway's share: front door, `/health`, `/metrics`, `/debug`, errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import rubato
from rubato.core.interfaces import View
from rubato.core.server_url import VERSION_HEADER, bare_host
from rubato.fleet.cluster import Cluster
from rubato.frontdoor import history
from rubato.frontdoor.admission import FrontDoor
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.paths import MODELS, canonical_path, written_path
from rubato.frontdoor.slo_fields import Tiers
from rubato.frontdoor.tenants import Tenant, Tenants
from rubato.serving import logs, openapi
from rubato.serving.asgi_client import HEAD_TIME_KEY
from rubato.serving.server_metrics import Metrics


@dataclass(frozen=True, slots=True)
class AppService:
    """Holds the settings and objects that our server's app and the gateway's share.

    Args:
        cluster: runs the requests; the caller starts and closes it.
        model: its name for clients.
        max_model_len: tokens of prompt and output that a request may have.
        tenants: by default no key is needed.
        has_fair_share: whether the cluster has a fair share between tenants.
        max_body_bytes: of a request.
        max_choices: prompts times `n` of one answer.
        created_offset: Unix time - clock time, in seconds.
        log_lines_dropped: counts them so far.
        policy: name of the scheduler.
    """

    cluster: Cluster
    model: str
    max_model_len: int
    _: KW_ONLY
    tenants: Tenants = field(default_factory=lambda: Tenants((), Tiers()))
    has_fair_share: bool = False
    max_body_bytes: int = 4 << 20
    max_choices: int = 16
    created_offset: float = 0.0
    log_lines_dropped: Callable[[], int] = int
    policy: str = ""

    def views(self) -> list[View]:
        return [host.view() for host in self.cluster.hosts.values()]

    def counted_replicas(self) -> Collection[str]:
        """Returns the ids of replicas that do not report their state: it is counted from the requests sent there."""
        return ()

    def urls(self) -> Mapping[str, str]:
        """Returns the URL of each replica that is a server, by its id."""
        return {}


class AppState:
    """Holds a service with the app's metrics, records of requests and front door."""

    def __init__(self, service: AppService) -> None:
        self.service: AppService = service
        self.tenants = service.tenants
        cluster = service.cluster
        self.requests = history.RequestHistory(logs.log_finished)
        self.metrics = Metrics(
            service.model,
            service.views,
            lambda: cluster.in_flight,
            lambda: cluster.listener_errors,
            service.log_lines_dropped,
            self.requests,
        )
        self.door = FrontDoor(
            service.tenants, cluster.clock, cluster, cluster.retry_after, lambda: service.max_model_len,
            service.max_body_bytes, service.max_choices, count_client_error=self.metrics.client_error,
        )  # fmt: skip
        cluster.listen(self.metrics)

    def enter(self, http: Request) -> Tenant:
        """Identifies the tenant and charges the request, before its body is read. Errors after this carry the tenant's
        rate-limit headers. Raises ApiError 401, 403, or 429 beyond the tenant's rate."""
        http.state.tenant = tenant = self.door.identify(http.headers)
        self.door.enter(tenant)
        self.door.authorize(tenant, http.scope["path"])
        return tenant

    def arrival(self, http: Request) -> float:
        """Returns when the request's head was received (s); a busy event loop handles the request later."""
        came: float | None = (http.scope.get("extensions") or {}).get(HEAD_TIME_KEY)
        return self.service.cluster.clock.now() if came is None else came

    async def read(self, http: Request) -> BodyFields:
        """Reads the fields of the body. Raises ApiError 400 and 413."""
        return self.door.read_fields(await self.door.read_body(http))


def add_operations(app: FastAPI, state: AppState) -> None:
    """Mounts the pages for operators. The caller reports event loop delays to `app.state.loop_delay`."""
    service = state.service
    app.state.loop_delay = state.metrics.loop_delay

    @app.head("/ready", responses=openapi.errors(503))
    @app.get("/ready", responses=openapi.errors(503))
    async def ready() -> Response:
        """200 while requests are accepted and there is a replica for them, else 503."""
        if not service.cluster.hosts and not service.cluster.dead.is_set():
            return json_response({"status": "no replica, for now"}, 503)
        return await health()

    @app.head("/health", responses=openapi.errors(503))
    @app.get("/health", responses=openapi.errors(503))
    async def health() -> Response:
        """200 while requests are accepted; 503 while the server drains, or once it has lost its last replica."""
        if service.cluster.dead.is_set():
            return json_response({"status": "dead", "error": str(service.cluster.error)}, 503)
        return json_response({"status": "draining"}, 503) if app.state.is_draining else json_response({"status": "ok"})

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def prometheus() -> Response:
        """Prometheus' text format."""
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/debug/requests/{id}", responses=openapi.errors(400, 401, 404))
    async def request(http: Request, id: str) -> Response:
        """Deadlines, events and waits of a recent request, for its tenant's key or an admin's."""
        tenant = state.door.identify(http.headers)
        records = state.requests.find_for(tenant, id)
        now = service.cluster.clock.now()
        views = service.views()
        names = {replica: bare_host(url) for replica, url in service.urls().items()} if tenant.admin else {}
        page = history.page(
            id, records, views, now, has_fair_share=service.has_fair_share,
            counted_replicas=service.counted_replicas(), names=names,
        )  # fmt: skip
        return json_response(page)


class DoorMiddleware:
    """Makes paths canonical and counts client errors, as ASGI middleware."""

    def __init__(self, app: ASGIApp, door: FrontDoor) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        send = self._door.count_responses(scope, send)
        try:
            path = canonical_path(scope["path"])
        except ApiError as error:
            return await error.response()(scope, receive, send)
        scope = {**scope, "path": path, "raw_path": written_path(path).encode()}
        await self._app(scope, receive, with_version(path, send))
        return None


def with_version(path: str, send: Send) -> Send:
    """Returns an ASGI `send` that adds Rubato's version to lists of models, so that clients know that this server takes
    SLOs: `owned_by` stays the upstream server's. The path must be canonical."""
    if path != MODELS and not path.startswith(f"{MODELS}/"):
        return send

    async def send_version(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            version = (VERSION_HEADER.encode(), rubato.__version__.encode())
            message = {**message, "headers": [*message["headers"], version]}
        await send(message)

    return send_version


def json_response(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def add_door(app: FastAPI, door: FrontDoor) -> None:
    """Routes every request through the door, and sends every error in OpenAI's shape."""
    app.add_middleware(DoorMiddleware, door=door)

    async def answer(http: Request, error: Exception) -> Response:
        return _as_api_error(http, error).response(door.limit_headers(getattr(http.state, "tenant", None)))

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _as_api_error(http: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # no such path, or no such method of it
        message = f"{http.method} {http.scope['path'][:80]}: {error.detail}."
        return ApiError(error.status_code, message, headers=tuple((error.headers or {}).items()))
    return ApiError(500, f"Internal error: {type(error).__name__}.", kind="server_error")
