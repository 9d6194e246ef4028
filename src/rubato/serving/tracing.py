"""OpenTelemetry: one span for each API request that generates, from its arrival to the end of its response.

Two parts share the open spans. `TracedRequests`, ASGI middleware, begins a span as a child of the client's
`traceparent` and replaces that header by its own, which the gateway passes on to a server. `RequestTracer`, a listener,
adds the events of the span's requests. It gets no tokens: the verdict has the time of the first one.

This module needs the extra `otel` and is imported only where `otlp_traces_endpoint` is set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rubato.core.clock import Clock, unix_time
from rubato.core.events import (
    Demoted,
    Event,
    Finished,
    HandedOff,
    Lost,
    Offered,
    Placed,
    Preempted,
    Promoted,
    Started,
    Transferred,
)
from rubato.core.request import Request
from rubato.fleet.cluster import Cluster
from rubato.frontdoor.choices import answer_of, prompt_tokens, response_id
from rubato.frontdoor.errors import ApiError
from rubato.frontdoor.headers import first_of_each
from rubato.frontdoor.paths import GENERATE, canonical_path
from rubato.frontdoor.request_record import event_fields
from rubato.frontdoor.verdict import report
from rubato.serving.asgi_client import HEAD_TIME_KEY

SERVICE_NAME = "rubato"  # unless OTEL_SERVICE_NAME is set
FROM_ENVIRONMENT = "auto"  # endpoint: the collector of OTEL_EXPORTER_OTLP_ENDPOINT
FINAL_EXPORT_TIMEOUT_S = 2.0  # for the last spans at the end of the server
SPAN_EVENT_NAMES: dict[type[Event], str] = {  # event -> its name in a span
    Offered: "offered",
    Placed: "placed",
    Started: "started",
    Preempted: "preempted",
    HandedOff: "handed off",
    Transferred: "transferred",
    Lost: "replica lost",
    Demoted: "demoted",
    Promoted: "promoted",
    Finished: "finished",
}
SPAN_FIELDS = ("replica", "why", "resumed", "cached_tokens", "outcome", "reason")  # of `event_fields`
TRACE_HEADERS = (b"traceparent", b"tracestate")

_propagator = TraceContextTextMapPropagator()  # W3C's, which servers behind a gateway read as well


class _OpenSpan:
    """Keeps the span of an API request, with the requests and their ends. It ends with the response or the last
    request, whichever is later."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.requests: dict[str, Request] = {}
        self.ends: list[Finished] = []
        self.is_answered = False

    @property
    def is_over(self) -> bool:
        return self.is_answered and len(self.ends) == len(self.requests)


_current: ContextVar[_OpenSpan | None] = ContextVar("rubato_span", default=None)  # of the API request being handled


class RequestTracer:
    """Adds the events of requests to their spans, as a listener for `Cluster.listen`.

    Args:
        tracer: makes the spans.
        clock: the cluster's; seconds.
        unix_offset: Unix time - clock time, in seconds.
    """

    hears_tokens = False

    def __init__(self, tracer: Tracer, clock: Clock, unix_offset: float) -> None:
        self._tracer, self._clock, self._unix_offset = tracer, clock, unix_offset
        self._open: dict[str, _OpenSpan] = {}  # by request

    def trace_requests(self, app: FastAPI, cluster: Cluster) -> None:
        """Traces the requests of an app and of the cluster to which it offers them."""
        app.add_middleware(TracedRequests, tracer=self)
        cluster.listen(self)

    def begin_span(self, path: str, headers: dict[str, str], arrival: float | None) -> _OpenSpan:
        """Begins the span of an API request.

        Args:
            path: canonical.
            headers: by lower-case name.
            arrival: seconds of the clock; None: now.
        """
        at = self._clock.now() if arrival is None else arrival
        parent: Context = _propagator.extract(headers)
        attributes = {"http.request.method": "POST", "http.route": path}
        span = self._tracer.start_span(
            f"POST {path}", parent, SpanKind.SERVER, attributes, start_time=self._nanoseconds(at)
        )
        return _OpenSpan(span)

    def end_response(self, open_: _OpenSpan, status: int, model: str) -> None:
        """Ends the response of a span.

        Args:
            open_: the span.
            status: of HTTP, 0 where none was sent.
            model: its name; "" where it is not known.
        """
        open_.is_answered = True
        if status:
            open_.span.set_attribute("http.response.status_code", status)
        if model:
            open_.span.set_attribute("gen_ai.request.model", model)
        if status >= 500:
            open_.span.set_status(StatusCode.ERROR)
        self._end_if_over(open_)

    def __call__(self, event: Event) -> None:
        if (name := SPAN_EVENT_NAMES.get(type(event))) is None:
            return
        if isinstance(event, Offered):
            if (begun := _current.get()) is None or not begun.span.is_recording():
                return
            begun.requests[event.id] = event.request
            self._open[event.id] = begun
        if (open_ := self._open.get(event.id)) is None:
            return
        if isinstance(event, Finished):
            del self._open[event.id]
            open_.ends.append(event)
            self._add_first_token(open_, event)
        at = self._nanoseconds(event.at)
        open_.span.add_event(name, _event_attributes(event), at)
        if isinstance(event, Finished):
            self._end_if_over(open_)

    def _add_first_token(self, open_: _OpenSpan, end: Finished) -> None:
        if end.verdict.ttft is not None:
            at = open_.requests[end.id].arrival + end.verdict.ttft
            open_.span.add_event("first token", _choice_attribute(end), self._nanoseconds(at))

    def _end_if_over(self, open_: _OpenSpan) -> None:
        if not open_.is_over:
            return
        if open_.ends:
            open_.span.set_attributes(_span_attributes(list(open_.requests.values()), open_.ends))
            if any(end.outcome == "failed" for end in open_.ends):
                open_.span.set_status(StatusCode.ERROR, open_.ends[-1].reason)
        open_.span.end(self._nanoseconds(self._clock.now()))

    def _nanoseconds(self, at: float) -> int:
        return int((at + self._unix_offset) * 1e9)


def _choice_attribute(event: Event) -> dict[str, Any]:
    """Returns the attribute that names the event's request, where the span has several."""
    return {} if answer_of(event.id) == event.id else {"rubato.request": event.id}


def _event_attributes(event: Event) -> dict[str, Any]:
    """Returns the attributes of an event."""
    fields = event_fields(event)
    return _choice_attribute(event) | {f"rubato.{name}": fields[name] for name in SPAN_FIELDS if name in fields}


def _span_attributes(requests: list[Request], ends: list[Finished]) -> dict[str, Any]:
    """Returns the attributes of a span whose requests have ended: the report of the response, and the worst outcome."""
    first, verdict_fields = requests[0], report(requests[0], ends)
    targets = {f"target_{name}": value for name, value in verdict_fields.pop("targets").items() if name != "stages"}
    verdict_fields.pop("choices", None)
    worst = next((end for end in ends if end.outcome != "completed"), ends[0])
    own = {**verdict_fields, **targets, "tenant": first.tenant, "outcome": worst.outcome, "reason": worst.reason}
    by_id = {request.id: request for request in requests}
    return {
        "gen_ai.response.id": response_id(requests),
        "gen_ai.usage.input_tokens": sum(prompt_tokens(by_id[end.id], end) for end in ends),
        "gen_ai.usage.output_tokens": sum(end.output for end in ends),
        **{f"rubato.{name}": value for name, value in own.items() if value is not None},
    }


class TracedRequests:
    """Makes a span for each request to a path that generates, as ASGI middleware."""

    def __init__(self, app: ASGIApp, tracer: RequestTracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or (path := _generating_path(scope["path"])) is None:
            return await self._app(scope, receive, send)
        arrival = (scope.get("extensions") or {}).get(HEAD_TIME_KEY)
        open_ = self._tracer.begin_span(path, first_of_each(scope["headers"]), arrival)
        own: dict[str, str] = {}
        _propagator.inject(own, set_span_in_context(open_.span))
        other_headers = [(name, value) for name, value in scope["headers"] if name.lower() not in TRACE_HEADERS]
        headers = [*other_headers, *((name.encode(), value.encode()) for name, value in own.items())]
        state, status = scope.get("state", {}), 0

        def send_and_watch(message: Message) -> Any:
            nonlocal status
            status = message.get("status", status)
            return send(message)

        token = _current.set(open_)
        try:
            await self._app({**scope, "headers": headers, "state": state}, receive, send_and_watch)
        finally:
            _current.reset(token)
            self._tracer.end_response(open_, status, state.get("model", ""))
        return None


def _generating_path(path: str) -> str | None:
    """Returns the canonical path, if it generates; else None."""
    try:
        path = canonical_path(path)
    except ApiError:  # the door answers it
        return None
    return path if path in GENERATE else None


def exporting_tracer(endpoint: str, clock: Clock) -> tuple[RequestTracer, Callable[[], None]]:
    """Returns a tracer that sends spans to a collector by OTLP over HTTP from a thread of the SDK, and a function to
    close it.

    The SDK's environment variables apply: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        endpoint: the collector's URL for spans, or `FROM_ENVIRONMENT`.
    """
    exporter = OTLPSpanExporter() if endpoint == FROM_ENVIRONMENT else OTLPSpanExporter(endpoint)
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:  # a collector that does not answer holds the SDK up for half a minute
        ending = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(FINAL_EXPORT_TIMEOUT_S)

    return RequestTracer(provider.get_tracer("rubato"), clock, unix_time() - clock.now()), close
