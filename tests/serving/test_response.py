"""What a client gets for a good request: exact text, counts, times and verdicts, streamed and not."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest

from rubato.core.events import Demoted, Finished, Offered, Started, Tokens, Verdict
from rubato.core.length_prediction import RunningMean
from rubato.core.plan import Batch, Limits, StepResult
from rubato.core.request import SLO, Request, Sampling
from rubato.engines.simulated import Engine
from rubato.fleet.cluster import retry_after
from rubato.frontdoor.errors import from_finished
from rubato.frontdoor.slo_fields import Tier, Tiers
from tests.kit import on
from tests.kit.apps import STEP, Edge, Failing, edge

GOLD = Tiers(
    [Tier("gold", SLO(0.25, 0.15), "refuse"), Tier("late", SLO(ttft=0.05)), Tier("never", SLO(ttft=0.001), "refuse")]
)


def events(body: str) -> list[Any]:
    """The data of each server-sent event; the last, [DONE], as that string."""
    pieces = body.split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") for piece in pieces)
    return [piece[6:] if piece == "data: [DONE]" else json.loads(piece[6:]) for piece in pieces]


def usage(prompt: int, output: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {**counts, "prompt_tokens_details": {"cached_tokens": 0}}


def text_of(chunks: Iterable[Any]) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@on(edge, tiers=GOLD)
async def test_whole_chat_has_openais_fields_and_a_verdict(at: Edge) -> None:
    answer = await at.chat(service_tier="gold")
    body = answer.json()
    assert answer.status_code == 200
    assert answer.headers["x-rubato-tier"] == "gold"
    assert answer.headers["x-request-id"] == body["id"] == at.events[0].id
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "la ti do ", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == usage(20, 3)
    assert body["service_tier"] == "gold"
    assert body["rubato"] == {
        "tier": "gold",
        "served": "slo",
        "ttft_ms": pytest.approx(1e3 * STEP),
        "tpot_ms": pytest.approx(1e3 * STEP),
        "e2e_ms": pytest.approx(3e3 * STEP),
        "targets": {"ttft_ms": 250.0, "tpot_ms": 150.0, "e2e_ms": None},
        "met": True,
        "cause": None,
        "max_pause_ms": pytest.approx(1e3 * STEP),
        "margin_ms": pytest.approx(150.0),
        "slo_rule": "deadline",
    }


@on(edge)
async def test_the_documentation_knows_the_bodies(at: Edge) -> None:
    document = (await at.http.get("/openapi.json")).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "slo", "service_tier"} <= set(body["properties"])
    references = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
    assert {"SLOBody", "Message"} <= references <= set(document["components"]["schemas"])
    assert json.dumps(document).count("$ref") == json.dumps(document).count('"#/components/schemas/')


@on(edge)
async def test_a_whole_completion_of_token_ids(at: Edge) -> None:
    answer = (await at.complete(prompt=[1, 2, 3])).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "la ti do ", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == usage(3, 3)
    offered = at.events[0]
    assert isinstance(offered, Offered)
    assert offered.request.stages[0].token_ids == (1, 2, 3)


@on(edge)
async def test_parameters_reach_the_engine(at: Edge) -> None:
    await at.chat(
        temperature=0, top_p=0.5, top_k=7, seed=-1, stop="x", ignore_eos=True, user="me", max_completion_tokens=2
    )
    await at.chat(top_k=-1, stop=["a", "b"], slo={"on_decline": "refuse"})
    await at.complete(max_tokens=None)
    first, second, third = (e.request for e in at.events if isinstance(e, Offered))
    s = first.sampling
    assert (s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos) == (0.0, 0.5, 7, -1, ("x",), True)
    assert (s.max_tokens, first.on_decline) == (2, "best_effort")
    s = second.sampling
    assert (s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos) == (1, 1, 0, None, ("a", "b"), False)
    assert second.on_decline == "refuse"
    assert third.sampling.max_tokens == 256 - 3  # null, unlike a field that is left out: up to the context


@on(edge)
async def test_further_sampling_fields_reach_the_engine(at: Edge) -> None:
    fields = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -1, "repetition_penalty": 1.2}
    await at.chat(**fields, stop_token_ids=[7, 8], logprobs=True, top_logprobs=2)
    await at.complete(**fields, logprobs=0)
    await at.chat(logprobs=False, top_logprobs=0)
    first, second, third = (e.request.sampling for e in at.events if isinstance(e, Offered))
    for s in (first, second):
        assert (s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.1, 0.5, -1, 1.2)
    assert (first.stop_ids, first.logprobs, second.stop_ids, second.logprobs) == ((7, 8), 2, (), 0)
    assert third == Sampling(max_tokens=3, temperature=1.0)


@on(edge)
async def test_messages_as_clients_write_them(at: Edge) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    silent = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    answer = await at.chat(messages=[{"role": "user", "content": parts}, silent, {"role": "user", "content": "?"}])
    assert answer.json()["usage"]["prompt_tokens"] == len(b"user: hi\nassistant: \nuser: ?\nassistant: ")


@on(edge)
async def test_a_completion_has_16_tokens_and_a_chat_the_context_unless_told(at: Edge) -> None:
    text = await at.http.post("/v1/completions", json={"model": "simulated", "prompt": "abc"})
    assert text.json()["usage"]["completion_tokens"] == 16
    chat = await at.chat(max_tokens=None)
    assert chat.json()["usage"] == usage(20, 236)
    little_room = await at.http.post("/v1/completions", json={"model": "simulated", "prompt": "x" * 250})
    assert little_room.json()["usage"] == usage(250, 6)  # the 16 were nobody's wish


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_a_stream_says_the_same_as_the_whole(at: Edge, endpoint: str) -> None:
    whole = (await getattr(at, endpoint)()).json()
    answer = await getattr(at, endpoint)(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    choice = whole["choices"][0]
    assert text_of(chunks) == (choice["text"] if endpoint == "complete" else choice["message"]["content"])
    assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "length"]
    assert {c["id"] for c in chunks} == {answer.headers["x-request-id"]}
    assert all("usage" not in c for c in chunks)
    assert ["rubato" in c for c in chunks] == ["service_tier" in c for c in chunks]
    assert [c for c in chunks if "rubato" in c] == [chunks[-1]]
    assert chunks[-1]["rubato"] == whole["rubato"]
    if endpoint == "chat":
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_stream_ends_with_usage_where_it_is_asked_for(at: Edge, endpoint: str) -> None:
    answer = await getattr(at, endpoint)(stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = events(answer.text)
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["rubato"]["met"] is True
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await getattr(at, endpoint)(stream=True, stream_options=options)
    *chunks, _ = events(answer.text)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == ([0] if endpoint == "chat" else []) + [1, 2, 3, 3, 3]
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + n for c, n in zip(chunks, counts, strict=True)
    )


def test_text_that_json_and_sse_could_break() -> None:
    awkward = 'a "quote"\n\ndata: [DONE]\r\n\\ \u2028 é 😀\x00'

    class Awkward(Engine):
        async def execute(self, batch: Batch) -> StepResult:
            from dataclasses import replace

            result = await super().execute(batch)
            return replace(result, emitted={id: e._replace(text=awkward) for id, e in result.emitted.items()})

    async def scenario(at: Edge) -> None:
        assert text_of(events((await at.chat(stream=True)).text)) == 3 * awkward
        assert (await at.complete()).json()["choices"][0]["text"] == 3 * awkward

    edge(scenario, engine=Awkward)


@on(edge)
async def test_a_stage_that_ends_appears_in_the_targets(at: Edge) -> None:
    slo = {"ttft_ms": 500, "stages": [{"until": "</think>", "tpot_ms": 200}, {"tpot_ms": 300}]}
    targets = (await at.chat(slo=slo)).json()["rubato"]["targets"]
    assert targets["stages"] == [
        {"until": "</think>", "ttft_ms": 500.0, "tpot_ms": 200.0, "e2e_ms": None},
        {"until": "eos", "ttft_ms": None, "tpot_ms": 300.0, "e2e_ms": None},
    ]


@on(edge, tiers=GOLD)
async def test_a_demoted_request_is_told_so(at: Edge) -> None:
    whole = await at.chat(service_tier="late")
    assert whole.headers["x-rubato-tier"] == whole.json()["service_tier"] == "flex"
    report = whole.json()["rubato"]
    assert (report["tier"], report["served"], report["met"]) == ("late", "best_effort", False)
    assert report["margin_ms"] == pytest.approx(-50.0)
    *_, last, _ = events((await at.complete(service_tier="late", stream=True)).text)
    assert (last["service_tier"], last["rubato"]["served"]) == ("flex", "best_effort")
    assert sum(isinstance(e, Demoted) for e in at.events) == 2


# --------------------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@on(edge, tiers=GOLD)
async def test_a_policy_may_refuse_after_placing_and_it_is_still_a_429(at: Edge, stream: bool, n: int) -> None:
    answer = await at.chat(service_tier="never", stream=stream, n=n)
    assert at.cluster.offered == at.cluster.finished == n
    assert answer.status_code == 429
    assert answer.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
    assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)
    error = answer.json()["error"]
    assert error["code"] == "rejected-slo-infeasible"
    assert error["message"].endswith(": the prompt of 20 tokens takes 100 ms here alone; asked 1 ms.")


@on(edge, lengths=RunningMean())
async def test_an_e2e_that_cannot_be_met_is_refused_as_soon_as_its_length_is_known(at: Edge) -> None:
    """A step takes 100 ms, whatever is in it, so 100 tokens take 10 s. The first is served, for it might have been
    short; its length tells of the others."""
    slo = {"e2e_ms": 1000, "on_decline": "refuse"}

    async def error(**body: Any) -> str:
        answer = await at.chat(slo=slo, **body)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
        return str(answer.json()["error"]["message"])

    whole = "and 100 of output take 10000 ms here alone; asked 1000 ms."
    # one id in so many is not judged by its predicted length
    with mock.patch("rubato.policy_kit.refusals.UNPREDICTED_ONE_IN", 1 << 40):
        assert whole in await error(max_tokens=100, ignore_eos=True)
        first = (await at.chat(slo=slo, max_tokens=100)).json()
        assert first["usage"]["completion_tokens"] == 100
        assert (first["rubato"]["met"], first["rubato"]["cause"]) == (False, "infeasible")
        assert whole in await error(max_tokens=100)
        assert (await at.chat(slo=slo, max_tokens=9)).json()["rubato"]["met"]  # no more than it may have
        slo["e2e_ms"] = 60
        assert "of prompt take 100 ms here alone; asked 60 ms." in await error(max_tokens=1)


@on(edge)
async def test_a_miss_is_infeasible_where_it_would_miss_alone_and_never_for_the_queue(at: Edge) -> None:
    """A step takes 100 ms: a TPOT of 40 ms is kept by as many tokens as its TTFT makes up for."""

    async def ended(tokens: int, tpot: int) -> tuple[bool, str | None]:
        told = (await at.chat(slo={"ttft_ms": 1000, "tpot_ms": tpot}, max_tokens=tokens)).json()["rubato"]
        return told["met"], told["cause"]

    assert await ended(100, 40) == (False, "infeasible")
    assert await ended(15, 40) == (True, None)  # the 15th comes at 1.5 s, and is due at 1.56
    assert await asyncio.gather(ended(100, 40), ended(100, 40)) == [(False, "infeasible")] * 2
    assert {e.verdict.cause for e in at.events if isinstance(e, Finished)} == {"infeasible", None}


def test_retry_after_is_when_half_of_what_is_in_flight_will_have_finished() -> None:
    """A request a second ended lately, 20 are in flight; at a faster rate, or with fewer, a second is the least."""
    cases = (([3.0, 4.0, 5.0], 20, 10.0), ([3.0, 3.1], 20, 1.0), ([3.0, 7.0], 6, 12.0), ([3.0], 20, 1.0))
    for ends, in_flight, seconds in cases:
        assert retry_after(ends, in_flight) == pytest.approx(seconds)


@on(edge)
async def test_retry_after_says_nothing_of_how_long_a_server_was_idle(at: Edge) -> None:
    for _ in range(3):
        await at.chat(max_tokens=2)
        await asyncio.sleep(3600.0)
    running = [asyncio.create_task(at.chat(max_tokens=10)) for _ in range(8)]
    await asyncio.sleep(0.01)
    assert at.cluster.retry_after() <= 10.0
    await asyncio.gather(*running)


@on(edge)
async def test_a_draining_server_refuses_and_finishes_what_runs(at: Edge) -> None:
    running = asyncio.create_task(at.chat(max_tokens=10))
    await at.clock.sleep_until(2.5 * STEP, 0)
    drained = asyncio.create_task(at.cluster.drain())
    await asyncio.sleep(0)
    at.app.state.is_draining = True
    late = await at.chat()
    assert (late.status_code, late.headers["x-rubato-reject-reason"]) == (503, "rejected-shutting-down")
    assert (late.headers["retry-after"], late.json()["error"]["code"]) == ("1", "rejected-shutting-down")
    assert (await at.http.get("/health")).status_code == (await at.http.head("/health")).status_code == 503
    assert (await running).json()["usage"]["completion_tokens"] == 10
    await drained
    assert at.cluster.offered == at.cluster.finished == 2


class Unwilling(Engine):
    def add(self, request: Request) -> None:
        raise ValueError("token id 99999 is not in the vocabulary")


@on(edge, engine=Unwilling)
async def test_what_the_engine_will_never_run_is_bad_input(at: Edge) -> None:
    for stream in (False, True):
        answer = await at.complete(prompt=[99999], stream=stream)
        assert (answer.status_code, "99999" in answer.json()["error"]["message"]) == (400, True)


@on(edge, engine=Failing)
async def test_failed_step_ends_every_request_and_the_server_goes_on(at: Edge) -> None:
    whole, stream = await asyncio.gather(at.chat(), at.chat(stream=True))
    assert whole.status_code == 500
    assert whole.json()["error"]["type"] == "server_error"
    assert "cosmic ray" in whole.json()["error"]["message"]
    assert stream.status_code == 200  # two tokens were out
    *chunks, last = events(stream.text)
    assert text_of(chunks) == "la ti "
    assert "cosmic ray" in last["error"]["message"]
    assert (await at.chat()).status_code == 200
    assert [e.outcome for e in at.events if isinstance(e, Finished)] == ["failed", "failed", "completed"]


class Dead(Engine):
    async def execute(self, batch: Batch) -> StepResult:
        raise RuntimeError("no device")


@on(edge, engine=Dead)
async def test_an_engine_beyond_recovery_shows_in_health(at: Edge) -> None:
    for _ in range(3):
        assert (await at.http.get("/health")).status_code == (await at.http.head("/health")).status_code == 200
        assert (await at.chat()).status_code == 500
    for path in ("/health", "/ready"):
        health = await at.http.get(path)
        assert (health.status_code, health.json()["status"]) == (503, "dead")
    assert at.cluster.dead.is_set()


# --------------------------------------------------------------------------- clients that go away


class Client:
    """A bare ASGI client that can go away, and be slow."""

    def __init__(self, at: Edge, **body: Any) -> None:
        if "prompt" not in body:
            body["messages"] = [{"role": "user", "content": "hi"}]
        self.raw = json.dumps({"model": "simulated", "max_tokens": 50, **body}).encode()
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.slow: asyncio.Event | None = None
        self.given = False
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                 "headers": [], "http_version": "1.1", "scheme": "http", "server": None, "client": None}  # fmt: skip
        self.task = asyncio.create_task(at.app(scope, self.receive, self.send))

    async def receive(self) -> dict[str, Any]:
        if not self.given:
            self.given = True
            return {"type": "http.request", "body": self.raw, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.slow is not None:
            await self.slow.wait()
        self.sent.append(message)

    @property
    def body(self) -> str:
        return b"".join(m.get("body", b"") for m in self.sent).decode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "outputs"), [({}, [4]), ({"n": 3}, [4, 3, 3]), ({"prompt": ["a", "bb", "ccc"], "n": 2}, [4] * 6)]
)
@on(edge)
async def test_a_client_that_goes_away_takes_its_requests_with_it(
    at: Edge, body: dict[str, Any], outputs: list[int], stream: bool
) -> None:
    client = Client(at, stream=stream, **body)
    await at.clock.sleep_until(4.5 * STEP, 0)
    assert at.cluster.in_flight == len(outputs)
    client.gone.set()
    await client.task
    assert at.clock.now() == pytest.approx(4.5 * STEP)  # no step, no timer in between
    assert at.cluster.in_flight == 0
    ended = [(e.outcome, e.reason, e.output, e.at) for e in at.events if isinstance(e, Finished)]
    assert sorted(ended, reverse=True) == [
        ("cancelled", "client disconnected", output, at.clock.now()) for output in outputs
    ]
    await at.clock.sleep_until(8 * STEP, 0)
    assert sum(isinstance(e, Tokens) for e in at.events) == sum(outputs)
    assert sum(isinstance(e, Finished) for e in at.events) == len(outputs)
    (view,) = (host.view() for host in at.cluster.hosts.values())
    assert view.kv_free == view.kv_total


@on(edge, limits=Limits(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=256, kv_blocks=64, block_size=16))
async def test_a_client_that_goes_away_while_waiting_never_starts(at: Edge) -> None:
    first = Client(at, stream=True)
    await at.clock.sleep_until(0.5 * STEP, 0)
    second = Client(at, stream=True)
    await at.clock.sleep_until(2.5 * STEP, 0)
    second.gone.set()
    await second.task
    assert second.sent == []
    await first.task
    assert sum(isinstance(e, Started) for e in at.events) == 1


@on(edge)
async def test_tokens_that_piled_up_for_a_slow_client_go_out_as_one_chunk(at: Edge) -> None:
    client = Client(at, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    client.slow = asyncio.Event()
    await at.clock.sleep_until(10.5 * STEP, 0)
    client.slow.set()
    await client.task
    *chunks, _ = events(client.body)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts[:4] == [0, 10, 11, 12]  # role, what piled up, then token by token
    assert text_of(chunks) == text_of(events((await at.chat(max_tokens=50, stream=True)).text))


@on(edge)
async def test_a_client_that_goes_away_before_its_body_is_read_offers_nothing(at: Edge) -> None:
    client = Client(at)
    client.given = True
    client.gone.set()
    await client.task
    assert at.cluster.offered == 0
    assert [m["status"] for m in client.sent if "status" in m] == [400]


@on(edge)
async def test_the_simulated_engine_stops_where_it_is_told_to(at: Edge) -> None:
    """Its words are the same for all: la (token 1), ti (2), do (3), re (4), mi (5), fa (6), sol (7), so (8)."""
    for given, text, tokens, finish in [
        ({"stop_token_ids": [2]}, "la ", 2, "stop"),
        ({"stop_token_ids": [99]}, "la ti do re mi fa ", 6, "length"),
        ({"stop": "do re"}, "la ti ", 4, "stop"),
        ({"stop": ["nobody", "i "]}, "la t", 2, "stop"),
        ({"stop": "fa sol"}, "la ti do re mi fa ", 6, "length"),  # held back, and said in the end
        ({"stop": "la"}, "", 1, "stop"),
    ]:
        answer = (await at.complete(max_tokens=6, **given)).json()
        choice = answer["choices"][0]
        told = (choice["text"], answer["usage"]["completion_tokens"], choice["finish_reason"])
        assert told == (text, tokens, finish), given


def test_kind_of_a_refusal_is_in_a_header_whatever_a_policy_calls_it() -> None:
    event = Finished(0.0, "a", "refused", "too much now\n\x7fé: try later", Verdict(False, "deadline"))
    assert ("x-rubato-reject-reason", "too much now???") in from_finished(event, 2.5).headers
