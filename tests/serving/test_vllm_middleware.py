"""The middleware in front of vLLM's API server: what goes in, what comes out, whatever vLLM answers. The server is a
stand-in that answers in vLLM's words; the engine's reports are made here (tests/vllm/test_server.py has the real ones).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rubato.config.schema import load
from rubato.core.events import Finished, Offered, Tokens, Verdict
from rubato.core.request import SLO, Outcome, Request, Stage
from rubato.engines.vllm import link, settings
from rubato.engines.vllm.sequence import request_of
from rubato.frontdoor import slo_fields
from rubato.serving import vllm_middleware
from rubato.serving.vllm_middleware import FrontEnd, Middleware, front_end_of
from rubato.serving.vllm_reports import END_NOT_REPORTED, EngineReports, PluginMetrics, answer_of
from rubato.wire.messages import EngineState
from tests.kit import on
from tests.stubs.vllm_app import VLLM, Link

TIERS = {"chat": {"ttft_ms": 500, "tpot_ms": 50}, "batch": {"e2e_ms": 60_000}}
TENANTS = {
    "acme": {"keys": ["acme-key"], "tiers": ["chat", "flex"]},
    "bulk": {
        "keys": ["bulk-key"],
        "tiers": ["flex"],
        "requests_per_minute": 5,
        "tokens_per_minute": 100,
        "max_in_flight": 1,
    },
    "ops": {"keys": ["ops-key"], "admin": True},
}
LONGEST = 2000  # tokens that the model takes
STATE = {
    "policy": "edf",
    "steps": 3,
    "fallbacks": 0,
    "stood_aside": 0,
    "link_refused": 0,
    "deviations": {},
    "faults": {},
    "given_up": False,
    "drafted": {"accepted": 0, "rejected": 0},
}


@dataclass
class Client:
    http: httpx2.AsyncClient
    vllm: VLLM
    reports: EngineReports

    async def chat(self, key: str = "ops-key", path: str = "/v1/chat/completions", **more: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
        return await self.http.post(path, json=body, headers=headers)

    async def arrived(self, requests: int) -> None:
        """That many have come to vLLM."""
        for _ in range(10_000):
            if len(self.vllm.went_in) >= requests:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"only {len(self.vllm.went_in)} came")

    def metric(self, name: str, **labels: str) -> float:
        value = self.reports.metrics.registry.get_sample_value(name, labels)
        return value or 0.0

    def _in_flight_of(self, tenant: str) -> int:
        return self.http._transport.app._front.door.in_flight[tenant]  # type: ignore[attr-defined, no-any-return]

    @property
    def in_flight(self) -> bool:
        return bool(self.reports._open)


Scenario = Callable[[Client], Awaitable[None]]


def run(scenario: Scenario, config: dict[str, Any] | None = None, **vllm: Any) -> None:
    """A scenario with a fresh server."""

    async def main() -> None:
        wire = Link()
        reports = EngineReports(wire, PluginMetrics(CollectorRegistry(), counts=True))  # type: ignore[arg-type]
        server = VLLM(wire, **vllm)
        middleware = Middleware(server)
        middleware._front = FrontEnd(
            load({"tiers": TIERS, "default_tier": "chat", **(config or {})}), 4, LONGEST, reports
        )
        transport = httpx2.ASGITransport(middleware)
        async with httpx2.AsyncClient(transport=transport, base_url="http://vllm") as http:
            await scenario(Client(http, server, reports))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(link.KEY, "a key")


# ----------------------------------------------------------------- on the way in


@on(run, config={"tenants": TENANTS})
async def test_strangers_state_nothing_past_their_tenant(client: Client) -> None:
    await client.chat("bulk-key", service_tier="chat", vllm_xargs={"slo_ttft_ms": 1})
    await client.chat("acme-key", headers={"x-slo-ttft-ms": "1"})
    bulk, acme = client.vllm.requests
    assert (bulk.tenant, bulk.tier, bulk.best_effort) == ("bulk", "flex", True)
    assert (acme.tenant, acme.stages[0].slo) == ("acme", SLO(0.5, 0.05))
    # without the middleware's seal, or with another's, no key counts
    xargs = client.vllm.went_in[1]["vllm_xargs"]
    for changed in ({**xargs, "slo_ttft_ms": "1"}, {**xargs, "slo_seal": "00"}, {"slo_ttft_ms": 1}):
        params = SimpleNamespace(extra_args=changed, temperature=0.0, stop=None, ignore_eos=False)
        own = SimpleNamespace(
            sampling_params=params, request_id="r", num_prompt_tokens=1, max_tokens=1, arrival_time=0.0
        )
        request, ticket = request_of(own, 0.0, trust_client_slos=False)
        assert (request.best_effort, request.tenant, ticket) == (True, "default", "")


@on(run, config={"tenants": TENANTS})
async def test_limits_of_a_tenant_hold(client: Client) -> None:
    client.vllm.hold = asyncio.Event()
    running = asyncio.create_task(client.chat("bulk-key"))
    await client.arrived(1)
    second = await client.chat("bulk-key")
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rejected-tenant-saturated")
    client.vllm.hold.set()
    assert (await running).status_code == 200
    # 10 of the prompt and 4 of output, and not what was reserved: the prompt is taken for some 9 tokens
    assert (await client.chat("bulk-key", max_tokens=70)).status_code == 200
    fourth = await client.chat("bulk-key", max_tokens=100)
    assert int(fourth.headers["retry-after"]) == pytest.approx(17, abs=1)  # 28 tokens at 100 a minute
    assert client.metric("rubato_requests_offered_total", tier="flex", tenant="bulk") == 4
    assert client.metric("rubato_requests_refused_total", tier="flex", reason="rejected-tenant-saturated") == 1


@on(run, config={"tenants": TENANTS, "max_in_flight": 2})
async def test_a_full_server_refuses_with_the_time_after_which_to_come_again(client: Client) -> None:
    client.vllm.hold = asyncio.Event()
    running = [asyncio.create_task(client.chat("acme-key")) for _ in range(2)]
    await client.arrived(2)
    refused = await client.chat("acme-key")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.headers["x-rubato-reject-reason"] == "rejected-saturated"
    other = asyncio.create_task(client.chat("ops-key"))  # another tenant's flood leaves it its share
    await client.arrived(3)
    client.vllm.hold.set()
    assert [r.status_code for r in await asyncio.gather(*running, other)] == [200] * 3
    assert (await client.chat("acme-key")).status_code == 200


@pytest.mark.parametrize(
    ("path", "reserved"), [("/v1/chat/completions", LONGEST), ("/v1/responses", LONGEST), ("/v1/completions", 16)]
)
@on(run, config={"tenants": {"free": {"keys": ["free-key"], "tokens_per_minute": 5_000}}})
async def test_where_no_limit_is_stated_the_longest_output_is_reserved(
    client: Client, path: str, reserved: int
) -> None:
    client.vllm.hold = asyncio.Event()
    running = [asyncio.create_task(client.chat("free-key", path, max_tokens=None))]
    await client.arrived(1)
    usage = client.http._transport.app._front.door._usage["free"]  # type: ignore[attr-defined]
    assert usage.tokens.level == pytest.approx(5_000 - reserved, abs=10)
    client.vllm.hold.set()
    await asyncio.gather(*running)
    assert usage.tokens.level == pytest.approx(5_000 - 14, abs=10)


@on(run, config={"tenants": TENANTS}, silent=True)
async def test_without_reports_no_answer_but_the_first_waits_and_the_output_stays_charged(client: Client) -> None:
    reads = 0
    read = client.reports.read

    def counted() -> None:
        nonlocal reads
        reads += 1
        read()

    client.reports.read = counted  # type: ignore[method-assign]
    seen = []
    for stream in (False, False, True):
        reads = 0
        assert (await client.chat("ops-key", stream=stream)).status_code == 200
        seen.append(reads)
    assert seen[0] > 5
    assert max(seen[1:]) <= 3
    assert (await client.chat("bulk-key", max_tokens=80)).status_code == 200
    assert (await client.chat("bulk-key", max_tokens=80)).status_code == 429
    client.vllm.silent = False
    assert "rubato" in (await client.chat("ops-key")).json()


@on(run, config={"tenants": TENANTS})
async def test_websocket_of_a_tenant_is_closed(client: Client) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    middleware = client.http._transport.app  # type: ignore[attr-defined]
    for key in ("none", "acme-key"):  # no limit would hold what comes of it
        headers = [(b"authorization", f"Bearer {key}".encode())]
        await middleware({"type": "websocket", "headers": headers, "path": "/v1/realtime"}, None, send)
    assert [(m["type"], m["code"]) for m in sent] == [("websocket.close", 1008)] * 2


@on(run)
async def test_an_id_that_clients_use_again_keeps_one_history(client: Client) -> None:
    for _ in range(20):
        await client.chat()  # the stand-in gives all the same id
    assert len(client.reports.requests.find("chatcmpl-abc")) == 1


def state_of_vllm(additional: dict[str, Any]) -> SimpleNamespace:
    """`app.state` of vLLM's server."""
    parallel = SimpleNamespace(data_parallel_size=1, _api_process_rank=0)
    config = SimpleNamespace(
        additional_config=additional,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        model_config=SimpleNamespace(max_model_len=LONGEST, served_model_name="m"),
        cache_config=SimpleNamespace(block_size=16),
        parallel_config=parallel,
    )
    args = SimpleNamespace(
        allowed_origins=["http://page"], allow_credentials=False, allowed_methods=["*"], allowed_headers=["*"]
    )
    return SimpleNamespace(vllm_config=config, args=args)


@on(run)
async def test_a_browser_may_read_our_errors_where_it_may_read_vllms(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_middleware, "check_version", lambda: None)
    monkeypatch.setattr(vllm_middleware, "reports_of", lambda parallel: client.reports)
    client.http._transport.app._front = front_end_of(state_of_vllm({}))  # type: ignore[attr-defined]
    for origin, allowed in (("http://page", "http://page"), ("http://other", None)):
        answer = await client.chat(service_tier="typo", headers={"origin": origin})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (400, allowed)
    client.vllm.outcome, client.vllm.status, client.vllm.answer = "refused", 500, {"error": {"code": 500}}
    answer = await client.chat(headers={"origin": "http://page"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (429, "http://page")


@pytest.mark.parametrize(
    ("additional", "version", "said"),
    [({}, "0.31.2", "vLLM 0.31.2 is installed"), ({"rubato": {"polcy": "edf"}}, "0.32.0", "polcy")],
)
def test_a_server_that_cannot_be_served_is_ended_with_a_sentence(
    additional: dict[str, Any],
    version: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_middleware, "check_version", lambda: settings.check_version(version))
    ended: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.append(number))
    scope = {"type": "lifespan", "app": SimpleNamespace(state=state_of_vllm(additional))}
    with pytest.raises((RuntimeError, ValueError), match=said):
        asyncio.run(Middleware(VLLM(Link()))(scope, None, None))  # type: ignore[arg-type]
    assert ended == [signal.SIGTERM]
    assert said in caplog.text


@on(run)
async def test_names_in_a_body_are_not_all_compared(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(slo_fields, "_closest", lambda name, *rest: compared.append(name))
    assert (await client.chat(**{f"name{i}": 1 for i in range(200)})).status_code == 200
    assert len(compared) <= slo_fields.MAX_CHECKED_NAMES


# ----------------------------------------------------------------- on the way out


def chunk(finish: str | None = None, text: str = "a", **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}, separators=(",", ":")).encode() + b"\n\n"


ROLE = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"total_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


def parsed(text: str) -> list[Any]:
    found = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    assert found.pop() == "[DONE]"
    return [json.loads(part) for part in found]


@pytest.mark.parametrize(
    "answer",
    [
        [ROLE, chunk(), chunk("length"), DONE],
        [ROLE, chunk(), chunk("stop"), USAGE, DONE],
        [chunk(text='"finish_reason":"'), chunk("stop"), chunk(), chunk("length"), DONE],  # two choices
        [ROLE + chunk("stop") + DONE],
        [ROLE, ROLE, chunk("stop"), USAGE + DONE],
    ],
)
@on(run, "answer")
async def test_last_chunk_has_the_verdict_and_no_other_is_changed(client: Client, answer: list[bytes]) -> None:
    *others, last = parsed((await client.chat(stream=True)).text)
    *sent, final = parsed(b"".join(answer).decode())
    assert others == sent
    assert last.pop("service_tier") == "chat"
    assert last.pop("rubato")["met"] is True
    assert last == final


@on(run, answer=[chunk("stop"), DONE], late=0.05)
async def test_verdict_that_comes_late_is_waited_for(client: Client) -> None:
    assert parsed((await client.chat(stream=True)).text)[-1]["rubato"]["met"] is True


@on(run, answer=[chunk("stop"), DONE], silent=True)
async def test_verdict_that_never_comes_is_not_waited_for(client: Client) -> None:
    assert "rubato" not in parsed((await client.chat(stream=True)).text)[-1]
    assert not client.in_flight


LATE = Verdict(False, "deadline", "queue", ttft=2.0, margin=-1.5)


@on(run, verdict=LATE, best_effort=True, choices=2)
async def test_whole_answer_has_the_verdict_of_its_worst_choice(client: Client) -> None:
    answer = (await client.chat(n=2)).json()
    assert answer["service_tier"] == "flex"
    assert answer["rubato"]["served"] == "best_effort"
    assert (answer["rubato"]["met"], answer["rubato"]["cause"]) == (False, "queue")
    assert len(answer["rubato"]["choices"]) == 2
    assert client.metric("rubato_slo_missed_total", tier="chat", tenant="default", cause="queue") == 2


WHY = "a token takes 19 ms here alone; asked 3 ms"


@pytest.mark.parametrize(
    ("answer", "status"), [([ROLE, ERROR, DONE], 200), ([ERROR, DONE], 200), ({"error": {"code": 500}}, 500)]
)
@on(run, "answer", "status", outcome="refused", reason=f"rejected-slo-infeasible: {WHY}")
async def test_refusal_is_a_429_before_the_first_byte(client: Client, answer: Any) -> None:
    refused = await client.chat(stream=isinstance(answer, list), slo={"on_decline": "refuse"})
    assert refused.status_code == 429
    assert (refused.headers["x-should-retry"], "retry-after" in refused.headers) == ("false", False)
    assert refused.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
    assert WHY in refused.json()["error"]["message"]
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert client.vllm.requests[0].on_decline == "refuse"


@on(run)
async def test_what_begins_goes_out_at_once_whatever_follows(client: Client) -> None:
    """The role's chunk does not wait for the first text, which a reasoning parser may hold back for long."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def app(scope: Any, receive: Any, forward: Any) -> None:
        body = json.loads((await receive())["body"])
        client.vllm._serve(body["vllm_xargs"])
        types = [(b"content-type", b"text/event-stream")]
        await forward({"type": "http.response.start", "status": 200, "headers": types})
        await forward({"type": "http.response.body", "body": ROLE, "more_body": True})
        assert sent == [b"", ROLE]
        await forward({"type": "http.response.body", "body": b"", "more_body": False})

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"stream": true}'}

    middleware = client.http._transport.app  # type: ignore[attr-defined]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await middleware._front.serve(app, scope, receive, send)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("own", [None, "no-store"])
def test_a_stream_tells_proxies_not_to_buffer_it_unless_vllm_has_its_own_word(path: str, own: str | None) -> None:
    async def scenario(client: Client) -> None:
        headers = (await client.chat(path=path, stream=True)).headers
        assert (headers["cache-control"], headers["x-accel-buffering"]) == (own or "no-cache", "no")

    async def whole(client: Client) -> None:
        assert "x-accel-buffering" not in (await client.chat(path=path)).headers

    theirs = [(b"Cache-Control", own.encode())] if own else []
    run(scenario, answer=[chunk("stop"), DONE], headers=theirs)
    run(whole)


@pytest.mark.parametrize(("outcome", "then"), [("completed", chunk("stop")), ("refused", ERROR)])
def test_comment_that_keeps_a_stream_open_waits_for_nothing(outcome: Outcome, then: bytes) -> None:
    async def scenario(client: Client) -> None:
        answer = await client.chat(stream=True)
        assert answer.status_code == 200
        assert answer.content.startswith(b": keep-alive\n\n")
        assert (ERROR in answer.content) is (outcome == "refused")

    run(scenario, answer=[b": keep-alive\n\n", then, DONE], outcome=outcome)


@on(run, answer={"error": {"code": 500}}, status=500, outcome="failed", reason="error")
async def test_error_that_is_no_refusal_stays_vllms(client: Client) -> None:
    answer = await client.chat()
    assert (answer.status_code, answer.json()) == (500, {"error": {"code": 500}})


@on(run, answer=[ROLE, ERROR, DONE], outcome="failed", reason="error")
async def test_error_in_a_stream_that_is_no_refusal_stays_vllms(client: Client) -> None:
    assert (await client.chat(stream=True)).content == ROLE + ERROR + DONE


@on(run, config={"max_in_flight": 1})
async def test_a_client_that_leaves_takes_its_place_along(client: Client) -> None:
    client.vllm.hold = asyncio.Event()
    left = asyncio.create_task(client.chat())
    await client.arrived(1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    client.vllm.hold.set()
    assert (await client.chat()).status_code == 200
    state = (await client.http.get("/rubato/state")).json()
    assert state["in_flight"] == {}


@pytest.mark.parametrize("offered_late", [True, False])
@on(run, config={"tenants": TENANTS})
async def test_a_client_that_leaves_is_charged_what_was_made_for_it(client: Client, offered_late: bool) -> None:
    client.vllm.hold = asyncio.Event()
    client.vllm.silent = offered_late
    left = asyncio.create_task(client.chat("bulk-key", max_tokens=80))
    await client.arrived(1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    if offered_late:
        client.vllm._serve(client.vllm.went_in[0]["vllm_xargs"])
    client.reports.read()
    client.vllm.silent = False
    client.vllm.hold.set()
    answer = await client.chat("bulk-key", max_tokens=1)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "77"  # of 100: one of 10 and 4, 9 reserved
    assert client.metric("rubato_requests_finished_total", tier="flex", tenant="bulk", outcome="completed") == 2


@on(run, config={"tenants": TENANTS}, late=0.9)
async def test_a_request_that_goes_on_behind_its_response_keeps_its_place(client: Client) -> None:
    """`background` of /v1/responses, whose offer is not reported yet when vLLM answers."""
    client.vllm.unheard = 0.3
    assert (await client.chat("bulk-key", path="/v1/responses", background=True)).status_code == 200
    assert (await client.chat("bulk-key")).status_code == 429
    await asyncio.sleep(1.0)
    client.reports.read()
    answer = await client.chat("bulk-key", path="/v1/responses", background=True)
    assert answer.status_code == 200
    assert client._in_flight_of("bulk") == 1  # the second goes on, too


# ----------------------------------------------------------------- pages


@on(run, config={"tenants": TENANTS})
async def test_the_history_of_a_request_is_for_its_tenant(client: Client) -> None:
    await client.chat("acme-key")
    get = client.http.get
    for name in ("acme", "ops"):
        page = await get("/rubato/requests/chatcmpl-abc", headers={"authorization": f"Bearer {name}-key"})
        assert (page.json()["state"], page.json()["choices"][0]["output_tokens"]) == ("finished", 4)
    assert (await get("/rubato/requests/chatcmpl-abc", headers={"authorization": "Bearer bulk-key"})).status_code == 404
    assert (await get("/rubato/requests/chatcmpl-abc")).status_code == 401
    assert (await get("/rubato/state", headers={"authorization": "Bearer acme-key"})).status_code == 403
    assert (await get("/metrics")).status_code == 200  # vLLM's


@on(run)
async def test_the_state_of_the_engines(client: Client) -> None:
    rows = [("r", "running", 0, 1, 2, False, None), ("w", "waiting", 0, 5, 0, True, 3.0)]
    client.vllm.link.sent.append(
        EngineState(
            0, 0, {**STATE, "at": 0.0, "held": ["h"], "planned": [0.001], "batches": [(4, 2, 0.1)], "sequences": rows}
        )
    )
    deviations = {**STATE, "steps": 9, "deviations": {"kv": 2}, "given_up": True, "planned": [], "batches": []}
    deviations["drafted"] = {"accepted": 5, "rejected": 3}
    client.vllm.link.sent.append(EngineState(0, 0, deviations))
    (engine,) = (await client.http.get("/rubato/state")).json()["engines"]
    assert (engine["running"], engine["waiting"], engine["steps"], engine["policy"]) == (1, 1, 9, "edf")
    assert client.metric("rubato_plan_deviations_total", replica="0", cause="kv") == 2
    assert client.metric("rubato_given_up", replica="0") == 1
    assert client.metric("rubato_requests_held", replica="0") == 1
    assert client.metric("rubato_draft_tokens_total", outcome="accepted") == 5
    assert client.metric("rubato_draft_tokens_total", outcome="rejected") == 3
    assert client.metric("rubato_step_seqs_sum", replica="0") == 2
    assert client.metric("rubato_plan_seconds_count", replica="0") == 1


# ----------------------------------------------------------------- reports


def request(id: str, tier: str = "chat") -> Request:
    return Request(id, (Stage(1),), 0.0, tier=tier)


def test_requests_whose_end_was_lost_end_with_the_next_report_of_all() -> None:
    wire = Link()
    reports = EngineReports(wire, PluginMetrics(CollectorRegistry(), counts=True))  # type: ignore[arg-type]
    wire.tell(Offered(0.0, "a", request("a")), Offered(0.0, "b", request("b")))
    wire.tell(Offered(0.0, "d", request("d")), lost=2)
    wire.tell(Tokens(0.0, "never offered", 1))
    fields = {**STATE, "planned": [], "batches": [], "at": 1.0, "held": ["d"], "open": ["b", "d"]}
    wire.sent.append(EngineState(0, 0, {**fields, "sequences": [("b", "running", 0, 1, 1, False, None)]}))
    reports.read()
    value = reports.metrics.registry.get_sample_value
    assert value("rubato_reports_lost_total", {"replica": "0"}) == 2
    assert value("rubato_requests_finished_total", {"tier": "chat", "tenant": "default", "outcome": "failed"}) == 1
    (record,) = reports.requests.find("a")
    assert record.end is not None
    assert record.end.reason == END_NOT_REPORTED
    assert reports.requests.find("b")[0].end is None
    assert reports.requests.find("d")[0].end is None


def test_what_alerts_take_the_rate_of_begins_at_zero() -> None:
    wire = Link()
    reports = EngineReports(wire, PluginMetrics(CollectorRegistry(), counts=True))  # type: ignore[arg-type]
    reports.metrics.begin(["0"])
    wire.tell(Offered(0.0, "a", request("a")))
    reports.read()
    value = reports.metrics.registry.get_sample_value
    for place in ("plan", "observe", "completed", "report", "slow"):
        assert value("rubato_plan_faults_total", {"replica": "0", "place": place}) == 0
    failed = {"tier": "chat", "tenant": "default", "outcome": "failed"}
    assert value("rubato_requests_finished_total", failed) == 0


def test_two_thousand_names_are_a_hundred_labels() -> None:
    wire = Link()
    reports = EngineReports(wire, PluginMetrics(CollectorRegistry(), counts=True))  # type: ignore[arg-type]
    for i in range(2000):
        end = Finished(0.5, str(i), "completed", "length", Verdict(True, "deadline"), 4)
        wire.tell(Offered(0.0, str(i), request(str(i), f"tier-{i}")), end)
    reports.read()
    text = generate_latest(reports.metrics.registry).decode()
    lines = [line for line in text.splitlines() if line.startswith("rubato_requests_offered_total")]
    assert len(lines) == 101
    assert 'rubato_requests_offered_total{tenant="default",tier="other"} 1900.0' in lines


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("chatcmpl-9d5a5637b4f86717-0123abcd", "chatcmpl-9d5a5637b4f86717"),
        ("1_chatcmpl-my-own-id-0123abcd", "chatcmpl-my-own-id"),
        ("3_cmpl-8bba81538e900bea-1-0123abcd", "cmpl-8bba81538e900bea"),
        ("resp_8bba81538e900bea_0-0123abcd", "resp_8bba81538e900bea"),
        ("q0", "q0"),
    ],
)
def test_the_response_that_a_request_is_for(id: str, answer: str) -> None:
    assert answer_of(id) == answer


# ----------------------------------------------------------------- as vLLM 0.32 does it

EARLY = [f"event: response.{name}\ndata: {{}}\n\n".encode() for name in ("created", "in_progress")]
DELTA = b'event: response.output_text.delta\ndata: {"delta": "x"}\n\n'
MESSAGE = [b'event: message_start\ndata: {"type": "message_start"}\n\n', b"event: error\ndata: {}\n\n"]


@pytest.mark.parametrize(
    ("sent", "vllm"),
    [
        ({"stream": True}, {"early": EARLY, "breaks": True, "answer": []}),
        ({"stream": True, "background": True}, {"answer": EARLY}),  # vLLM asks its engine whether they are taken or not
        ({"background": True}, {"answer": {"id": "resp_1", "status": "queued"}}),
        ({"stream": True, "path": "/v1/messages"}, {"answer": MESSAGE}),
    ],
    ids=["stream", "background stream", "background", "messages"],
)
def test_refusal_of_responses_and_messages_is_a_429(sent: dict[str, Any], vllm: dict[str, Any]) -> None:
    async def scenario(client: Client) -> None:
        refused = await client.chat(**{"path": "/v1/responses", **sent})
        assert refused.status_code == 429
        assert refused.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
        assert client._in_flight_of("default") == 0

    run(scenario, outcome="refused", reason="rejected-slo-infeasible: a token takes 19 ms", **vllm)


@on(run, early=EARLY, answer=[DELTA])
async def test_stream_of_responses_that_is_not_refused_passes_unchanged(client: Client) -> None:
    assert (await client.chat(path="/v1/responses", stream=True)).content == b"".join([*EARLY, DELTA])
    client.vllm.breaks = True
    with pytest.raises(RuntimeError, match="already started"):  # vLLM's own fault stays its own
        await client.chat(path="/v1/responses", stream=True)


@on(run, config={"tenants": TENANTS})
async def test_background_request_that_vllm_does_not_take_gives_its_place_back(client: Client) -> None:
    answer = await client.chat("bulk-key", path="/v1/responses", background=True, temperature=-1)
    assert answer.status_code == 400
    assert (await client.chat("bulk-key")).status_code == 200
