"""Whatever a client sends, it gets an OpenAI-shaped error that names the field; never a 422, never silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rubato.server.schemas import UNSUPPORTED
from tests.server.conftest import Edge


def dumps(body: object) -> bytes:
    return json.dumps(body).encode()


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return dumps({"model": "simulated", "messages": HI, "max_tokens": 1, **fields})


def text(**fields: Any) -> bytes:
    return dumps({"model": "simulated", "prompt": "abc", "max_tokens": 1, **fields})


# body, status, param
CHATS: list[tuple[bytes, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b"null", 400, None),
    (b"[]", 400, None),
    (b'"hi"', 400, None),
    (b"\xff\xfe", 400, None),
    (b"[" * 100_000, 400, None),
    (b'{"model": NaN}', 400, "model"),
    (b"{}", 400, "model"),
    (dumps({"model": "simulated"}), 400, "messages"),
    (chat(model=None), 400, "model"),
    (chat(model=7), 400, "model"),
    (chat(model="other"), 404, "model"),
    (chat(model=""), 404, "model"),
    (chat(messages=[]), 400, "messages"),
    (chat(messages="hi"), 400, "messages"),
    (chat(messages=["hi"]), 400, "messages[0]"),
    (chat(messages=[{"content": "hi"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    (chat(messages=[*HI, {"role": "wizard", "content": "hi"}]), 400, "messages[1].role"),
    (chat(messages=[{"role": "tool", "content": "hi"}]), 400, "messages[0].role"),
    (chat(messages=[{"role": "user", "content": None}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": []}]), 400, "messages[0].content"),
    (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages[0].content"),
    (b'{"model": "simulated", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    (chat(max_tokens=0), 400, "max_tokens"),
    (chat(max_tokens=-3), 400, "max_tokens"),
    (chat(max_tokens="5"), 400, "max_tokens"),
    (chat(max_tokens=True), 400, "max_tokens"),
    (chat(max_tokens=1.5), 400, "max_tokens"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens"),
    (chat(max_tokens=10**18), 400, "max_tokens"),
    (chat(max_tokens=10**30), 400, "max_tokens"),
    (chat(max_tokens=256), 400, "max_tokens"),
    (chat(max_completion_tokens=256), 400, "max_completion_tokens"),
    (chat(messages=[{"role": "user", "content": "x" * 300}]), 400, "messages"),
    (chat(temperature=-0.1), 400, "temperature"),
    (chat(temperature=2.5), 400, "temperature"),
    (chat(temperature="hot"), 400, "temperature"),
    (chat(top_p=0), 400, "top_p"),
    (chat(top_p=1.1), 400, "top_p"),
    (chat(top_k=-2), 400, "top_k"),
    (chat(top_k=10**20), 400, "top_k"),
    (chat(slo={"ttft_ms": 1e-322}), 400, "slo.ttft_ms"),
    (chat(seed=2**63), 400, "seed"),
    (chat(seed=1.5), 400, "seed"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["a", ""]), 400, "stop"),
    (chat(stop=["a", "b", "c", "d", "e"]), 400, "stop"),
    (chat(stop=5), 400, "stop"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage"),
    (chat(n=17), 400, "n"),
    (chat(n=10**30), 400, "n"),
    (chat(min_p=1.5), 400, "min_p"),
    (chat(min_p=-0.1), 400, "min_p"),
    (chat(presence_penalty=2.1), 400, "presence_penalty"),
    (chat(frequency_penalty=-2.1), 400, "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]"),
    (chat(stop_token_ids=7), 400, "stop_token_ids"),
    (chat(stop_token_ids=[1] * 65), 400, "stop_token_ids"),
    (chat(logprobs=1), 400, "logprobs"),
    (chat(top_logprobs=3), 400, "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    (chat(logit_bias={"5": 1}), 400, "logit_bias"),
    (chat(parallel_tool_calls=True), 400, "parallel_tool_calls"),
    (chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{}]}]), 400, "messages[0].tool_calls"),
    (chat(n=0), 400, "n"),
    (chat(n=True), 400, "n"),
    (chat(tools=[{"type": "function"}]), 400, "tools"),
    (chat(response_format={"type": "json_object"}), 400, "response_format"),
    (chat(temprature=0.5), 400, "temprature"),
    (chat(user=5), 400, "user"),
    (chat(service_tier="platinum"), 400, "service_tier"),
    (chat(service_tier=1), 400, "service_tier"),
    (chat(slo=100), 400, "slo"),
    (chat(slo={"ttft": 100}), 400, "slo.ttft"),
    (chat(slo={"ttft_ms": 0}), 400, "slo.ttft_ms"),
    (chat(slo={"tpot_ms": -1}), 400, "slo.tpot_ms"),
    (chat(slo={"e2e_ms": "fast"}), 400, "slo.e2e_ms"),
    (chat(slo={"on_decline": "cry"}), 400, "slo.on_decline"),
    (chat(slo={"stages": []}), 400, "slo.stages"),
    (chat(slo={"stages": [{"until": ""}, {}]}), 400, "slo.stages[0].until"),
    (chat(slo={"stages": [{"tpot_ms": 5}, {}]}), 400, "slo.stages[0].until"),
    (chat(slo={"stages": [{"until": "x", "e2e_ms": 5}, {}]}), 400, "slo.stages[0].e2e_ms"),
]
TEXTS: list[tuple[bytes, int, str | None]] = [
    (dumps({"model": "simulated"}), 400, "prompt"),
    (text(model="other"), 404, "model"),
    (text(prompt=""), 400, "prompt"),
    (text(prompt=None), 400, "prompt"),
    (text(prompt=[]), 400, "prompt"),
    (text(prompt=[-1]), 400, "prompt"),
    (text(prompt=[1.5]), 400, "prompt"),
    (text(prompt=[True]), 400, "prompt"),
    (text(prompt=["a", "b"]), 400, "prompt"),
    (text(prompt=[[1], [2]]), 400, "prompt"),
    (text(prompt={"a": 1}), 400, "prompt"),
    (text(prompt=[1] * 256), 400, "prompt"),
    (text(max_tokens=254), 400, "max_tokens"),
    (text(echo=True), 400, "echo"),
    (text(best_of=2), 400, "best_of"),
    (text(suffix="end"), 400, "suffix"),
    (text(n=2, best_of=3), 400, "best_of"),
    (text(logprobs=True), 400, "logprobs"),
    (text(logprobs=21), 400, "logprobs"),
    (text(logprobs=-1), 400, "logprobs"),
]


@pytest.mark.parametrize(
    ("path", "cases"), [pytest.param(CHAT, CHATS, id="chat"), pytest.param(TEXT, TEXTS, id="text")]
)
def test_malformed_input(edge: Callable[..., None], path: str, cases: list[tuple[bytes, int, str | None]]) -> None:
    async def scenario(at: Edge) -> None:
        for body, status, param in cases:
            answer = await at.http.post(path, content=body)
            told = (body[:200], answer.text)
            assert answer.status_code == status, told
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, told
            assert error["param"] == param, told
            assert error["type"] == "invalid_request_error", told
            assert error["message"].endswith((".", "?")), told
            if param is not None and status == 400 and error["code"] != "context_length_exceeded":
                assert error["message"].startswith(param), told
        assert at.cluster.offered == 0

    edge(scenario)


def test_beyond_the_context_has_openais_code(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        for answer in (await at.chat(max_tokens=256), await at.complete(prompt="x" * 256, max_tokens=None)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        longest = await at.complete(prompt="x" * 255, max_tokens=1)
        assert longest.status_code == 200

    edge(scenario)


def test_parameters_that_change_the_answer_are_refused_and_their_unused_values_accepted(
    edge: Callable[..., None],
) -> None:
    async def scenario(at: Edge) -> None:
        for name, unused in UNSUPPORTED.items():
            used = await at.complete(**{name: {"some": "value"}})
            assert (used.status_code, used.json()["error"]["param"]) == (400, name)
            assert used.json()["error"]["code"] == "unsupported_parameter"
            for value in (None, *unused):
                assert (await at.complete(**{name: value})).status_code == 200, (name, value)
        assert at.cluster.finished == at.cluster.offered == len(UNSUPPORTED) + sum(map(len, UNSUPPORTED.values()))

    edge(scenario)


def test_harmless_unknowns_are_accepted(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        answer = await at.chat(store=True, metadata={"a": "b"}, prompt_cache_key="k", anything_else=[1])
        assert answer.status_code == 200

    edge(scenario)


def test_body_too_large(edge: Callable[..., None]) -> None:
    async def parts() -> Any:  # chunked: no content-length to look at
        for _ in range(20):
            yield b" " * 100

    async def scenario(at: Edge) -> None:
        for content in (b" " * 1001, parts()):
            answer = await at.http.post(CHAT, content=content)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        exactly = chat()
        assert (await at.http.post(CHAT, content=exactly.ljust(1000))).status_code == 200

    edge(scenario, max_body_bytes=1000)


def test_unknown_paths_methods_and_models(edge: Callable[..., None]) -> None:
    async def scenario(at: Edge) -> None:
        for method, path, status in [
            ("GET", "/v2/nothing", 404),
            ("GET", CHAT, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/other", 404),
        ]:
            answer = await at.http.request(method, path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    edge(scenario)


def test_what_the_tokenizer_cannot_read_is_bad_input(edge: Callable[..., None]) -> None:
    class Text:
        def encode(self, text: str) -> tuple[int, ...]:
            raise ValueError("no such character")

        def chat(self, messages: Any) -> tuple[int, ...]:
            raise ValueError("this model has no chat template")

    async def scenario(at: Edge) -> None:
        for answer, param in ((await at.complete(), "prompt"), (await at.chat(), "messages")):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    async def with_text(at: Edge) -> None:
        from rubato.server.app import Service, create_app

        at.http._transport.app = create_app(Service(at.cluster, Text(), "simulated", 256))
        await scenario(at)

    edge(with_text)
