"""Whatever a client sends, it gets an OpenAI-shaped error that names the field; never a 422, never silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from rubato.core.events import Finished
from rubato.core.request import Request
from rubato.engines.simulated import ByteText, Engine
from rubato.fleet.cluster import Cluster
from rubato.fleet.local_host import LocalHost
from rubato.frontdoor import slo_body
from rubato.serving import schemas
from rubato.serving.app import LONG_TEXT_BYTES, MAX_TOKENIZING_TEXTS, Service, create_app
from rubato.serving.schemas import UNSUPPORTED
from tests.kit import on
from tests.kit.apps import Edge, edge


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
    (b"null", 400, None),
    (b'"hi"', 400, None),
    (b"\xff\xfe", 400, None),
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
    (chat(max_tokens="five"), 400, "max_tokens"),
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
    (chat(slo={"tpot_ms": 0.0009}), 400, "slo.tpot_ms"),
    (chat(slo={"ttft_ms": 1e303}), 400, "slo.ttft_ms"),
    (chat(slo={"e2e_ms": 1000000001}), 400, "slo.e2e_ms"),
    (chat(slo={"stages": [{"tpot_ms": 1.7e308, "until": "zzz"}, {}]}), 400, "slo.stages[0].tpot_ms"),
    (chat(seed=2**63), 400, "seed"),
    (chat(seed=1.5), 400, "seed"),
    (chat(stop=""), 400, "stop"),
    (chat(stop=["a", ""]), 400, "stop"),
    (chat(stop=["a", "b", "c", "d", "e"]), 400, "stop"),
    (chat(stop=5), 400, "stop"),
    (chat(stream="yes"), 400, "stream"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage"),
    (chat(n=10**30), 400, "n"),
    (chat(min_p=1.5), 400, "min_p"),
    (chat(min_p=-0.1), 400, "min_p"),
    (chat(presence_penalty=2.1), 400, "presence_penalty"),
    (chat(frequency_penalty=-2.1), 400, "frequency_penalty"),
    (chat(repetition_penalty=0), 400, "repetition_penalty"),
    (chat(repetition_penalty=1e-60), 400, "repetition_penalty"),
    (chat(repetition_penalty=1e60), 400, "repetition_penalty"),
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
    (chat(slo={"ttft_ms": 0}), 400, "slo.ttft_ms"),
    (chat(slo={"on_decline": "cry"}), 400, "slo.on_decline"),
    (chat(slo={"stages": []}), 400, "slo.stages"),
    (chat(slo={"stages": [{"until": "x"}] * 64 + [{}]}), 400, "slo.stages"),
    (chat(slo={"stages": [{"until": 1}] * 30_000}), 400, "slo.stages[0].until"),
    (chat(slo={f"x{i}": 1 for i in range(65)}), 400, "slo"),
    (chat(slo={"x" * 500_000: 1}), 400, "slo." + "x" * 500_000),
    (chat(messages=HI * 2049), 400, "messages"),
    (chat(messages=[1] * 50_000), 400, "messages[0]"),
    (chat(**{f"field_{i}": 1 for i in range(65)}), 400, None),
    (chat(service_tier="x" * 500_000), 400, "service_tier"),
    (chat(model="x" * 500_000), 404, "model"),
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
    (text(prompt=[2**63] * 20), 400, "prompt"),
    (text(prompt=[2**63 - 1, 10**4000]), 400, "prompt"),
    (text(prompt=[True]), 400, "prompt"),
    (text(prompt=["a", ""]), 400, "prompt[1]"),
    (text(prompt=[[1], []]), 400, "prompt[1]"),
    (text(prompt=["a", [1]]), 400, "prompt[1]"),
    (text(prompt=[[1], [2], "a"]), 400, "prompt[2]"),
    (text(prompt=["a", 1]), 400, "prompt[1]"),
    (text(prompt=["a", None]), 400, "prompt[1]"),
    (text(prompt=[1, "a"]), 400, "prompt[1]"),
    (text(prompt=[1, True]), 400, "prompt[1]"),
    (text(prompt=[[1], [1, 2, "a"]]), 400, "prompt[1][2]"),
    (text(prompt=[[1], ["a"]]), 400, "prompt[1]"),
    (text(prompt=[[1], [-1]]), 400, "prompt[1]"),
    (text(prompt=[[[1]]]), 400, "prompt[0]"),
    (text(prompt=["a", "x" * 300]), 400, "prompt[1]"),
    (text(prompt=["a", "x" * 254], max_tokens=3), 400, "max_tokens"),
    (text(prompt=["a"] * 17), 400, "prompt"),
    (text(prompt=["a"] * 2, n=17), 400, "n"),
    (text(prompt=["a"] * 60_000), 400, "prompt"),
    (text(prompt={"a": 1}), 400, "prompt"),
    (text(prompt=[{"a": 1}]), 400, "prompt"),
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
@on(edge)
async def test_malformed_input_is_an_error_that_names_the_field(
    at: Edge, path: str, cases: list[tuple[bytes, int, str | None]]
) -> None:
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


@on(edge)
async def test_beyond_the_context_has_openais_code(at: Edge) -> None:
    for answer in (await at.chat(max_tokens=256), await at.complete(prompt="x" * 256, max_tokens=None)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    max_token_bytes = await at.complete(prompt="x" * 255, max_tokens=1)
    assert max_token_bytes.status_code == 200


@on(edge)
async def test_parameters_that_change_the_answer_are_refused_and_their_unused_values_accepted(at: Edge) -> None:
    for name, unused in UNSUPPORTED.items():
        used = await at.complete(**{name: {"some": "value"}})
        assert (used.status_code, used.json()["error"]["param"]) == (400, name)
        assert used.json()["error"]["code"] == "unsupported_parameter"
        for value in (None, *unused):
            assert (await at.complete(**{name: value})).status_code == 200, (name, value)
    assert at.cluster.finished == at.cluster.offered == len(UNSUPPORTED) + sum(map(len, UNSUPPORTED.values()))


@on(edge)
async def test_what_a_body_says_is_compared_with_known_names_a_bounded_number_of_times(
    at: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def matches(word: str, *given: Any, **more: Any) -> list[str]:
        looked.append(word)
        return []

    monkeypatch.setattr(schemas, "get_close_matches", matches)
    assert (await at.chat(**{f"{'y' * 100}{i}": 1 for i in range(200)})).status_code == 400
    assert len(looked) <= schemas.MAX_UNKNOWN_FIELDS
    assert max(map(len, looked)) <= slo_body.MAX_NAME_CHARACTERS


def test_many_messages_are_templated_off_the_event_loop_however_short_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []

    async def to_thread(function: Callable[..., Any], *args: Any) -> Any:
        where.append("thread")  # which virtual time would not wait for
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)

    async def scenario(at: Edge) -> None:
        for count in (1, 2000):
            answer = await at.chat(messages=[{"role": "user", "content": ""}] * count)
            where.append(f"{count} messages: {answer.status_code}")

    edge(scenario)
    assert where[0] == "1 messages: 200"
    assert where[1] == "thread"


class Faulty(Engine):
    def add(self, request: Request) -> None:
        raise OverflowError("a fault of ours")


@on(edge, engine=Faulty, max_in_flight=3)
async def test_a_request_that_no_replica_can_take_fails_and_leaves_nothing(at: Edge) -> None:
    for n in (1, 3):
        for stream in (False, True):
            answer = await at.complete(n=n, stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
            assert "a fault of ours" in answer.json()["error"]["message"]
    assert at.cluster.in_flight == 0
    assert at.cluster.finished == at.cluster.offered == 8
    assert all(host.view().waiting == [] for host in at.cluster.hosts.values())


@on(edge, max_in_flight=2)
async def test_a_host_that_will_not_take_a_request_ends_it(at: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(self: LocalHost, request: Request) -> None:
        raise OverflowError("int too big to convert")

    monkeypatch.setattr(LocalHost, "submit", submit)
    for _ in range(2):
        answer = await at.complete(n=2)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    assert at.cluster.in_flight == 0
    assert [e.outcome for e in at.events if isinstance(e, Finished)] == ["failed"] * 4
    monkeypatch.undo()
    assert (await at.complete()).status_code == 200


@on(edge)
async def test_what_was_offered_before_an_unexpected_error_does_not_stay_in_flight(
    at: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Cluster.offer

    def offer(self: Cluster, request: Request, listener: Any = None) -> None:
        if request.id.endswith("-2"):
            raise OverflowError("a fault of ours")
        real(self, request, listener)

    monkeypatch.setattr(Cluster, "offer", offer)
    assert (await at.complete(n=3)).status_code == 500
    assert (at.cluster.offered, at.cluster.in_flight) == (2, 0)


def test_what_a_body_has_too_much_of_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    real = schemas._prompt

    def prompt(value: Any, at: tuple[int | str, ...]) -> str | tuple[int, ...]:
        looked.append(value)
        return real(value, at)

    class Text(ByteText):
        max_token_bytes = 4

        def encode(self, text: str) -> tuple[int, ...]:
            looked.append(text)
            return super().encode(text)

    class WithText(Engine):
        text = Text()

    monkeypatch.setattr(schemas, "_prompt", prompt)
    monkeypatch.setattr(schemas, "_check_alike", lambda values, at: looked.extend(values))
    cases = [
        (TEXT, text(prompt=["a"] * 300_000), None, "invalid_value"),
        (TEXT, text(prompt=["a"] * 60_000), "prompt", "invalid_value"),
        (TEXT, text(prompt=[[1]] * 30_000), "prompt", "invalid_value"),
        (TEXT, text(prompt=[1] * 500_000), None, "invalid_value"),
        (TEXT, text(prompt=[1] * 60_000), "prompt", "context_length_exceeded"),
        (TEXT, text(prompt=[[1], [2] * 60_000]), "prompt[1]", "context_length_exceeded"),
        (TEXT, text(prompt=[[1]] * 300_000), None, "invalid_value"),
        (TEXT, text(**{f"x{i}": 1 for i in range(70_000)}), None, "invalid_value"),
        (CHAT, chat(metadata=[[]] * 300_000), None, "invalid_value"),
        (CHAT, chat(messages=[{**HI[0], **{f"x{i}": 1 for i in range(70_000)}}]), None, "invalid_value"),
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 600}] * 2), "messages", "context_length_exceeded"),
        (CHAT, chat(messages=[{"role": "user", "content": "\u00e9" * 600}]), "messages", "context_length_exceeded"),
    ]

    async def scenario(at: Edge) -> None:
        for path, body, param, code in cases:
            error = (await at.http.post(path, content=body)).json()["error"]
            assert (error["param"], error["code"]) == (param, code), (body[:100], error)
            assert looked == [], body[:100]
        for size, times in ((1020, 2), (1021, 1)):  # by `_prompt`, and by the tokenizer: 255 tokens may do, 256 not
            assert (await at.complete(prompt="x" * size)).status_code == 400
            assert looked.count("x" * size) == times

    edge(scenario, engine=WithText)


@on(edge, max_model_len=2 * LONG_TEXT_BYTES)
async def test_long_texts_are_tokenized_two_at_a_time(at: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    going = 0

    async def to_thread(function: Callable[[], Any]) -> Any:
        nonlocal going
        going += 1
        running.append(going)
        await asyncio.sleep(0.01)
        going -= 1
        return function()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    long = "x" * (LONG_TEXT_BYTES + 1)
    answers = await asyncio.gather(*(at.complete(prompt=long) for _ in range(7)))
    assert [a.status_code for a in answers] == [400] * 7  # no KV for so many: that is found out afterwards
    assert (len(running), max(running)) == (7, MAX_TOKENIZING_TEXTS)


@on(edge)
async def test_what_the_tokenizer_cannot_read_is_bad_input(at: Edge) -> None:
    class Text:
        max_token_bytes = 1

        def encode(self, text: str) -> tuple[int, ...]:
            raise ValueError("no such character")

        def chat(self, messages: Any) -> tuple[int, ...]:
            raise ValueError("this model has no chat template")

    async def scenario(at: Edge) -> None:
        for answer, param in ((await at.complete(), "prompt"), (await at.chat(), "messages")):
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    at.http._transport.app = create_app(Service(at.cluster, "simulated", 256, Text()))
    await scenario(at)
