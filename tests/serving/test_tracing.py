"""OpenTelemetry: one API request is one span, with its times, its verdict and its parent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from rubato.config.schema import Config, ConfigError
from rubato.core.clock import Clock, WallClock
from rubato.core.request import SLO
from rubato.fleet.cluster import Cluster
from rubato.frontdoor.slo_fields import Tier, Tiers
from rubato.serving.serve import tracer_of
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.kit.asgi import call_asgi
from tests.kit.gateways import Fleet, gateway

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")  # the extra `otel`
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rubato.serving.tracing import RequestTracer, exporting_tracer

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
OFFSET = 1_000.0  # Unix time - clock time
TIERS = Tiers([Tier("good", SLO(5.0, 0.5)), Tier("never", SLO(1e-3), "refuse")])


def traced(app: Any, cluster: Cluster, clock: Clock) -> Callable[[], Sequence[ReadableSpan]]:
    """The spans that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    RequestTracer(provider.get_tracer("test"), clock, OFFSET).trace_requests(app, cluster)
    return exporter.get_finished_spans


def seconds(nanoseconds: int | None) -> float:
    """Of the clock."""
    assert nanoseconds is not None
    return nanoseconds / 1e9 - OFFSET


def events(span: ReadableSpan) -> list[tuple[str, float]]:
    return [(event.name, pytest.approx(seconds(event.timestamp))) for event in span.events]


@on(edge, tiers=TIERS)
async def test_request_is_one_span_with_its_times_verdict_and_parent(at: Edge) -> None:
    spans = traced(at.app, at.cluster, at.clock)
    await at.clock.sleep_until(2.0, 0)
    answer = (await at.chat(PARENT, service_tier="good")).json()
    await at.http.get("/metrics")
    (span,) = spans()
    assert (span.name, span.parent.trace_id, span.parent.span_id) == (  # type: ignore[union-attr]
        "POST /v1/chat/completions", int(TRACE, 16), int(CALLER, 16),
    )  # fmt: skip
    assert (seconds(span.start_time), seconds(span.end_time)) == (pytest.approx(2.0), pytest.approx(2.3))
    assert events(span) == [
        ("offered", 2.0), ("placed", 2.0), ("started", 2.0), ("first token", 2.1), ("finished", 2.3),
    ]  # fmt: skip
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "gen_ai.request.model": "simulated", "gen_ai.response.id": answer["id"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"], "gen_ai.usage.output_tokens": 3,
        "rubato.tier": "good", "rubato.tenant": "default", "rubato.served": "slo", "rubato.outcome": "completed",
        "rubato.reason": "length", "rubato.met": True, "rubato.slo_rule": "deadline",
        "rubato.target_ttft_ms": 5000.0, "rubato.target_tpot_ms": 500.0, "rubato.ttft_ms": 100.0,
        "rubato.tpot_ms": 100.0, "rubato.e2e_ms": 300.0, "rubato.max_pause_ms": 100.0,
        "rubato.margin_ms": answer["rubato"]["margin_ms"],
    }  # fmt: skip
    assert span.status.is_ok or span.status.is_unset


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"service_tier": "never"}, 429, {"outcome": "refused", "met": False, "cause": "infeasible"}),
        ({"temperature": 9}, 400, {}),
    ],
)
@on(edge, tiers=TIERS)
async def test_request_that_is_refused_is_one_span_with_the_reason(
    at: Edge, body: dict[str, Any], status: int, said: dict[str, Any]
) -> None:
    spans = traced(at.app, at.cluster, at.clock)
    assert (await at.chat(**body)).status_code == status
    (span,) = spans()
    told = dict(span.attributes or {})
    assert (span.parent, told["http.response.status_code"]) == (None, status)
    assert {name: told[f"rubato.{name}"] for name in said} == said
    assert [name for name, _ in events(span)] == (["offered", "placed", "finished"] if said else [])


@on(edge)
async def test_choices_of_one_request_are_in_one_span(at: Edge) -> None:
    spans = traced(at.app, at.cluster, at.clock)
    answer = (await at.chat(n=2)).json()
    (span,) = spans()
    told = dict(span.attributes or {})
    assert (told["gen_ai.response.id"], told["gen_ai.usage.output_tokens"]) == (answer["id"], 6)
    assert told["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    ended = [dict(event.attributes or {})["rubato.request"] for event in span.events if event.name == "finished"]
    assert sorted(ended) == [f"{answer['id']}-{choice}" for choice in range(2)]


@on(gateway)
async def test_request_whose_client_leaves_is_a_span_that_ends_as_cancelled(fleet: Fleet) -> None:
    spans = traced(fleet.app, fleet.cluster, fleet.clock)
    body = b'{"model": "stub", "prompt": [1, 2, 3], "max_tokens": 200, "stream": true}'
    await call_asgi(fleet.app, "/v1/completions", body, leaves=lambda answer: answer.begun.wait())
    while fleet.cluster.in_flight:
        await fleet.clock.sleep_until(fleet.clock.now() + 0.1, 0)
    (span,) = spans()
    told = dict(span.attributes or {})
    assert (told["rubato.outcome"], told["rubato.met"], told["rubato.cause"]) == ("cancelled", False, "client")
    assert seconds(span.end_time) < 2.0


@on(gateway, linked=False)
async def test_request_that_a_server_fails_at_has_each_placement_in_its_span(fleet: Fleet) -> None:
    spans = traced(fleet.app, fleet.cluster, fleet.clock)
    fleet.servers[0].broken = 503
    await fleet.complete()
    (span,) = spans()
    told = [(e.name, dict(e.attributes or {}).get("rubato.replica")) for e in span.events]
    assert told[:4] == [("offered", None), ("placed", "r0"), ("handed off", "r0"), ("placed", "r1")]
    tries = [head["traceparent"] for server in fleet.servers for head in server.heads]
    own: Any = span.context
    assert tries == [f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"] * 2
    assert dict(span.attributes or {})["rubato.outcome"] == "completed"


@on(gateway)
async def test_request_that_fails_is_a_span_with_an_error(fleet: Fleet) -> None:
    spans = traced(fleet.app, fleet.cluster, fleet.clock)
    for server in fleet.servers:
        server.broken = 500
    status = (await fleet.complete()).status_code
    (span,) = spans()
    told = dict(span.attributes or {})
    assert (span.status.is_ok, told["rubato.outcome"], told["rubato.cause"]) == (False, "failed", "failed")
    assert status == told["http.response.status_code"] >= 500


@pytest.mark.parametrize("flags", ["01", "00"])
@on(gateway)
async def test_gateway_passes_on_its_span_as_the_parent_of_the_servers(fleet: Fleet, flags: str) -> None:
    spans = traced(fleet.app, fleet.cluster, fleet.clock)
    sent = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}", "tracestate": "vendor=1", "baggage": "a=1"}
    await asyncio.gather(fleet.chat(sent), fleet.complete())
    by_trace = {head["traceparent"].split("-")[1]: head for server in fleet.servers for head in server.heads}
    assert len(by_trace) == 2
    head = by_trace[TRACE]
    _, _, parent, passed = head["traceparent"].split("-")
    assert (passed, head["tracestate"], head["baggage"]) == (flags, "vendor=1", "a=1")
    assert parent != CALLER
    of_trace = [span for span in spans() if span.context.trace_id == int(TRACE, 16)]  # type: ignore[union-attr]
    assert [f"{span.context.span_id:016x}" for span in of_trace] == ([parent] if flags == "01" else [])  # type: ignore[union-attr]
    assert len(spans()) == (2 if flags == "01" else 1)  # the other request begins a trace of its own


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Its address, and what has come there."""
    came: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                came.append(ExportTraceServiceRequest.FromString(raw))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", came
        server.shutdown()
        thread.join()


def test_spans_reach_the_collector_that_the_environment_names_under_its_service_name(
    collector: tuple[str, list[ExportTraceServiceRequest]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, came = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer, close = exporting_tracer("auto", WallClock())
    tracer.end_response(tracer.begin_span("/v1/completions", {}, None), 200, "m")
    close()
    assert sent(came) == {"mine": ["POST /v1/completions"]}


def sent(came: Sequence[ExportTraceServiceRequest]) -> dict[str, list[str]]:
    """The names of spans, by service."""
    found: dict[str, list[str]] = {}
    for resource in (each for request in came for each in request.resource_spans):
        names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        found.setdefault(names["service.name"], []).extend(
            span.name for scope in resource.scope_spans for span in scope.spans
        )
    return found


def test_endpoint_without_the_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rubato.serving.tracing", None)
    config = Config(otlp_traces_endpoint="auto")
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint .* pip install 'rubato-llm\[otel\]'"):
        tracer_of(config, WallClock(), ExitStack())
