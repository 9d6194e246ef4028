"""ASGI middleware in vLLM's API server: SLOs, tiers and tenants on the way in, tier served and verdict on the way out.

    vllm serve MODEL --scheduler-cls rubato.vllm.Scheduler --middleware rubato.vllm.Middleware \\
        --additional-config '{"rubato": {"config": "rubato.yaml"}}'

What a client states (headers, `slo` in the body, `service_tier`, keys of `vllm_xargs`) becomes what the server grants,
sealed, in `vllm_xargs`; the rest of the body goes on to vLLM as it is. Chunks of a stream pass as they are but for the
last one. A request that a scheduler refuses is a 429 where vLLM makes it a 500; admission itself is the policy's: one
that is predicted to be late is served as best effort, unless its client or its tier asks for refusal.
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
from rubato.config.for_vllm import configured
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
from rubato.frontdoor.admission import AdmittedRequest, ApiRequest, FrontDoor, for_server
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.headers import first_of_each
from rubato.frontdoor.paths import (
    CHAT,
    GENERATE,
    MODELS,
    OPEN,
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
from rubato.serving.vllm_reports import LATE, EngineReports, reports_of
from rubato.wire.response_stream import ResponseStream, usage_of, with_fields

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Paths whose responses have OpenAI's form of chunks.
CHUNKED = frozenset({CHAT, TEXT})
WAIT, POLL = 0.25, 0.005  # seconds that a response waits for its verdict at most, and looks for it
RECENT = 64  # requests whose ends say how fast the server gets through them
CHUNKS = b"transfer-encoding"  # the body goes on whole
COMMENT = b":"  # begins what vLLM sends to keep an idle stream open
# Events of /v1/responses before vLLM makes its request, which it makes once they are taken.
UNASKED = (b"event: response.created\n", b"event: response.in_progress\n")

log = logging.getLogger("vllm.rubato")


class Middleware:
    """For vLLM's `--middleware`; the endpoint plug-in adds the same. Twice in an app, it works once."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._front: FrontEnd | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "rubato" in scope:
            return await self._app(scope, receive, send)
        if self._front is None:
            try:
                self._front = front_end_of(scope["app"].state)
            except Exception as error:  # vLLM's server would go on without us
                log.error("%s", error, exc_info=not isinstance(error, ValueError | RuntimeError))
                os.kill(os.getpid(), signal.SIGTERM)
                raise
        if scope["type"] == "lifespan" or (scope["type"] == "websocket" and self._front.lets_in(scope)):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": "no key that may, or its limit"})
        await self._front.serve(self._app, {**scope, "rubato": True}, receive, send)
        return None


class EndpointPlugin:
    """For vLLM's endpoint plug-ins, where `VLLM_PLUGINS` names `rubato`."""

    name = "rubato"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_middleware(Middleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        pass


def front_end_of(state: Any) -> FrontEnd:
    """state: of vLLM's app. Raises RuntimeError for a version of vLLM that it is not written for, ConfigError
    (ValueError) for settings that cannot be."""
    check_version()
    vllm_config, args = state.vllm_config, state.args
    _, config = configured(vllm_config.additional_config)
    places = vllm_config.scheduler_config.max_num_seqs * vllm_config.parallel_config.data_parallel_size

    def as_vllm_shares(app: App) -> App:
        return CORSMiddleware(
            app,
            allow_origins=args.allowed_origins,
            allow_credentials=args.allow_credentials,
            allow_methods=args.allowed_methods,
            allow_headers=args.allowed_headers,
        )

    longest, names = vllm_config.model_config.max_model_len, vllm_config.model_config.served_model_name
    model = names if isinstance(names, str) else names[0]
    reports = reports_of(vllm_config.parallel_config)
    reports.block_size = vllm_config.cache_config.block_size or 0
    return FrontEnd(config, places, longest, reports, as_vllm_shares, model)


@dataclass(slots=True)
class _Call:
    """One API request at the engines. requests: what vLLM made of it, a choice each; ends: of those that are over.
    begun: one of them has a token. background: its response does not wait for them. served: vLLM answered 200;
    answered: its response is over, or its client gone. usage: tokens of prompt and output by vLLM's response."""

    admitted: AdmittedRequest
    background: bool
    ticket: str = field(default_factory=lambda: uuid4().hex)
    requests: dict[str, Request] = field(default_factory=dict)
    ends: dict[str, Finished] = field(default_factory=dict)
    begun: bool = False
    served: bool = False
    answered: bool = False
    usage: tuple[int, int] = (0, 0)
    settled: tuple[int, int] = (0, 0)  # the same, of what the door was told

    @property
    def over(self) -> bool:
        return bool(self.requests) and len(self.ends) == len(self.requests)


def _unshared(app: App) -> App:
    return app


class FrontEnd:
    """places: requests that the engines run at once. longest: tokens that the model takes. shared: adds CORS headers to
    responses that are not vLLM's. model: its name."""

    def __init__(
        self,
        config: Config,
        places: int,
        longest: int,
        reports: EngineReports,
        shared: Callable[[App], App] = _unshared,
        model: str = "",
    ) -> None:
        self._tenants = Tenants(tenants_of(config), tiers_of(config))
        self._reports = reports
        self._deaf = False  # an answer came to its end without a report: no engine reports, or not to here
        self.shared = shared
        self._board = VllmBoard(reports, self._tenants, model, config.policy.name)
        self._completed: deque[float] = deque(maxlen=RECENT)
        self.door = FrontDoor(
            self._tenants, reports.clock, reports, self._retry_after, lambda: longest,
            config.max_body_bytes, config.max_choices, in_flight_bound(config, places),
            {name: tenant.weight for name, tenant in config.tenants.items()}, reports.metrics.client_error,
        )  # fmt: skip

    # ----------------------------------------------------------------- which path

    async def serve(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        door, tenant = self.door, None

        send = door.counting(scope, send)
        try:
            path = canonical_path(written := scope["path"].removeprefix(scope.get("root_path", "")))
            full = scope.get("root_path", "") + path  # as vLLM's routes match it
            scope = {**scope, "path": full, "raw_path": written_path(full).encode()}
            if scope["method"] == "OPTIONS" or path in OPEN:
                self._reports.read()
                return await app(scope, receive, send)
            if (file := self._board.file(path, with_slash=written.endswith("/"))) is not None:
                return await file(scope, receive, send)
            headers = first_of_each(scope["headers"])
            tenant = door.identify(headers)
            if path.startswith("/rubato/"):
                query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
                return await self.shared(self._own_page(path, tenant, query))(scope, receive, send)
            if scope["method"] == "POST":
                door.enter(tenant)
            door.authorize(tenant, path)
            if scope["method"] != "POST" or not (path in GENERATE or is_shared(path)):
                return await app(scope, receive, _with_version(send) if path == MODELS else send)
            raw = await door.read_body(_parts(receive), headers.get("content-length", ""))
            if path not in GENERATE:
                return await app(scope, _replayed(raw, receive), send)
            body = door.read_fields(raw)
            call = self._admit(ApiRequest(path, headers, body, self._reports.clock.now()), tenant)
        except ApiError as error:
            return await self.shared(_reply(error, door.limit_headers(tenant)))(scope, receive, send)
        try:
            raw = self._for_vllm(call, body).to_json()
            kept = [(name, value) for name, value in scope["headers"] if name not in (b"content-length", CHUNKS)]
            answer = _Answer(self, call, scope, send)
            scope = {**scope, "headers": [*kept, (b"content-length", b"%d" % len(raw))]}
            await app(scope, _replayed(raw, receive), answer.send)
        except Exception:
            if not await answer.is_refused():
                raise
        finally:
            self._ended(call)
        return None

    def lets_in(self, scope: Scope) -> bool:
        """Whether a websocket's client may come now: no limit holds what it then makes, so with tenants an admin."""
        try:
            tenant = self.door.identify(first_of_each(scope["headers"]))
            self.door.enter(tenant)
        except ApiError:
            return False
        return tenant.admin or not self._tenants.configured

    # ----------------------------------------------------------------- on the way in

    def _admit(self, request: ApiRequest, tenant: Tenant) -> _Call:
        """Admit it, and listen to what engines report of it. Raises ApiError 400 and 429."""
        background = request.path == RESPONSES and request.body.flag("background")
        call = _Call(self.door.admit(request, tenant), background)
        if self._reports.connected:
            self._reports.listen(call.ticket, lambda event: self._heard(call, event))
        return call

    def _for_vllm(self, call: _Call, body: BodyFields) -> BodyFields:
        """A body with what is granted, sealed, in `vllm_xargs`, and with what keeps tenants apart in vLLM."""
        admitted, tenants = call.admitted, self._tenants
        granted, tenant = admitted.granted, admitted.tenant
        fields = {TIER: granted.tier, ON_DECLINE: granted.on_decline}
        times = zip((*MILLISECONDS, MAX_PAUSE), astuple(granted.slo), strict=True)
        fields |= {key: repr(seconds * 1e3) for key, seconds in times if seconds is not None}
        if not self._reports.connected:
            fields.pop(MAX_PAUSE, None)  # which an engine believes under a seal alone
        else:
            fields |= {TENANT: tenant.name, TICKET: call.ticket, ARRIVAL: repr(unix_time())}
            fields = sealed(fields)
        body = for_server(body)
        if not body.json("vllm_xargs") or body.json("vllm_xargs").startswith(b"{"):
            body = body.with_fields(vllm_xargs={**(body.value("vllm_xargs") or {}), **fields})
        if tenants.configured and admitted.path == RESPONSES:
            body = body.with_fields(request_id=tenants.new_response_id(tenant))
        return self.door.with_salt(body, tenant)

    # ----------------------------------------------------------------- while it is served

    def _heard(self, call: _Call, event: Event) -> None:
        if type(event) is Offered:
            call.requests[event.id] = event.request
        elif type(event) is Tokens:
            call.begun = True
        elif type(event) is Finished:
            call.ends[event.id] = event
            if event.outcome == "completed":
                self._completed.append(event.at)
            if call.answered and call.over:
                self._settle(call)

    async def refusal(self, call: _Call) -> ApiError | None:
        """Of an API request whose response is about to begin, or ends with an error: the refusal that it is."""
        await self._heard_of(call, lambda: call.begun or call.over)
        refused = [end for end in call.ends.values() if end.outcome == "refused"]
        return self.refused(refused[0]) if refused else None

    async def ends(self, call: _Call) -> tuple[list[Request], list[Finished]]:
        """What became of an API request whose response is at its end; what is not known in time is left out."""
        await self._heard_of(call, lambda: call.over)
        ids = [id for id in call.requests if id in call.ends]
        return [call.requests[id] for id in ids], [call.ends[id] for id in ids]

    async def _heard_of(self, call: _Call, it: Callable[[], bool]) -> None:
        """Wait until engines have reported it; for WAIT seconds at most, and not at all where they are not heard."""
        until = self._reports.clock.now() + WAIT
        self._reports.read()
        while not it() and self._reports.connected and self._reports.clock.now() <= until:
            if self._deaf and not call.requests:
                return
            await asyncio.sleep(POLL)
            self._reports.read()
        self._deaf = not call.requests

    def refused(self, end: Finished) -> ApiError:
        return from_finished(end, self._retry_after())

    def _retry_after(self) -> float:
        return retry_after(self._completed, self.door.in_flight.total())

    def _ended(self, call: _Call) -> None:
        """A response is over. Its requests may not be: `background` of `/v1/responses`."""
        self._reports.read()
        self._reports.forget(call.ticket)
        call.answered = True
        if call.background and call.served and self._reports.connected and not call.requests:
            asyncio.get_running_loop().call_later(LATE, lambda: None if call.requests else self._settle(call))
        elif call.over or not call.requests:
            self._settle(call)

    def _settle(self, call: _Call) -> None:
        """Give back its places and what it reserved beyond what it used, by the engines' word or by vLLM's response;
        where neither says how much that was, all that was reserved. Again: what has come since."""
        admitted = call.admitted
        if call.requests:
            prompt = sum([0 if _is_further_choice(id) else r.prompt for id, r in call.requests.items()])
            output = sum([end.output for end in call.ends.values()])
        elif any(call.usage) or not call.served:
            prompt, output = call.usage
        else:
            prompt, output = 0, admitted.reserved_tokens
        self.door.settle(admitted, admitted.open_choices, prompt - call.settled[0], output - call.settled[1])
        call.settled = prompt, output
        if not self.door.in_flight.total():
            self._completed.clear()  # how long it then has nothing to do says nothing of its speed
        if prompt and call.served:
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
        records = [r for r in reports.history.find(id) if tenant.admin or r.request.tenant == tenant.name]
        if not records:
            raise ApiError(404, f"There is no request {id[:80]!r}, or no longer.", param="id", code="request_not_found")
        fair, numbers = self._tenants.configured, reports.engines.keys()
        names = {str(number): f"engine {number}" if len(numbers) > 1 else "this server" for number in numbers}
        return _page(history.shown(id, records, reports.views(), now, fair=fair, names=names))


class _Answer:
    """A response on its way from vLLM to the client."""

    def __init__(self, front: FrontEnd, call: _Call, scope: Scope, send: Send) -> None:
        self._front, self._call, self._scope, self._send = front, call, scope, send
        self._start: Message | None = None  # held back until it is known what the response is
        self._early: list[Message] = []  # with it: parts of before vLLM made its request
        self._stream = False
        self._whole: bytearray | None = None  # the body so far of a response that is changed at its end
        admitted = call.admitted
        self._reader = ResponseStream(admitted.prompts * admitted.n)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._call.served = message["status"] == 200
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._stream = any(b"text/event-stream" in value for value in types)
            if not self._stream and any(b"json" in value for value in types):
                self._whole = bytearray()
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._whole is not None:
            self._whole += message.get("body", b"")
            if not message.get("more_body", False):
                await self._json(bytes(self._whole))
        elif self._stream and self._call.admitted.path in CHUNKED:
            await self._chunks(message)
        elif self._start is not None and not self._call.background and message.get("body", b"").startswith(UNASKED):
            self._early.append(message)
        elif not await self.is_refused(message.get("body", b"")):
            await self._begin()
            await self._send(message)

    async def is_refused(self, part: bytes = b"") -> bool:
        """Whether a refusal, a 429, is the response, instead of what vLLM makes of it. part: about to be sent."""
        if self._start is None or (part.startswith(COMMENT) and self._stream):
            return False
        if (error := await self._front.refusal(self._call)) is None:
            return False
        self._whole = bytearray()  # whatever comes is no part of the response any more
        await self._instead(error)
        return True

    async def _begin(self) -> None:
        """The head, once."""
        if self._start is not None:
            start, self._start = self._start, None
            more = self._front.door.response_headers(self._call.admitted)
            await self._send({**start, "headers": [*forbid_buffering(start["headers"]), *more]})
            for early in self._early:
                await self._send(early)

    async def _json(self, raw: bytes) -> None:
        """A response that is whole: with the verdict, or a 429 in the place of an error that is a refusal."""
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

    async def _chunks(self, message: Message) -> None:
        """Part of a stream. vLLM sends a chunk at a time; the last one before the end gets the verdict."""
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

    async def _instead(self, error: ApiError) -> None:
        self._start = None
        reply = _reply(error, self._front.door.response_headers(self._call.admitted))
        await self._front.shared(reply)(self._scope, _nothing, self._send)


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The parts of a body. Raises ApiError 400 for a client that left."""
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
    """How an engine stands, as `/rubato/state` says it."""
    queues = Counter(row[1] for row in fields.get("sequences", ()))
    left_out = ("sequences", "planned", "batches", "at", "held", "open")
    return {
        "engine": number,
        "age_ms": verdict.ms(now - fields["at"]) if "at" in fields else None,
        **{queue: queues[queue] for queue in ("running", "waiting", "moving")},
        "held": len(fields.get("held", ())),
        **{name: value for name, value in fields.items() if name not in left_out},
    }


def _reply(error: ApiError, more: list[tuple[bytes, bytes]]) -> Response:
    """An error as a response, with further headers."""
    reply = error.response()
    for name, value in more:
        reply.headers[name.decode()] = value.decode()
    return reply


def _with_version(send: Send) -> Send:
    """vLLM's list of models says who owns them, but not that this server takes SLOs."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            version = (VERSION_HEADER.encode(), rubato.__version__.encode())
            message = {**message, "headers": [*message["headers"], version]}
        await send(message)

    return sent


def _page(content: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """A body that was read, and then what comes of the client."""
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return parts.pop() if parts else await receive()

    return next_message


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
