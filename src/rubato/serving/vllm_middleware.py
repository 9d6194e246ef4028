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
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Request as HttpRequest
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response

from rubato.config.build import in_flight_bound
from rubato.config.for_vllm import load_for_vllm
from rubato.config.schema import Config
from rubato.core.clock import unix_time
from rubato.core.events import Event, Finished, Offered, Tokens
from rubato.core.request import Request
from rubato.engines.vllm.link import address_for_gateways
from rubato.engines.vllm.sequence import ARRIVAL, MAX_PAUSE, MILLISECONDS, ON_DECLINE, TENANT, TICKET, TIER, sealed
from rubato.engines.vllm.settings import check_version
from rubato.fleet.cluster import retry_after
from rubato.frontdoor import history, verdict
from rubato.frontdoor.admission import ApiRequest, FrontDoor, without_slo_fields
from rubato.frontdoor.body_fields import BodyFields
from rubato.frontdoor.errors import ApiError, from_finished
from rubato.frontdoor.headers import first_of_each
from rubato.frontdoor.paths import GENERATE, OPEN_PATHS, RESPONSES, canonical_path, is_shared, written_path
from rubato.frontdoor.tenants import Tenant, Tenants, tenants_of, tiers_of
from rubato.serving.app_state import json_response, with_version
from rubato.serving.vllm_board import JSON as BOARD_JSON
from rubato.serving.vllm_board import VllmBoard
from rubato.serving.vllm_reports import LATE_REPORT_S, EngineReports, reports_of
from rubato.serving.vllm_response import App, Message, Receive, Scope, Send, ServedRequest, SloResponse

VERDICT_WAIT_S, VERDICT_POLL_S = 0.25, 0.005  # a response waits for its verdict at most, and checks for it
RECENT_ENDS = 64  # by which the server's rate is estimated
TRANSFER_ENCODING = b"transfer-encoding"  # removed: the body is forwarded whole

log = logging.getLogger("vllm.rubato")


class Middleware:
    """Puts the front end before vLLM's app: the class for vLLM's `--middleware`, which the endpoint plug-in adds, too.
    A second one in an app does nothing."""

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
    """Adds the middleware: the class for vLLM's endpoint plug-ins, active where `VLLM_PLUGINS` names `rubato`."""

    name = "rubato"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_middleware(Middleware)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        pass


def front_end_of(state: Any) -> FrontEnd:
    """Makes the front end from the state of vLLM's app. Raises RuntimeError for an unsupported version of vLLM,
    ConfigError (ValueError) for impossible settings."""
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
                return await app(scope, receive, with_version(path, send))
            raw = await door.read_body(HttpRequest(scope, receive))
            if path not in GENERATE:
                return await app(scope, _replay_body(raw, receive), send)
            body = door.read_fields(raw)
            call = self._admit(ApiRequest(path, headers, body, self._reports.clock.now()), tenant)
        except ApiError as error:
            return await self.with_cors(error.response(door.limit_headers(tenant)))(scope, receive, send)
        try:
            raw = self._for_vllm(call, body).to_json()
            other_headers = [
                (name, value) for name, value in scope["headers"] if name not in (b"content-length", TRANSFER_ENCODING)
            ]
            answer = SloResponse(self, call, scope, send)
            scope = {**scope, "headers": [*other_headers, (b"content-length", b"%d" % len(raw))]}
            await app(scope, _replay_body(raw, receive), answer.send)
        except Exception:
            if not await answer.is_refused():
                raise
        finally:
            self._on_response_end(call)
        return None

    def admits_websocket(self, scope: Scope) -> bool:
        """Returns whether a websocket may connect: with tenants only an admin's, since its requests have no limit."""
        try:
            tenant = self.door.identify(first_of_each(scope["headers"]))
            self.door.enter(tenant)
        except ApiError:
            return False
        return tenant.admin or not self._tenants.configured

    # ----------------------------------------------------------------- on the way in

    def _admit(self, request: ApiRequest, tenant: Tenant) -> ServedRequest:
        """Admits an API request and listens to reports on it. Raises ApiError 400 and 429."""
        background = request.path == RESPONSES and request.body.flag("background")
        call = ServedRequest(self.door.admit(request, tenant), background)
        if self._reports.is_connected:
            self._reports.listen(call.ticket, lambda event: self._on_event(call, event))
        return call

    def _for_vllm(self, call: ServedRequest, body: BodyFields) -> BodyFields:
        """Returns the body for vLLM, with the granted SLO, sealed, in `vllm_xargs`, and with the tenant's salt."""
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

    def _on_event(self, call: ServedRequest, event: Event) -> None:
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

    async def refusal(self, call: ServedRequest) -> ApiError | None:
        """Returns the refusal of an API request whose response is about to begin or ends with an error, or None."""
        await self._wait_for_report(call, lambda: call.has_tokens or call.is_over)
        refused = [end for end in call.ends.values() if end.outcome == "refused"]
        return from_finished(refused[0], self._retry_after()) if refused else None

    async def ends(self, call: ServedRequest) -> tuple[list[Request], list[Finished]]:
        """Returns the requests and their ends, at the end of the response; those not reported in time are omitted."""
        await self._wait_for_report(call, lambda: call.is_over)
        ids = [id for id in call.requests if id in call.ends]
        return [call.requests[id] for id in ids], [call.ends[id] for id in ids]

    async def _wait_for_report(self, call: ServedRequest, is_reported: Callable[[], bool]) -> None:
        """Waits for engines to report, for VERDICT_WAIT_S at most, and not at all where no reports arrive."""
        until = self._reports.clock.now() + VERDICT_WAIT_S
        self._reports.read()
        while not is_reported() and self._reports.is_connected and self._reports.clock.now() <= until:
            if self._has_no_reports and not call.requests:
                return
            await asyncio.sleep(VERDICT_POLL_S)
            self._reports.read()
        self._has_no_reports = not call.requests

    def error_app(self, error: ApiError, call: ServedRequest) -> App:
        """Returns the app that answers a request with an error."""
        return self.with_cors(error.response(self.door.response_headers(call.admitted)))

    def _retry_after(self) -> float:
        return retry_after(self._completed, self.door.in_flight.total())

    def _on_response_end(self, call: ServedRequest) -> None:
        """Settles at the end of a response, or later where its requests go on (`background` of `/v1/responses`)."""
        self._reports.read()
        self._reports.forget(call.ticket)
        call.is_answered = True
        if call.background and call.is_served and self._reports.is_connected and not call.requests:
            asyncio.get_running_loop().call_later(LATE_REPORT_S, lambda: None if call.requests else self._settle(call))
        elif call.is_over or not call.requests:
            self._settle(call)

    def _settle(self, call: ServedRequest) -> None:
        """Settles choices and tokens by the engines' reports, or by vLLM's response; where neither has token counts,
        all reserved tokens count as used. A later call settles the difference."""
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
        """Returns `/rubato/board.json`, `/rubato/requests/ID`, `/rubato/state`, `/rubato/link`. Raises ApiError."""
        reports, id = self._reports, path.removeprefix("/rubato/requests/")
        reports.read()
        now = reports.clock.now()
        if path == BOARD_JSON:
            return self._board.json(tenant, query)
        if path == "/rubato/state":
            if not tenant.admin:
                raise ApiError(403, "Only an admin's key may see how the server stands.", code="admin_only")
            engines = [_engine(number, now, fields) for number, fields in sorted(reports.engines.items())]
            return json_response({"in_flight": +self.door.in_flight, "engines": engines})
        if path == "/rubato/link":
            if not tenant.admin and self._tenants.configured:
                raise ApiError(403, "Only an admin's key may see where gateways reach the engine.", code="admin_only")
            if (address := address_for_gateways()) is None:
                raise ApiError(404, 'This server has no link: give "link": {} beside its policy.', code="no_link")
            return json_response(address)
        records = reports.requests.find_for(tenant, id)
        has_fair_share, numbers = self._tenants.configured, reports.engines.keys()
        names = {str(number): f"engine {number}" if len(numbers) > 1 else "this server" for number in numbers}
        page = history.page(id, records, reports.views(), now, has_fair_share=has_fair_share, names=names)
        return json_response(page)


def _is_further_choice(id: str) -> bool:
    """Returns whether vLLM's request of this id shares its prompt with one before it (vLLM's ids: `CHOICE_...`)."""
    choice = id.partition("_")[0]
    return choice.isdecimal() and choice != "0"


def _engine(number: int, now: float, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of an engine for `/rubato/state`."""
    queues = Counter(row[1] for row in fields.get("sequences", ()))
    omitted = ("sequences", "planned", "batches", "at", "held", "open")
    return {
        "engine": number,
        "age_ms": verdict.ms(now - fields["at"]) if "at" in fields else None,
        **{queue: queues[queue] for queue in ("running", "waiting", "moving")},
        "held": len(fields.get("held", ())),
        **{name: value for name, value in fields.items() if name not in omitted},
    }


def _replay_body(raw: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that returns a body which was read, and then the client's further messages."""
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def next_message() -> Message:
        return parts.pop() if parts else await receive()

    return next_message
