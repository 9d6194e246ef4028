"""The official client, unmodified, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from examples import openai_client
from rubato.core.events import Offered
from rubato.core.request import SLO
from tests.processes.conftest import Server, Start, servers

TIMEOUT = 60.0
HI: Any = [{"role": "user", "content": "hi"}]
TIERS = {"interactive": {"ttft_ms": 5000, "tpot_ms": 500}, "never": {"ttft_ms": 0.001, "on_decline": "refuse"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers(tmp_path_factory.mktemp("openai")) as start:
        yield start(tiers=TIERS, served_model_name="little", max_body_bytes=100_000)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["little", "simulated"]
    assert client.models.retrieve("little").owned_by == "rubato"


def test_chat_and_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="little", messages=HI, max_completion_tokens=4, temperature=0, seed=1)
    assert chat.choices[0].message.content == "la ti do re "
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 4
    text = client.completions.create(model="simulated", prompt="abc", max_tokens=3)
    assert (text.choices[0].text, text.model) == ("la ti do ", "simulated")
    ids = client.completions.create(model="little", prompt=[1, 2, 3, 4], max_tokens=3)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 4


def test_streams(client: openai.OpenAI) -> None:
    plain = list(client.chat.completions.create(model="little", messages=HI, max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == "la ti do re "
    assert plain[-1].choices[0].finish_reason == "length"
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.chat.completions.create(
        model="little", messages=HI, max_tokens=4, stream=True, stream_options=options
    )
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [0, 1, 2, 3, 4, 4]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    texts = client.completions.create(model="little", prompt="abc", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == "la ti do "


def test_choices(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="little", messages=HI, n=3, max_tokens=4, seed=1)
    assert [(c.index, c.message.content, c.finish_reason) for c in chat.choices] == [
        (i, "la ti do re ", "length") for i in range(3)
    ]
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (20, 12)
    text = client.completions.create(model="little", prompt="abc", n=2, best_of=2, max_tokens=3)
    assert [(c.index, c.text) for c in text.choices] == [(0, "la ti do "), (1, "la ti do ")]
    several = client.completions.create(model="little", prompt=["abc", "a longer one"], n=2, max_tokens=3)
    assert [c.index for c in several.choices] == [0, 1, 2, 3]
    assert several.usage is not None
    assert several.usage.completion_tokens == 12


def test_streamed_choices(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="little", messages=HI, n=3, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    texts, ends = [""] * 3, [[] for _ in range(3)]  # type: ignore[var-annotated]
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert (texts, ends) == (["la ti do re "] * 3, [["length"]] * 3)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (20, 12)
    counts = dict.fromkeys(range(2), "")
    for part in client.completions.create(model="little", prompt="abc", n=2, max_tokens=3, stream=True):
        counts[part.choices[0].index] += part.choices[0].text
    assert set(counts.values()) == {"la ti do "}


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": "little", "messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [one.token for one in choice.logprobs.content] == ["la ", "ti ", "do "]
    assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["la ", "ti "]
    assert all(bytes(one.bytes or ()).decode() == one.token for one in choice.logprobs.content)
    streamed = [
        one
        for chunk in client.chat.completions.create(**options, stream=True)
        for likely in [chunk.choices[0].logprobs]
        for one in (likely.content or [] if likely else [])
    ]
    assert [one.model_dump() for one in streamed] == [one.model_dump() for one in choice.logprobs.content]
    old = client.completions.create(model="little", prompt="abc", max_tokens=3, logprobs=2).choices[0].logprobs
    assert old is not None
    assert (old.tokens, old.text_offset) == (["la ", "ti ", "do "], [0, 3, 6])
    assert old.top_logprobs is not None
    assert [len(top) for top in old.top_logprobs] == [2, 2, 2]


@pytest.mark.full  # tests/server asks in one process
def test_cached_tokens(start: Start) -> None:
    def told(client: openai.OpenAI, prompt: str, **fields: Any) -> int | None:
        usage = client.completions.create(model="simulated", prompt=prompt, max_tokens=2, **fields).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens

    for on, hit in ((True, 96), (False, 0)):
        server = start(prefix_cache=on)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
            prompt = "".join(chr(97 + i % 26) for i in range(100))
            assert [told(client, prompt, n=2), told(client, prompt), told(client, "x" + prompt)] == [0, hit, 0]
        assert server.end() == 0


def test_the_streaming_helper_puts_the_whole_answer_together(client: openai.OpenAI) -> None:
    helper = client.chat.completions.stream(model="little", messages=HI, max_tokens=4)
    with helper as stream, pytest.raises(openai.LengthFinishReasonError) as end:  # its way with finish_reason length
        stream.get_final_completion()
    assert end.value.completion.choices[0].message.content == "la ti do re "


def test_async_streams_side_by_side(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, tokens: int) -> str:
        stream = await client.chat.completions.create(model="little", messages=HI, max_tokens=tokens, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, n) for n in range(1, 9)))

    texts = asyncio.run(asyncio.wait_for(main(), TIMEOUT))
    assert [len(text.split()) for text in texts] == list(range(1, 9))


def test_slos_and_tiers_reach_the_scheduler_and_the_verdict_comes_back(start: Start) -> None:
    server = start(tiers=TIERS)
    common: Any = {"model": "simulated", "messages": HI, "max_tokens": 2}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        create = client.chat.completions.create
        by_body: Any = create(**common, extra_body={"slo": {"ttft_ms": 4000, "tpot_ms": 300}})
        assert by_body.rubato["targets"] == {"ttft_ms": 4000.0, "tpot_ms": 300.0, "e2e_ms": None}
        by_header: Any = create(**common, service_tier="interactive", extra_headers={"x-slo-ttft-ms": "3000"})
        assert by_header.service_tier == "interactive"
        report = by_header.rubato
        assert (report["tier"], report["met"], report["served"]) == ("interactive", True, "slo")
        assert report["targets"] == {"ttft_ms": 3000.0, "tpot_ms": 500.0, "e2e_ms": None}
        raw = client.chat.completions.with_raw_response.create(**common, service_tier="flex")
        assert raw.headers["x-rubato-tier"] == raw.parse().service_tier == "flex"
    assert server.end() == 0
    slos = [e.request.stages[0].slo for e in server.events() if isinstance(e, Offered)]
    assert slos == [SLO(4.0, 0.3), SLO(3.0, 0.5), SLO()]


def test_the_example_prints_the_answer_and_whether_it_was_in_time(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    openai_client.main([server.url, "--tier", "interactive", "--tpot-ms", "400", "--max-tokens", "3"])
    text, verdict, *times = capsys.readouterr().out.splitlines()
    assert (text, verdict) == ("la ti do ", "in time: tier interactive, served as slo")
    assert [line.split(" of ")[1] for line in times] == ["5000.0", "400.0"]
    openai_client.main([server.url, "--tier", "never", "--max-tokens", "3"])
    assert capsys.readouterr().out.startswith("refused: ")
    for words, says in [
        ([server.url, "--tier", "interactiv"], " answers HTTP 400: service_tier.*did you mean 'interactive'"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1 does not answer .*refused.*: start it, or give its URL"),
    ]:
        with pytest.raises(SystemExit, match=says):
            openai_client.main(words)


def test_typed_errors(client: openai.OpenAI) -> None:
    def error(kind: type[openai.APIStatusError], **fields: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": "little", "messages": HI, "max_tokens": 2, **fields})
        return caught.value

    bad = error(openai.BadRequestError, temperature=9)
    assert (bad.param, bad.code, bad.type) == ("temperature", "invalid_value", "invalid_request_error")
    assert error(openai.BadRequestError, n=17).param == "n"
    assert error(openai.BadRequestError, max_completion_tokens=10**6).param == "max_completion_tokens"
    assert error(openai.BadRequestError, extra_headers={"x-slo-ttft-ms": "soon"}).param == "x-slo-ttft-ms"
    assert error(openai.BadRequestError, max_tokens=10**6).code == "context_length_exceeded"
    assert error(openai.NotFoundError, model="gpt-4").code == "model_not_found"
    large = error(openai.APIStatusError, messages=[{"role": "user", "content": "x" * 200_000}])
    assert large.status_code == 413
    for stream in (False, True):
        refused = error(openai.RateLimitError, service_tier="never", stream=stream)
        assert refused.code == refused.response.headers["x-rubato-reject-reason"] == "rejected-slo-infeasible"
        assert refused.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.response.headers


@pytest.mark.full  # test_serving.py has one, without this client
def test_an_engine_failure_is_an_internal_error_and_ends_a_stream(start: Start) -> None:
    server = start(engine={"kind": "tests.processes.failing", "first": 3, "times": 1})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        stream = client.chat.completions.create(model="simulated", messages=HI, max_tokens=9, stream=True)
        got = []
        with pytest.raises(openai.APIError, match="injected failure"):
            got.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        assert server.end() == 0
    server = start(engine={"kind": "tests.processes.failing", "first": 1, "times": 1})
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
        with pytest.raises(openai.InternalServerError, match="injected failure"):
            client.chat.completions.create(model="simulated", messages=HI)
        assert client.chat.completions.create(model="simulated", messages=HI, max_tokens=2).usage is not None


@pytest.mark.slow
def test_a_real_model_on_the_torch_engine(start: Start) -> None:
    engine = {"kind": "torch", "kv_gib": 0.25, "threads": 2}
    server = start(model="bundled", engine=engine, latency={"kind": "affine"}, served_model_name="smol")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=2 * TIMEOUT) as client:
        question: Any = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
        options: dict[str, Any] = {"model": "smol", "messages": question, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**options)
        assert "Paris" in (whole.choices[0].message.content or "")
        assert whole.usage is not None
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
            whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens
        )  # fmt: skip
        for one, hit in ((whole.usage, 0), (usage, (whole.usage.prompt_tokens - 1) // 16 * 16)):
            assert one.prompt_tokens_details is not None
            assert one.prompt_tokens_details.cached_tokens == hit
        stopped = client.chat.completions.create(**options, stop="Paris", extra_body={"slo": {"ttft_ms": 30_000}})
        assert "Paris" not in (stopped.choices[0].message.content or "")
        assert stopped.choices[0].finish_reason == "stop"
        count = client.completions.create(
            model="smol", prompt="One two three", max_tokens=7, extra_body={"ignore_eos": True}
        )
        assert count.usage is not None
        assert count.usage.completion_tokens == 7
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="smol", prompt=[10**9], max_tokens=2)
        several = client.chat.completions.create(**options, n=3, logprobs=True, top_logprobs=3)
        assert [c.message.content for c in several.choices] == [text] * 3
        assert several.usage is not None
        assert several.usage.completion_tokens == 3 * whole.usage.completion_tokens
        for choice in several.choices:
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
            # the end-of-text token counts, but has no text
            ended = choice.finish_reason == "stop"
            assert "".join(one.token for one in tokens[: len(tokens) - ended]) == text
            assert all(one.token == one.top_logprobs[0].token for one in tokens)  # greedy
        warm = {**options, "max_tokens": 8, "temperature": 1.0, "seed": 7, "n": 3}
        first, second = (client.chat.completions.create(**warm) for _ in range(2))
        assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
        assert len({c.message.content for c in first.choices}) == 3
        ids = client.completions.create(
            model="smol", prompt="One, two, three,", max_tokens=8, temperature=0, logprobs=0
        )
        assert ids.choices[0].logprobs is not None
        assert "".join(ids.choices[0].logprobs.tokens or []) == ids.choices[0].text
    assert server.end() == 0
