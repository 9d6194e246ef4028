"""The load generator against a small scripted server: outcomes, time counted from the schedule, loud failure."""

import asyncio
import contextlib
import dataclasses
import time

import orjson
import pytest
from aiohttp import web

from rubato.core.request import SLO
from rubato.measure import load_generator
from rubato.measure.http_client import BenchError, Endpoint, ServerModels, list_models
from rubato.workloads import Arrival, Workload

PATIENT = 60.0  # a bound on the client's lateness that no busy test machine exceeds


def load(*scripts, gap=0.01, tokens=4, slo=None):
    """One request per script, whose prompt is the script's name, `gap` seconds apart."""
    arrivals = tuple(
        Arrival(f"r{i}", i * gap, "chat", "chat", 3, tokens, (("user", script),)) for i, script in enumerate(scripts)
    )
    slo = slo or SLO(ttft=30.0, tpot=30.0)
    return Workload("scripted", 0, 1 / gap, len(scripts) * gap, {"chat": slo}, arrivals)


class Scripted:
    """A server whose answer is chosen by the prompt. `bodies`: what it was sent; `arrived` counts requests."""

    def __init__(self):
        self.owner = ""
        self.version = ""
        self.key = None
        self.headers = {}
        self.bodies = []
        self.sessions = []
        self.arrived = 0
        self.gate = asyncio.Event()
        self.opens_at = 0  # the gate opens when this many requests have arrived

    async def models(self, request):
        self.headers = dict(request.headers)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        headers = {"x-rubato-version": self.version} if self.version else {}
        return web.json_response({"data": [{"id": "tiny", "owned_by": self.owner}]}, headers=headers)

    async def completions(self, request):
        """A text completion: the good script, said in its chunks' words."""
        self.bodies.append(orjson.loads(await request.read()))
        response = await begin(request)
        for i in range(self.bodies[-1]["max_tokens"]):
            await response.write(b'data: {"choices":[{"text":"w%d ","finish_reason":null}]}\n\n' % i)
        await response.write(b'data: {"choices":[{"text":"","finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
        return response

    async def chat(self, request):
        body = orjson.loads(await request.read())
        script = body["messages"][-1]["content"]
        if script not in SCRIPTS:
            script = "good"  # a warm-up
        else:
            self.bodies.append(body)
            self.sessions.append(request.headers.get("x-session-id"))
            self.arrived += 1
            if self.arrived == self.opens_at:
                self.gate.set()
        return await SCRIPTS[script](self, request, body)


async def begin(request):
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    return response


async def event(response, text=None, tokens=None, finish=None, **more):
    chunk = {"choices": [], **more}
    if text is not None or finish is not None:
        chunk["choices"] = [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]
    if tokens is not None:
        chunk["usage"] = {"prompt_tokens": 11, "completion_tokens": tokens}
    await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")


async def good(server, request, body):
    response = await begin(request)
    await event(response, "", tokens=0)  # the role, as vLLM sends it
    for i in range(body["max_tokens"]):
        await event(response, f"w{i} ", tokens=i + 1)
    await event(response, finish="length", tokens=body["max_tokens"])
    await event(response, tokens=body["max_tokens"], rubato={"served": "slo", "met": True})
    await response.write(b"data: [DONE]\n\n")
    return response


async def in_lumps(server, request, body):
    """Several tokens per chunk, an empty chunk that brings a token, CRLF, and chunks torn apart on the wire."""
    response = await begin(request)
    lines = b""
    for text, total in (("one two", 2), ("", 3), ("three four five", 6)):
        chunk = {"choices": [{"delta": {"content": text}}], "usage": {"prompt_tokens": 11, "completion_tokens": total}}
        lines += b"data: " + orjson.dumps(chunk) + b"\r\n\r\n"
    lines += b': a comment\n\ndata:{"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    for at in range(0, len(lines), 23):
        await response.write(lines[at : at + 23])
        await asyncio.sleep(0)
    return response


async def without_usage(server, request, body):
    response = await begin(request)
    for text in ("", "a", "b", "", "c"):
        await event(response, text)
    await event(response, finish="stop")
    return response


async def usage_at_the_end(server, request, body):
    """Four chunks, ten tokens: a server that knows include_usage but not usage with each chunk."""
    response = await begin(request)
    for text in ("a", "bc", "def", "g"):
        await event(response, text)
    await event(response, finish="length")
    await event(response, tokens=10)
    return response


async def null_usage(server, request, body):
    """Usage with each chunk that counts nothing before the end."""
    response = await begin(request)
    for text, total in (("a", None), ("b", None), ("", 2)):
        chunk = {"choices": [{"delta": {"content": text}}], "usage": {"prompt_tokens": 3, "completion_tokens": total}}
        await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
    await event(response, finish="stop")
    return response


async def another_shape(server, request, body):
    response = await begin(request)
    await response.write(b'data: {"choices": [7]}\n\n')
    return response


async def demoted(server, request, body):
    response = await begin(request)
    await event(response, "x", tokens=1)
    await event(response, finish="length", tokens=1)
    await event(response, rubato={"served": "best_effort", "met": False}, tokens=1)
    return response


async def refused(server, request, body):
    error = {"error": {"message": "no room", "code": "rejected-saturated"}}
    return web.json_response(error, status=429, headers={"x-rubato-reject-reason": "rejected-slo-infeasible"})


async def refused_elsewhere(server, request, body):
    return web.json_response({"error": {"message": "slow down", "code": None}}, status=429)


async def broken(server, request, body):
    return web.json_response({"error": {"message": "kaboom"}}, status=500)


async def not_json(server, request, body):
    return web.Response(status=502, text="<html>Bad gateway</html>")


async def invalid(server, request, body):
    return web.json_response({"error": {"message": "max_tokens: too large", "param": "max_tokens"}}, status=400)


async def disconnects(server, request, body):
    response = await begin(request)
    await event(response, "a", tokens=1)
    request.transport.close()
    return response


async def stops_short(server, request, body):
    response = await begin(request)
    await event(response, "a", tokens=1)
    return response


async def fails_midway(server, request, body):
    response = await begin(request)
    await event(response, "a", tokens=1)
    await event(response, error={"message": "the engine failed", "code": 500})
    return response


async def garbles(server, request, body):
    response = await begin(request)
    await response.write(b"data: {oops\n\n")
    return response


async def empty(server, request, body):
    response = await begin(request)
    await event(response, finish="stop", tokens=0)
    return response


async def hangs(server, request, body):
    response = await begin(request)
    await event(response, "a", tokens=1)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(30)
    return response


async def waits_for_all(server, request, body):
    await server.gate.wait()
    return await good(server, request, body)


async def blocks(server, request, body):
    time.sleep(0.4)  # noqa: ASYNC251 - what a client starved of CPU looks like
    return await good(server, request, body)


SCRIPTS = {
    f.__name__: f
    for f in (
        good, in_lumps, without_usage, usage_at_the_end, null_usage, another_shape, demoted, refused,
        refused_elsewhere, broken, not_json, invalid, disconnects, stops_short, fails_midway, garbles, empty, hangs,
        waits_for_all, blocks,
    )
}  # fmt: skip


def offer(workload, *, opens_at=0, key=None, model=None, suffix="", fields=None, **options):
    """Run the workload against a scripted server (of its own first model); the run and the server. fields: others of
    the `Endpoint`."""

    async def main():
        server = Scripted()
        server.opens_at, server.key = opens_at, key
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/chat/completions", server.chat)
        app.router.add_post("/v1/completions", server.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            arguments = {"progress": False, "warmup": 1, "max_delay": PATIENT} | options
            url = f"http://127.0.0.1:{port}{suffix}"
            target = Endpoint(url, model or "tiny", **(fields or {}))
            return await load_generator.run(workload, target, **arguments), server
        finally:
            await runner.cleanup()

    return asyncio.run(main())


OUTCOMES = [
    ("good", "completed", 4, ""),
    ("in_lumps", "completed", 6, ""),
    ("without_usage", "completed", 3, ""),
    ("usage_at_the_end", "completed", 10, ""),
    ("null_usage", "completed", 2, ""),
    ("another_shape", "failed", 0, "the stream holds an event of another shape"),
    ("demoted", "completed", 1, ""),
    ("refused", "refused", 0, "rejected-slo-infeasible"),
    ("refused_elsewhere", "refused", 0, "slow down"),
    ("broken", "failed", 0, "HTTP 500: kaboom"),
    ("not_json", "failed", 0, "HTTP 502: <html>Bad gateway</html>"),
    ("invalid", "failed", 0, "HTTP 400: max_tokens: too large"),
    ("disconnects", "failed", 1, "connection: "),
    ("stops_short", "failed", 1, "the stream ended after 1 tokens without a finish reason"),
    ("fails_midway", "failed", 1, "error in the stream: the engine failed"),
    ("garbles", "failed", 0, "the stream holds an event that is not JSON"),
    ("empty", "failed", 0, "completed without a single token"),
    ("hangs", "failed", 1, "timeout"),
]


@pytest.fixture(scope="module")
def outcomes():
    run, server = offer(load(*(script for script, *_ in OUTCOMES)), timeout=2.0)
    return {script: record for (script, *_), record in zip(OUTCOMES, run.records, strict=True)}, run, server


@pytest.mark.parametrize(("script", "outcome", "output", "reason"), OUTCOMES)
def test_every_fate_is_recorded(outcomes, script, outcome, output, reason):
    record = outcomes[0][script]
    assert (record.outcome, record.output) == (outcome, output)
    assert record.reason.startswith(reason)
    assert record.verdict.met == (outcome == "completed")
    assert record.verdict.cause == (None if outcome == "completed" else outcome)


def test_tokens_are_counted_by_usage_and_else_by_chunks(outcomes):
    records, run, _ = outcomes
    assert (records["good"].tokens[-1], records["good"].counted) == (4, True)
    assert (records["in_lumps"].tokens[-1], records["in_lumps"].counted) == (6, True)
    assert (records["without_usage"].tokens[-1], records["without_usage"].counted) == (3, False)
    assert records["good"].prompt_tokens == 11
    assert any("1 responses had no usage: one token" in note for note in run.notes)
    assert (records["usage_at_the_end"].tokens, records["usage_at_the_end"].counted) == ((1, 4, 7, 10), False)
    assert any("1 responses had usage at the end only" in note for note in run.notes)
    assert any("5 completed requests have another output length" in note for note in run.notes)


def test_the_servers_own_word_is_kept(outcomes):
    records, *_ = outcomes
    assert records["good"].server == {"served": "slo", "met": True}
    assert not records["good"].best_effort
    assert records["demoted"].best_effort


def test_timelines_ascend_and_count_from_the_schedule(outcomes):
    records, *_ = outcomes
    for record in records.values():
        assert len(record.times) == len(record.tokens)
        assert list(record.times) == sorted(record.times)
        assert list(record.tokens) == sorted(set(record.tokens))
        assert record.sent >= record.at - 1e-3
        if record.times:
            assert record.verdict.ttft == pytest.approx(record.times[0] - record.at)


@pytest.mark.parametrize(
    ("tier_field", "stated"),
    [
        ("slo", {"slo": {"ttft_ms": 500.0, "tpot_ms": 80.0, "e2e_ms": 9000.0}, "service_tier": "chat"}),
        ("body", {"slo": {"ttft_ms": 500.0, "tpot_ms": 80.0, "e2e_ms": 9000.0}}),
        ("tier", {"service_tier": "chat"}),
        ("none", {}),
        (
            "vllm-xargs",
            {"vllm_xargs": {"slo_ttft_ms": 500.0, "slo_tpot_ms": 80.0, "slo_e2e_ms": 9000.0, "slo_tier": "chat"}},
        ),
    ],
)
def test_the_body_says_what_the_server_must_know(tier_field, stated):
    slo = SLO(ttft=0.5, tpot=0.08, e2e=9.0)
    fields = {"tier_field": tier_field, "extra": {"top_k": 5}}
    _, server = offer(load("good", tokens=7, slo=slo), fields=fields, suffix="/v1/")
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "good"}],
            "max_tokens": 7,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "top_k": 5,
            **stated,
        }
    ]


def test_a_tiers_priority_is_its_place_among_the_tiers():
    fields = {"tier_field": "priority", "order": ("strict", "chat"), "ignore_eos": False}
    _, server = offer(load("good", tokens=7), fields=fields)
    assert server.bodies[0]["priority"] == 1
    assert not {"slo", "service_tier", "vllm_xargs"} & server.bodies[0].keys()
    with pytest.raises(BenchError, match="tier 'chat' has no priority: name it in `order`, which has strict"):
        offer(load("good", tokens=7), fields={"tier_field": "priority", "order": ("strict",)})


def test_a_server_that_is_not_known_gets_standard_fields_only():
    fields = {"tier_field": "none", "ignore_eos": False, "continuous_usage": False}
    _, server = offer(load("good", tokens=7), fields=fields)
    assert server.bodies == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "good"}],
            "max_tokens": 7,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_text_completions_are_counted_by_their_chunks():
    fields = {"endpoint": "completions", "tier_field": "none"}
    run, server = offer(load("good", tokens=5), fields=fields, warmup=0)
    assert server.bodies[0]["prompt"] == "good"
    assert "messages" not in server.bodies[0]
    assert (run.records[0].outcome, run.records[0].tokens[-1], run.records[0].counted) == ("completed", 5, False)


def test_keys_and_headers_are_sent_and_not_kept():
    run, server = offer(load("good"), key="s3cret", fields={"api_key": "s3cret", "headers": {"x-team": "blue"}})
    assert server.headers["x-team"] == "blue"
    assert run.settings["headers"] == ["x-team"]
    assert "s3cret" not in str(run.settings)
    with pytest.raises(BenchError, match="HTTP 401: give a valid --api-key"):
        offer(load("good"), key="s3cret", fields={"api_key": "wrong"})


def test_what_a_server_is_follows_from_its_list_of_models():
    ours = ServerModels(("m",), "rubato", "0.1.0")
    assert (ours.knows_slos, ours.fixed_lengths) == (True, True)
    assert (ServerModels(("m",), "vllm").knows_slos, ServerModels(("m",), "vllm").fixed_lengths) == (False, True)
    assert (ServerModels(("m",), "openai").knows_slos, ServerModels(None).fixed_lengths) == (False, False)
    assert ServerModels(("m", "n")).first("http://h") == "m"
    with pytest.raises(BenchError, match="http://h/v1 lists no models"):
        ServerModels(None).first("http://h")


def test_requests_are_sent_on_time_to_a_server_that_answers_none_and_latency_counts_from_the_schedule():
    """The server answers nobody until all ten have arrived. A closed loop would wait for ever; a client that counts
    from when it could send would report short latencies."""
    workload = load(*["waits_for_all"] * 10, gap=0.05, slo=SLO(ttft=0.2))
    run, server = offer(workload, opens_at=10, timeout=20.0)
    assert server.arrived == 10
    last = workload.arrivals[-1].at
    for record in run.records:
        assert record.outcome == "completed"
        assert record.verdict.ttft >= last - record.at - 1e-3
    assert [r.verdict.met for r in run.records][:5] == [False] * 5  # at least 0.25 s late for a TTFT of 0.2 s


def test_a_closed_loop_keeps_its_concurrency_in_flight_and_latency_counts_from_the_offer():
    """The server answers none of the first three until all three are there: fewer in flight would wait for ever."""
    closed = dataclasses.replace(load(*["waits_for_all"] * 3, *["good"] * 4, gap=0.0001), concurrency=3)
    run, server = offer(closed, opens_at=3, timeout=20.0)
    assert server.arrived == 7
    assert {r.outcome for r in run.records} == {"completed"}
    offered = [r.at for r in run.records]
    ends = [r.at + r.verdict.e2e for r in run.records]
    assert min(offered[3:]) >= min(ends[:3])
    assert all(sum(a <= at < b for a, b in zip(offered, ends, strict=True)) <= 3 for at in offered)
    assert run.seconds >= max(ends)
    assert all(r.sent >= r.at for r in run.records)


def test_a_turn_is_sent_so_long_after_the_one_before_and_never_after_one_that_failed():
    first = load("good", "good", "broken", "good", "good")
    follows = {"r1": ("r0", 0.05), "r3": ("r2", 0.0), "r4": ("r3", 0.0)}
    turns = [dataclasses.replace(a, after=b, gap=g) for a in first.arrivals for b, g in [follows.get(a.id, ("", 0.0))]]
    run, server = offer(dataclasses.replace(first, arrivals=tuple(turns)))
    assert server.arrived == 3
    one, two, _, *never = run.records
    assert two.at >= one.times[-1] + 0.05
    assert two.verdict.ttft == pytest.approx(two.times[0] - two.at)
    assert {(r.outcome, r.reason, r.sent) for r in never} == {("failed", "not offered: an earlier turn failed", None)}


def test_a_server_is_told_the_session_and_what_remains_of_it():
    one, two = load("good", "good", gap=0.0001, slo=SLO(tpot=30.0)).arrivals
    turns = (
        dataclasses.replace(one, session="s", session_e2e=50.0),
        dataclasses.replace(two, session="s", after="r0", gap=0.1),
    )
    run, server = offer(Workload("w", 0, 1.0, 1.0, {"chat": SLO(tpot=30.0)}, turns))
    (first, second), (a, b) = [body["slo"] for body in server.bodies], run.records
    assert first == {"tpot_ms": 30000.0, "e2e_ms": 50000.0}
    assert second["e2e_ms"] == pytest.approx(1e3 * (50.0 - (b.at - a.at)))
    assert server.sessions == ["s", "s"]
    assert all(r.verdict.met for r in run.records)
    late, _ = offer(
        Workload("w", 0, 1.0, 1.0, {"chat": SLO()}, (dataclasses.replace(turns[0], session_e2e=0.05), turns[1]))
    )
    assert late.records[1].verdict.met is False  # it comes when the session's time is over


def test_a_client_that_cannot_keep_its_schedule_says_so():
    run, _ = offer(load("blocks", *["good"] * 40, gap=0.01), max_delay=0.05)
    assert not run.valid
    assert any("requests were sent late" in problem for problem in run.problems)
    assert all("could not keep its schedule" in problem for problem in run.problems)
    assert run.client.send_delay_max > 0.1
    calm, _ = offer(load("blocks", *["good"] * 40, gap=0.01), max_delay=PATIENT)
    assert calm.valid


def test_a_stall_between_requests_shows_in_the_lag_of_the_loop():
    run, _ = offer(load("blocks", gap=0.01), max_delay=0.05)
    assert run.client.send_delay_p99 < run.client.lag_p99
    assert any("event loop lagged" in problem for problem in run.problems)


def test_the_bound_follows_the_tightest_ttft():
    def bound(*ttfts):
        arrival = Arrival("a", 0.0, "0", "", 1, 1)
        return load_generator.delay_bound(
            Workload("w", 0, 1.0, 1.0, {str(i): SLO(t) for i, t in enumerate(ttfts)}, (arrival,))
        )

    assert bound(3.0, 8.0) == 0.05
    assert bound(0.4, 8.0) == pytest.approx(0.02)
    assert bound(0.05) == 0.01
    assert bound(None) == 0.05


def test_a_run_that_cannot_begin_says_why():
    with pytest.raises(BenchError, match="has no model 'large': it has 'tiny'"):
        offer(load("good"), model="large")
    with pytest.raises(BenchError, match="no OpenAI-compatible server"):
        asyncio.run(load_generator.run(load("good"), Endpoint("http://127.0.0.1:1", "tiny"), progress=False))
    with pytest.raises(BenchError, match="no OpenAI-compatible server"):
        asyncio.run(list_models("http://127.0.0.1:1"))
    bare = Workload("bare", 0, 1.0, 1.0, {"t": SLO()}, (Arrival("a", 0.0, "t", "", 5, 5),))
    with pytest.raises(BenchError, match="no prompt text: make some"):
        asyncio.run(load_generator.run(bare, Endpoint("http://127.0.0.1:1", "tiny"), progress=False))


def test_a_server_that_vanishes_is_a_problem_of_the_whole_run():
    async def main():
        workload = load("good", "good")
        return await load_generator.run(
            workload, Endpoint("http://127.0.0.1:1", "tiny"), progress=False, max_delay=PATIENT
        )

    async def ready(*arguments):
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_generator, "_prepare", ready)
        run = asyncio.run(main())
    assert [r.outcome for r in run.records] == ["failed", "failed"]
    assert any("no request got an answer over HTTP" in problem for problem in run.problems)
