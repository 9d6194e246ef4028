"""The gateway's app: OpenAI's endpoints over a fleet of servers, each request routed by its SLO.

The tenant's tiers grant the SLO that a client states (headers, `slo` in the body, `service_tier`), as in our own
server. The cluster then holds, places and judges the request, and its body goes to a server unchanged. All other paths
go to some server of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from rubato.core.interfaces import View
from rubato.fleet.relay import Ask, RelayTrip, Trips
from rubato.fleet.served_models import ServedModels
from rubato.fleet.server_replica import ServerReplica
from rubato.fleet.server_try import why_not_passed_on
from rubato.fleet.upstream import Headers, Reply, UnreachableError, UpstreamError
from rubato.frontdoor.admission import AdmittedRequest, ApiRequest, FrontDoor, without_slo_fields
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.choices import response_id
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.headers import forwarded_headers, new_id, returned_headers
from rubato.frontdoor.offers import Offers
from rubato.frontdoor.paths import CHAT, GENERATE, RESPONSES, TEXT, is_internal, written_path
from rubato.frontdoor.slo_fields import to_headers
from rubato.frontdoor.verdict import verdict_fields
from rubato.serving.app_state import AppService, AppState, add_door, add_operations
from rubato.serving.asgi_client import AsgiClient, watch_departure, writer_of
from rubato.serving.board_pages import add_board
from rubato.serving.gateway_metrics import GatewayMetrics
from rubato.serving.model_list import ModelPages, asked_model, named_model
from rubato.serving.sse import forbid_buffering
from rubato.wire.folded_answer import NOT_IN_STREAMS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayService(AppService):
    """Holds the settings and objects of the gateway.

    Args:
        trips: the trip of each request, by id, for the replicas.
        key: of the servers' API; "" passes on the client's.
        is_vllm: whether the servers are vLLM's.
        models: listed by the servers.
    """

    trips: Trips
    key: str = ""
    is_vllm: Callable[[], bool] = lambda: False
    models: ServedModels = field(default_factory=ServedModels)

    def views(self) -> list[View]:
        for host in self.servers():
            host.requests.emit_counted_tokens()  # records are read together with views
        return AppService.views(self)

    def counted_replicas(self) -> set[str]:
        return {host.id for host in self.servers() if not host.is_linked}

    def urls(self) -> dict[str, str]:
        return {host.id: host.url for host in self.servers()}

    def servers(self) -> list[ServerReplica]:
        """Returns the servers that are not lost."""
        return [host for host in self.cluster.hosts.values() if isinstance(host, ServerReplica)]


def create_gateway(service: GatewayService) -> FastAPI:
    """Makes the app; the caller starts and closes the cluster."""
    app = FastAPI(title="Rubato gateway", summary="A fleet of LLM servers behind one address", redoc_url=None)
    state = AppState(service)
    app.state.is_draining = False
    gateway = Gateway(service, state)
    add_door(app, state.door)
    add_operations(app, state)
    add_board(app, state)
    service.cluster.listen(GatewayMetrics(state.metrics, service.trips, service.servers))
    for path in GENERATE:
        app.add_api_route(path, gateway.generate, methods=["POST"], response_model=None)
    pages = ModelPages(service.models, state)
    for path, page in (("/v1/models", pages.all), ("/v1/models/{name:path}", pages.one)):
        for method in ("GET", "HEAD"):
            app.add_api_route(path, page, methods=[method], response_model=None, include_in_schema=method == "GET")
    app.add_api_route(
        "/{path:path}", gateway.other, methods=["GET", "POST", "PUT", "DELETE", "HEAD"], include_in_schema=False
    )
    return app


class Gateway:
    """Answers requests to the gateway's endpoints."""

    def __init__(self, service: GatewayService, state: AppState) -> None:
        self._service, self._state = service, state
        self._cluster = service.cluster
        self._turn = 0

    async def generate(self, http: HttpRequest) -> Response:
        """A completion of any form: chat, text, responses, messages."""
        path, arrival, door = http.scope["path"], self._state.arrival(http), self._state.door
        tenant = self._state.enter(http)
        body = await self._state.read(http)
        admitted = door.admit(ApiRequest(path, http.headers, body, arrival), tenant)
        model = asked_model(body, self._service.models, door, admitted)
        http.state.model = model or self._service.model
        id = new_id(path, http.headers.get("x-request-id", ""), self._service.trips)
        if path == RESPONSES and self._service.tenants.configured:
            id = self._service.tenants.new_response_id(tenant)
        requests, streams = admitted.requests(id, arrival, body), body.flag("stream")
        streams = streams or _can_be_folded(path, body)
        offers = Offers(door, self._cluster, admitted, requests, lambda: streams or self._has_link())
        return _ProxyResponse(self._service, door, offers, admitted, body, model, self._headers(http), http.url.query)

    async def other(self, http: HttpRequest) -> Response:
        """Forwards a request for any other path to one of the servers, in turn."""
        tenant = self._state.enter(http)
        path, door = http.scope["path"], self._state.door
        if is_internal(path):
            raise ApiError(403, f"Only an admin's key may use {path[:80]} here.", code="admin_only")
        raw = await door.read_body(http)
        target, headers = written_path(path, http.url.query), self._headers(http)
        admitted = door.admit_other(path, tenant)

        async def answer() -> Reply:
            return await self._answer_of_any(http.method, target, headers, raw)

        return _PassThrough(answer, lambda: door.settle(admitted, 1, 0, 0), lambda: door.response_headers(admitted))

    async def _answer_of_any(self, method: str, target: str, headers: Headers, raw: bytes) -> Reply:
        """Returns the answer of the first server that can be reached. After a failure of a server that may have begun,
        one other is tried. Raises ApiError."""
        hosts, failures = self._hosts_for(raw), 0
        for at in range(len(hosts)):
            try:
                reply = await hosts[at].upstream.open(method, target, headers, raw)
            except UpstreamError as error:  # the server's own probes find out whether it is lost
                failures += not isinstance(error, UnreachableError)
                if failures > 1:
                    message = "The servers that were asked did not answer."
                    raise ApiError(502, message, code="server_failed", kind="server_error") from None
                continue
            refusal = why_not_passed_on(hosts[at].id, reply.status, has_own_key=bool(self._service.key))
            if refusal is not None:
                reply.close()
                raise ApiError(502, refusal[1], code="server_failed", kind="server_error")
            return reply
        raise ApiError(503, "No server of the fleet can be reached.", code="no_server", kind="server_error")

    def _hosts_for(self, raw: bytes) -> list[ServerReplica]:
        """Returns the servers, in turn, that list the body's model; all servers where none lists it."""
        hosts = self._service.servers()
        self._turn += 1
        at = self._turn % max(1, len(hosts))
        hosts = hosts[at:] + hosts[:at]
        urls = self._service.models.servers_of(named_model(raw))
        return hosts if not urls else [host for host in hosts if host.url in urls]

    def _has_link(self) -> bool:
        """Returns whether any server gets SLOs by its link: it may not know the tiers of this gateway."""
        return any(host.has_link for host in self._service.servers())

    def _headers(self, http: HttpRequest) -> list[tuple[str, str]]:
        """Returns the request headers that a server gets."""
        headers = forwarded_headers(http.headers.items())
        if self._service.key:
            headers.append(("authorization", f"Bearer {self._service.key}"))
        elif not self._state.tenants.configured:
            headers += [(name, value) for name, value in http.headers.items() if name in ("authorization", "x-api-key")]
        return headers


def _can_be_folded(path: str, body: BodyFields) -> bool:
    """Returns whether a response that does not stream can be made from a stream."""
    return path in (CHAT, TEXT) and all(body.json(name) in (b"", b"false") for name in NOT_IN_STREAMS)


def _with_usage(path: str, body: BodyFields) -> BodyFields:
    """Returns the body for a server without a link, whose tokens are counted from its stream."""
    if path in (CHAT, TEXT) and body.flag("stream"):
        options = body.value("stream_options")
        return body.with_fields(stream_options={**(options or {}), "include_usage": True})
    if _can_be_folded(path, body):
        return body.with_fields(stream=True, stream_options={"include_usage": True}, stream_interval=None)
    return body


class _ProxyResponse(Response):
    """Offers the requests of an API request when sent, and relays a server's response."""

    def __init__(
        self, service: GatewayService, door: FrontDoor, offers: Offers, admitted: AdmittedRequest, fields: BodyFields,
        model: str, headers: list[tuple[str, str]], query: str,
    ) -> None:  # fmt: skip
        self._service, self._door, self._offers, self._admitted = service, door, offers, admitted
        self._fields, self._model, self._headers_for_server, self._query = fields, model, headers, query
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = AsgiClient(scope, send, self._head)
        trip = self._make_trip(scope["path"], client)
        has_left = False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            self._offers.cancel()
            trip.break_off("the client left")

        watcher = asyncio.create_task(watch_departure(receive, leave))
        sender = asyncio.create_task(client.run())
        try:
            await self._offers.offer_all(trip.on_event)
            await trip.settlement.wait()
            if not trip.is_over and not has_left:
                self._offers.cancel()
                self._send_error(trip, client)
            if client.has_ended:
                await sender
        finally:
            watcher.cancel()
            sender.cancel()
            self._offers.cancel()
            for id in trip.ids:
                self._service.trips.pop(id, None)

    def _make_trip(self, path: str, client: AsgiClient) -> RelayTrip:
        """Makes the trip of this request to a server and back, and registers it for the replicas. The body for a server
        is made when it is asked for, since most requests need one of its two forms, with usage or without."""
        door, admitted, requests = self._door, self._admitted, self._offers.requests
        with_usage = bool((self._fields.value("stream_options") or {}).get("include_usage"))
        answer = response_id(requests)
        fields = self._for_server(path, answer)
        has_id = fields.json("request_id") == orjson.dumps(answer)  # the body says the response's id

        def fields_of(is_counted: bool) -> BodyFields:
            return _with_usage(path, fields) if is_counted else fields

        usual_body = cache(lambda is_counted: fields_of(is_counted).to_json())

        def body(name: str, is_counted: bool) -> bytes:
            if has_id and name != answer:  # tried again, under another name
                return fields_of(is_counted).with_fields(request_id=name).to_json()
            return usual_body(is_counted)

        ask = Ask(
            path, written_path(path, self._query), answer, admitted.n, fields.flag("stream"), with_usage,
            self._service.is_vllm(), self._headers_for_server, body, self._model, bool(self._service.key),
            to_headers(admitted.granted),
        )  # fmt: skip
        trip = RelayTrip(
            ask, requests, client, lambda tokens: door.learn_length(admitted, tokens),
            lambda ends: verdict_fields(requests, ends),
        )  # fmt: skip
        for id in trip.ids:
            self._service.trips[id] = trip
        return trip

    def _head(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Returns the headers for the client, from a server's."""
        answer = response_id(self._offers.requests)
        # vLLM makes the response's id from this header.
        id_header = (b"x-request-id", (answer.partition("-")[2] or answer).encode())
        sent = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in returned_headers(headers)]
        length = [(b"content-length", v.encode()) for n, v in headers[-1:] if n == "content-length"]
        return [*forbid_buffering(sent), *length, id_header, *self._door.response_headers(self._admitted)]

    def _for_server(self, path: str, answer: str) -> BodyFields:
        """Returns the body for a server, without SLO fields, which are for the gateway."""
        body, tenants = without_slo_fields(self._fields), self._service.tenants
        if path == RESPONSES and ("request_id" not in body or tenants.configured):
            body = body.with_fields(request_id=answer)  # where vLLM takes no id from a header
        return self._door.with_salt(body, self._admitted.tenant) if self._service.is_vllm() else body

    def _send_error(self, trip: RelayTrip, client: AsgiClient) -> None:
        """Sends the error of a response that failed, as a response or at the end of the stream that has begun."""
        if (end := trip.failed_end) is not None:
            error = from_finished(end, self._offers.retry_after())
        else:
            error = ApiError(
                502, f"The response broke off: {trip.break_reason}", code="server_failed", kind="server_error"
            )
        trip.is_over = True
        body = error.body()
        if not trip.has_begun:
            limits = self._door.response_headers(self._admitted)
            client.answer(error.status, error.response(limits).raw_headers, body)
        elif trip.ask.path in (CHAT, TEXT):  # no [DONE]: the answer is incomplete
            client.end(b"\n\ndata: " + body + b"\n\n")  # the event before may be incomplete
        else:  # a stream of named events
            about = {"type": "error", "code": error.code, "message": error.message, "param": None}
            client.end(b"\n\nevent: error\ndata: " + orjson.dumps({**about, **orjson.loads(body)}) + b"\n\n")


class _PassThrough(Response):
    """Passes on a server's response part by part, and aborts it when the client leaves.

    Args:
        answer: asks the server. Raises ApiError.
        settle: called at the end in any case.
        limits: rate-limit headers of the tenant.
    """

    def __init__(
        self, answer: Callable[[], Awaitable[Reply]], settle: Callable[[], None],
        limits: Callable[[], list[tuple[bytes, bytes]]],
    ) -> None:  # fmt: skip
        self._answer, self._settle, self._limits = answer, settle, limits
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.create_task(self._pass(scope, receive, send))
        watcher = asyncio.create_task(watch_departure(receive, task.cancel))
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            watcher.cancel()
            self._settle()
        if not task.cancelled():
            task.result()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await self._answer()
        except ApiError as error:
            return await error.response(self._limits())(scope, receive, send)
        head = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in returned_headers(reply.headers)]
        head = [*forbid_buffering(head), *self._limits()]
        try:
            await send({"type": "http.response.start", "status": reply.status, "headers": head})
            while part := await reply.part():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except UpstreamError as error:  # the client must not take the incomplete body for a whole one
            if (connection := writer_of(scope)) is None:
                raise
            log.info("a response that was passed through broke off: %s", error)
            connection.abort()
            await asyncio.Event().wait()  # until the client is seen to be gone
        finally:
            reply.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None
