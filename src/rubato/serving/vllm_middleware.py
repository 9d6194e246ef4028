"""ASGI middleware in vLLM's API server: SLOs, tiers and tenants on the way in, tier served and verdict on the way out.

    vllm serve MODEL --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware \\
        --additional-config '{"rubato": {"config": "rubato.yaml"}}'

The middleware replaces the SLO that a client states (headers, `slo` in the body, `service_tier`, keys of `vllm_xargs`)
by the granted one, sealed, in `vllm_xargs`; the rest of the body goes to vLLM unchanged. Chunks of a stream pass
unchanged, except the last one. A request that the scheduler refuses is a 429, where vLLM would send a 500. The policy
decides on admission: a request predicted to be late is served as best effort, unless its client or tier asks for
refusal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import astuple, dataclass, field
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import orjson
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response

import rubato
from rubato.config.build import in_flight_bound
from rubato.config.for_vllm import load_for_vllm
from rubato.config.schema import Config
from rubato.core.clock import unix_time
from rubato.core.events import Event, Finished, Offered, Tokens
from rubato.core.request import Request
from rubato.core.server_url import VERSION_HEADER
from rubato.engines.vllm.link import address_for_gateways
from rubato.engines.vllm.sequence import ARRIVAL, MAX_PAUSE, MILLISECONDS, ON_DECLINE, TENANT, TICKET, TIER, sealed
from rubato.engines.vllm.settings import check_version
from rubato.fleet.cluster import retry_after
from rubato.frontdoor import history, verdict
from rubato.frontdoor.admission import AdmittedRequest, ApiRequest, FrontDoor, without_slo_fields
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.headers import first_of_each
from rubato.frontdoor.paths import (
    CHAT,
    GENERATE,
    MODELS,
    OPEN_PATHS,
    RESPONSES,
    TEXT,
    canonical_path,
    is_shared,
    written_path,
)
from rubato.frontdoor.tenants import Tenant, Tenants, tenants_of, tiers_of
from rubato.serving.sse import forbid_buffering
from rubato.serving.vllm_board import JSON as BOARD_JSON
from rubato.serving.vllm_board import VllmBoard
from rubato.serving.vllm_reports import LATE_REPORT_S, EngineReports, reports_of
from rubato.wire.response_stream import ResponseStream, usage_of, with_fields

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Paths whose responses have OpenAI's form of chunks.
CHUNKED_PATHS = frozenset({CHAT, TEXT})
VERDICT_WAIT_S, VERDICT_POLL_S = 0.25, 0.005  # a response waits for its verdict at most, and checks for it
RECENT_ENDS = 64  # by which the server's rate is estimated
TRANSFER_ENCODING = b"transfer-encoding"  # removed: the body is forwarded whole
KEEPALIVE_PREFIX = b":"  # of comments by which vLLM keeps an idle stream open
# Events of /v1/responses that vLLM sends before it makes its request.
EVENTS_BEFORE_REQUEST = (b"event: response.created\n", b"event: response.in_progress\n")

log = logging.getLogger("vllm.rubato")


class Middleware:
    """The class for vLLM's `--middleware`; the endpoint plug-in adds it, too. A second one in an app does nothing."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._front: FrontEnd | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "rubato" in scope:
            return await self._app(scope, receive, send)
        if self._front is None:
            try:
                self._front = front_end_of(scope["app"].state)
            except Exception as error:  # else vLLM's server would run without the middleware
                log.error("%s", error, exc_info=not isinstance(error, ValueError | RuntimeError))
                os.kill(os.getpid(), signal.SIGTERM)
                raise
        if scope["type"] == "lifespan" or (scope["type"] == "websocket" and self._front.admits_websocket(scope)):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": "no key that may, or its limit"})
        await self._front.serve(self._app, {**scope, "rubato": True}, receive, send)
        return None


class EndpointPlugin:
    """The class for vLLM's endpoint plug-ins; active where `VLLM_PLUGINS` names `rubato`."""

    name = "rubato"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_middleware(Middleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        pass


def front_end_of(state: Any) -> FrontEnd:
    """Make the front end. state: of vLLM's app. Raises RuntimeError for an unsupported version of vLLM, ConfigError
    (ValueError) for impossible settings."""
    check_version()
    vllm_config, args = state.vllm_config, state.args
    _, config = load_for_vllm(vllm_config.additional_config)
    max_running = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size

    def as_vllm_shares(app: App) -> App:
        return CORSMiddleware(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
        )

    max_model_len, names = vllm_config.model_config.max_model_len, vllm_config.model_config.served_model_name
    model = names if isinstance(names, str) else names[0]
    reports = reports_of(vllm_config.parallel_config)
    reports.block_size = vllm_config.cache_config.block_size or 0
    return FrontEnd(config, max_running, max_model_len, reports, as_vllm_shares, model)


@dataclass(slots=True)
class _ServedRequest:
    """One API request at the engines.

    Args:
        background: its response does not wait for its requests.
        ticket: names it in the engines' reports.
        requests: vLLM's, one for each choice, by id.
        ends: of those that have ended.
        has_tokens: whether any of them has a token.
        is_served: vLLM answered 200.
        is_answered: its response has ended, or its client left.
        usage: tokens of prompt and output by vLLM's response.
        settled_tokens: tokens of prompt and output that the door knows.
    """

    admitted: AdmittedRequest
    background: bool
    ticket: str = field(default_factory=lambda: uuid4().hex)
    requests: dict[str, Request] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)
    has_tokens: bool = False
    is_served: bool = False
    is_answered: bool = False
    usage: tuple[int, int] = (0, 0)
    settled_tokens: tuple[int, int] = (0, 0)

    @property
    def is_over(self) -> bool:
        return bool(self.requests) and len(self.ends) == len(self.requests)


def _without_cors(app: App) -> App:
    return app


class FrontEnd:
    """Admits API requests in front of vLLM's app and adds verdicts to its responses.

    Args:
        max_running: requests that the engines run at once.
        max_model_len: tokens of the model's context.
        with_cors: adds vLLM's CORS headers to an app that makes our own responses.
        model: its name.
    """

    def __init__(
        self,
        config: Config,
        max_running: int,
        max_model_len: int,
        reports: EngineReports,
        with_cors: Callable[[App], App] = _without_cors,
        model: str = "",
    ) -> None:
        self._tenants = Tenants(tenants_of(config), tiers_of(config))
        self._reports = reports
        self._has_no_reports = False  # the last response ended without a report
        self.with_cors = with_cors
        self._board = VllmBoard(reports, self._tenants, model, config.policy.name)
        self._completed: deque[float] = deque(maxlen=RECENT_ENDS)
        self.door = FrontDoor(
            self._tenants, reports.clock, reports, self._retry_after, lambda: max_model_len,
            config.max_body_bytes, config.max_choices, in_flight_bound(config, max_running),
            {name: tenant.weight for name, tenant in config.tenants.items()}, reports.metrics.client_error,
        )  # fmt: skip

    # ----------------------------------------------------------------- paths

    async def serve(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        door, tenant = self.door, None

        send = door.count_responses(scope, send)
        try:
            path = canonical_path(written := scope["path"].removeprefix(scope.get("root_path", "")))
            full = scope.get("root_path", "") + path  # as vLLM's routes match it
            scope = {**scope, "path": full, "raw_path": written_path(full).encode()}
            if scope["method"] == "OPTIONS" or path in OPEN_PATHS:
                self._reports.read()
                return await app(scope, receive, send)
            if (file := self._board.file(path, with_slash=written.endswith("/"))) is not None:
                return await file(scope, receive, send)
            headers = first_of_each(scope["headers"])
            tenant = door.identify(headers)
            if path.startswith("/rubato/"):
                query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
                return await self.with_cors(self._own_page(path, tenant, query))(scope, receive, send)
            if scope["method"] == "POST":
                door.enter(tenant)
            door.authorize(tenant, path)
            if scope["method"] != "POST" or not (path in GENERATE or is_shared(path)):
                return await app(scope, receive, _with_version(send) if path == MODELS else send)
            raw = await door.read_body(_parts(receive), headers.get("content-length", ""))
            if path not in GENERATE:
                return await app(scope, _replay_body(raw, receive), send)
            body = door.read_fields(raw)
            call = self._admit(ApiRequest(path, headers, body, self._reports.clock.now()), tenant)
        except ApiError as error:
            return await self.with_cors(_reply(error, door.limit_headers(tenant)))(scope, receive, send)
        try:
            raw = self._for_vllm(call, body).to_json()
            kept = [
                (name, value) for name, value in scope["headers"] if name not in (b"content-length", TRANSFER_ENCODING)
            ]
            answer = _SloResponse(self, call, scope, send)
            scope = {**scope, "headers": [*kept, (b"content-length", b"%d" % len(raw))]}
            await app(scope, _replay_body(raw, receive), answer.send)
        except Exception:
            if not await answer.is_refused():
                raise
        finally:
            self._on_response_end(call)
        return None

    def admits_websocket(self, scope: Scope) -> bool:
        """Whether a websocket may connect now: with tenants only an admin's, since no limit applies to its requests."""
        try:
            tenant = self.door.identify(first_of_each(scope["headers"]))
            self.door.enter(tenant)
        except ApiError:
            return False
        return tenant.admin or not self._tenants.configured

    # ----------------------------------------------------------------- on the way in

    def _admit(self, request: ApiRequest, tenant: Tenant) -> _ServedRequest:
        """Admit an API request and listen to reports on it. Raises ApiError 400 and 429."""
        background = request.path == RESPONSES and request.body.flag("background")
        call = _ServedRequest(self.door.admit(request, tenant), background)
        if self._reports.is_connected:
            self._reports.listen(call.ticket, lambda event: self._on_event(call, event))
        return call

    def _for_vllm(self, call: _ServedRequest, body: BodyFields) -> BodyFields:
        """The body for vLLM: with the granted SLO, sealed, in `vllm_xargs`, and a salt that keeps tenants apart."""
        admitted, tenants = call.admitted, self._tenants
        granted, tenant = admitted.granted, admitted.tenant
        fields = {TIER: granted.tier, ON_DECLINE: granted.on_decline}
        times = zip((*MILLISECONDS, MAX_PAUSE), astuple(granted.slo), strict=True)
        fields |= {key: repr(seconds * 1e3) for key, seconds in times if seconds is not None}
        if not self._reports.is_connected:
            fields.pop(MAX_PAUSE, None)  # an engine accepts it only under a seal
        else:
            fields |= {TENANT: tenant.name, TICKET: call.ticket, ARRIVAL: repr(unix_time())}
            fields = sealed(fields)
        body = without_slo_fields(body)
        if not body.json("vllm_xargs") or body.json("vllm_xargs").startswith(b"{"):
            body = body.with_fields(vllm_xargs={**(body.value("vllm_xargs") or {}), **fields})
        if tenants.configured and admitted.path == RESPONSES:
            body = body.with_fields(request_id=tenants.new_response_id(tenant))
        return self.door.with_salt(body, tenant)

    # ----------------------------------------------------------------- while it is served

    def _on_event(self, call: _ServedRequest, event: Event) -> None:
        if type(event) is Offered:
            call.requests[event.id] = event.request
        elif type(event) is Tokens:
            call.has_tokens = True
        elif type(event) is Finished:
            call.ends[event.id] = event
            if event.outcome == "completed":
                self._completed.append(event.at)
            if call.is_answered and call.is_over:
                self._settle(call)

    async def refusal(self, call: _ServedRequest) -> ApiError | None:
        """The refusal of an API request whose response is about to begin or ends with an error; None if it was none."""
        await self._wait_for_report(call, lambda: call.has_tokens or call.is_over)
        refused = [end for end in call.ends.values() if end.outcome == "refused"]
        return self.refused(refused[0]) if refused else None

    async def ends(self, call: _ServedRequest) -> tuple[list[Request], list[Finished]]:
        """The requests and their ends, at the end of the response; those not reported in time are omitted."""
        await self._wait_for_report(call, lambda: call.is_over)
        ids = [id for id in call.requests if id in call.ends]
        return [call.requests[id] for id in ids], [call.ends[id] for id in ids]

    async def _wait_for_report(self, call: _ServedRequest, is_reported: Callable[[], bool]) -> None:
        """Wait for engines to report, for VERDICT_WAIT_S at most, and not at all where no reports arrive."""
        until = self._reports.clock.now() + VERDICT_WAIT_S
        self._reports.read()
        while not is_reported() and self._reports.is_connected and self._reports.clock.now() <= until:
            if self._has_no_reports and not call.requests:
                return
            await asyncio.sleep(VERDICT_POLL_S)
            self._reports.read()
        self._has_no_reports = not call.requests

    def refused(self, end: Finished) -> ApiError:
        return from_finished(end, self._retry_after())

    def _retry_after(self) -> float:
        return retry_after(self._completed, self.door.in_flight.total())

    def _on_response_end(self, call: _ServedRequest) -> None:
        """Settle at the end of a response, or later where its requests go on (`background` of `/v1/responses`)."""
        self._reports.read()
        self._reports.forget(call.ticket)
        call.is_answered = True
        if call.background and call.is_served and self._reports.is_connected and not call.requests:
            asyncio.get_running_loop().call_later(LATE_REPORT_S, lambda: None if call.requests else self._settle(call))
        elif call.is_over or not call.requests:
            self._settle(call)

    def _settle(self, call: _ServedRequest) -> None:
        """Settle choices and tokens by the engines' reports, or by vLLM's response; where neither has token counts, all
        reserved tokens count as used. A later call settles the difference."""
        admitted = call.admitted
        if call.requests:
            prompt = sum([0 if _is_further_choice(id) else r.prompt for id, r in call.requests.items()])
            output = sum([end.output for end in call.ends.values()])
        elif any(call.usage) or not call.is_served:
            prompt, output = call.usage
        else:
            prompt, output = 0, admitted.reserved_tokens
        self.door.settle(
            admitted, admitted.open_choices, prompt - call.settled_tokens[0], output - call.settled_tokens[1]
        )
        call.settled_tokens = prompt, output
        if not self.door.in_flight.total():
            self._completed.clear()  # idle time must not lower the estimated rate
        if prompt and call.is_served:
            self.door.learn_length(admitted, prompt)

    # ----------------------------------------------------------------- pages

    def _own_page(self, path: str, tenant: Tenant, query: Mapping[str, str]) -> Response:
        """`/rubato/board.json`, `/rubato/requests/ID`, `/rubato/state`, `/rubato/link`. Raises ApiError 404."""
        reports, id = self._reports, path.removeprefix("/rubato/requests/")
        reports.read()
        now = reports.clock.now()
        if path == BOARD_JSON:
            return self._board.json(tenant, query)
        if path == "/rubato/state":
            if not tenant.admin:
                raise ApiError(403, "Only an admin's key may see how the server stands.", code="admin_only")
            engines = [_engine(number, now, fields) for number, fields in sorted(reports.engines.items())]
            return _page({"in_flight": +self.door.in_flight, "engines": engines})
        if path == "/rubato/link":
            if not tenant.admin and self._tenants.configured:
                raise ApiError(403, "Only an admin's key may see where gateways reach the engine.", code="admin_only")
            if (address := address_for_gateways()) is None:
                raise ApiError(404, 'This server has no link: give "link": {} beside its policy.', code="no_link")
            return _page(address)
        records = [r for r in reports.requests.find(id) if tenant.admin or r.request.tenant == tenant.name]
        if not records:
            raise ApiError(404, f"There is no request {id[:80]!r}, or no longer.", param="id", code="request_not_found")
        fair, numbers = self._tenants.configured, reports.engines.keys()
        names = {str(number): f"engine {number}" if len(numbers) > 1 else "this server" for number in numbers}
        return _page(history.page(id, records, reports.views(), now, fair=fair, names=names))


class _SloResponse:
    """Passes on vLLM's response, with the tier served and the verdict added, or a 429 in its place."""

    def __init__(self, front: FrontEnd, call: _ServedRequest, scope: Scope, send: Send) -> None:
        self._front, self._call, self._scope, self._send = front, call, scope, send
        self._start: Message | None = None  # held back until the response may begin
        self._held_messages: list[Message] = []  # held back with it: parts from before vLLM made its request
        self._stream = False
        self._body: bytearray | None = None  # so far, of a response that is changed at its end
        admitted = call.admitted
        self._reader = ResponseStream(admitted.prompts * admitted.n)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._call.is_served = message["status"] == 200
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._stream = any(b"text/event-stream" in value for value in types)
            if not self._stream and any(b"json" in value for value in types):
                self._body = bytearray()
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._body is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_body(bytes(self._body))
        elif self._stream and self._call.admitted.path in CHUNKED_PATHS:
            await self._send_chunk(message)
        elif (
            self._start is not None
            and not self._call.background
            and message.get("body", b"").startswith(EVENTS_BEFORE_REQUEST)
        ):
            self._held_messages.append(message)
        elif not await self.is_refused(message.get("body", b"")):
            await self._begin()
            await self._send(message)

    async def is_refused(self, part: bytes = b"") -> bool:
        """Send a 429 in place of vLLM's response if the request was refused; whether it was. part: about to be sent."""
        if self._start is None or (part.startswith(KEEPALIVE_PREFIX) and self._stream):
            return False
        if (error := await self._front.refusal(self._call)) is None:
            return False
        self._body = bytearray()  # later parts are dropped
        await self._send_error(error)
        return True

    async def _begin(self) -> None:
        """Send the head, once."""
        if self._start is not None:
            start, self._start = self._start, None
            more = self._front.door.response_headers(self._call.admitted)
            await self._send({**start, "headers": [*forbid_buffering(start["headers"]), *more]})
            for held_message in self._held_messages:
                await self._send(held_message)

    async def _send_body(self, raw: bytes) -> None:
        """Send a whole response, with the verdict, or a 429 in place of an error that is a refusal."""
        if self._start is None:
            return  # it was replaced
        status = self._start["status"]
        if (status >= 500 or (status == 200 and self._call.background)) and await self.is_refused():
            return
        wanted = status == 200 and not self._call.background
        requests, ends = await self._front.ends(self._call) if wanted else ([], [])
        self._call.usage = usage_of(raw)
        if status == 200 and ends:
            raw = with_fields(raw, verdict.verdict_fields(requests, ends))
        kept = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        self._start = {**self._start, "headers": [*kept, (b"content-length", b"%d" % len(raw))]}
        await self._begin()
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def _send_chunk(self, message: Message) -> None:
        """Send part of a stream. vLLM sends a chunk at a time; the last one before the end gets the verdict."""
        part, more = message.get("body", b""), message.get("more_body", False)
        if self._start is not None:
            if await self.is_refused(part):
                return
            await self._begin()
        reader = self._reader
        passed, _ = reader.feed(part)
        if reader.has_ended or not more:
            self._call.usage = reader.usage
            passed += reader.finish(verdict.verdict_fields(*await self._front.ends(self._call)))
        await self._send({**message, "body": passed})

    async def _send_error(self, error: ApiError) -> None:
        self._start = None
        reply = _reply(error, self._front.door.response_headers(self._call.admitted))
        await self._front.with_cors(reply)(self._scope, _disconnected, self._send)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a body. Raises ApiError 400 where the client leaves."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The client went away before its body was read.")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _is_further_choice(id: str) -> bool:
    """Whether vLLM's request of this id shares its prompt with one before it (vLLM's ids: `CHOICE_...`)."""
    choice = id.partition("_")[0]
    return choice.isdecimal() and choice != "0"


def _engine(number: int, now: float, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an engine for `/rubato/state`."""
    queues = Counter(row[1] for row in fields.get("sequences", ()))
    omitted = ("sequences", "planned", "batches", "at", "held", "open")
    return {
        "engine": number,
        "age_ms": verdict.ms(now - fields["at"]) if "at" in fields else None,
        **{queue: queues[queue] for queue in ("running", "waiting", "moving")},
        "held": len(fields.get("held", ())),
        **{name: value for name, value in fields.items() if name not in omitted},
    }


def _reply(error: ApiError, more: list[tuple[bytes, bytes]]) -> Response:
    """An error as a response, with further headers."""
    reply = error.response()
    for name, value in more:
        reply.headers[name.decode()] = value.decode()
    return reply


def _with_version(send: Send) -> Send:
    """Add Rubato's version header to vLLM's list of models, so that clients know that this server takes SLOs."""

    async def send_with_version(message: Message) -> None:
        if message["type"] == "http.response.start":
            version = (VERSION_HEADER.encode(), rubato.__version__.encode())
            message = {**message, "headers": [*message["headers"], version]}
        await send(message)

    return send_with_version


def _page(content: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _replay_body(raw: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body which was read, and then the client's further messages."""
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return parts.pop() if parts else await receive()

    return next_message


async def _disconnected() -> Message:
    return {"type": "http.disconnect"}
