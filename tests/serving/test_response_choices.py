"""`n` > 1: every choice is a request of its own, together they are one answer; and what the prefix cache saved."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rubato.core.events import Finished, Offered, Started
from rubato.core.plan import Limits
from rubato.core.request import Request
from rubato.engines.simulated import Engine
from tests.kit import on
from tests.kit.apps import STEP, Edge, Failing, edge
from tests.serving.test_response import events

TEXT = "la ti do "


class Uneven(Engine):
    """Choice k of an answer has k + 1 tokens."""

    def add(self, request: Request) -> None:
        *_, index = request.id.split("-", 2) if request.id.count("-") == 2 else "0"
        self._lengths = {**self._lengths, request.id: (int(index) + 1,)}
        super().add(request)


def offered(at: Edge) -> list[Request]:
    return [e.request for e in at.events if isinstance(e, Offered)]


def ended(at: Edge) -> list[str]:
    return [e.outcome for e in at.events if isinstance(e, Finished)]


def by_choice(chunks: list[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_choices_are_requests_of_one_group(at: Edge, endpoint: str) -> None:
    answer = await getattr(at, endpoint)(n=3, seed=-1, temperature=0)
    body = answer.json()
    assert answer.headers["x-request-id"] == body["id"]
    assert [r.id for r in offered(at)] == [f"{body['id']}-{i}" for i in range(3)]
    assert {r.group for r in offered(at)} == {f"{body['id']}-0"}
    assert [r.sampling.seed for r in offered(at)] == [-1, 0, 1]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    texts = [c["text"] if endpoint == "complete" else c["message"]["content"] for c in body["choices"]]
    assert texts == [TEXT] * 3
    assert [c["finish_reason"] for c in body["choices"]] == ["length"] * 3
    prompt = 20 if endpoint == "chat" else 3
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 9,
        "total_tokens": prompt + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@on(edge)
async def test_one_choice_is_a_request_without_a_group(at: Edge) -> None:
    body = (await at.complete(n=1, best_of=1, seed=5)).json()
    (request,) = offered(at)
    assert (request.id, request.group, request.sampling.seed) == (body["id"], "", 5)
    assert "choices" not in body["rubato"]
    assert len((await at.complete(n=2, best_of=2)).json()["choices"]) == 2
    assert offered(at)[1].sampling.seed is None


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge, engine=Uneven)
async def test_streamed_choices_end_one_by_one(at: Edge, endpoint: str) -> None:
    options = {"include_usage": True}
    answer = await getattr(at, endpoint)(n=3, max_tokens=9, stream=True, stream_options=options)
    *chunks, last, done = events(answer.text)
    assert done == "[DONE]"
    assert {c["id"] for c in [*chunks, last]} == {answer.headers["x-request-id"]}
    choices = by_choice(chunks)
    assert sorted(choices) == [0, 1, 2]
    for index, parts in choices.items():
        text = "".join(p["text"] if endpoint == "complete" else p["delta"].get("content", "") for p in parts)
        assert len(text.split()) == index + 1
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["stop"]
        if endpoint == "chat":
            assert parts[0]["delta"]["role"] == "assistant"
            assert all("role" not in p["delta"] for p in parts[1:])
    assert all(c["usage"] is None and "rubato" not in c for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 1 + 2 + 3
    assert [r["index"] for r in last["rubato"]["choices"]] == [0, 1, 2]


@on(edge, engine=Uneven)
async def test_without_a_usage_chunk_the_last_finish_carries_the_verdict(at: Edge) -> None:
    *chunks, _ = events((await at.chat(n=3, max_tokens=9, stream=True)).text)
    assert [c for c in chunks if "rubato" in c] == [chunks[-1]]
    assert chunks[-1]["choices"][0]["index"] == 2
    counts = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _, _ = events((await at.complete(n=2, max_tokens=9, stream=True, stream_options=counts)).text)
    per_choice = [(c["choices"][0]["index"], c["usage"]["completion_tokens"]) for c in chunks]
    assert sorted(per_choice) == [(0, 1), (0, 1), (1, 1), (1, 2), (1, 2)]


@on(edge, limits=Limits(2, max_num_batched_tokens=512, max_model_len=256, kv_blocks=64, block_size=16), policy="vllm")
async def test_the_verdict_of_all_is_that_of_the_worst(at: Edge) -> None:
    """Room for two at once: the third choice begins when one of the others has ended, beyond its TTFT."""
    report = (await at.complete(n=3, slo={"ttft_ms": 1e3 * 2.5 * STEP})).json()["rubato"]
    each = report["choices"]
    assert [c["met"] for c in each] == [True, True, False]
    worst = each[2]
    assert report["met"] is False
    assert {k: v for k, v in report.items() if k != "choices"} == {k: v for k, v in worst.items() if k != "index"}
    assert report["margin_ms"] == min(c["margin_ms"] for c in each)
    kept = (await at.complete(n=2, slo={"ttft_ms": 1e3 * 5})).json()["rubato"]
    assert (kept["met"], [c["met"] for c in kept["choices"]]) == (True, [True, True])


@pytest.mark.parametrize("stream", [False, True])
@on(edge, max_in_flight=2)
async def test_one_refused_choice_refuses_all_and_ends_the_others(at: Edge, stream: bool) -> None:
    answer = await at.chat(n=3, max_tokens=50, stream=stream)
    assert (answer.status_code, answer.headers["x-rubato-reject-reason"]) == (429, "rejected-saturated")
    assert sorted(ended(at)) == ["cancelled", "cancelled", "refused"]
    assert at.clock.now() == 0.0  # at once, not when the others would have ended
    assert at.cluster.in_flight == 0
    assert (await at.chat(n=2)).status_code == 200


@on(edge, engine=Failing)
async def test_a_failure_midway_ends_the_stream_with_an_error(at: Edge) -> None:
    answer = await at.chat(n=2, max_tokens=9, stream=True)
    assert answer.status_code == 200
    *_, last = events(answer.text)
    assert "cosmic ray" in last["error"]["message"]
    assert at.cluster.in_flight == 0


@on(edge, engine=Failing)
async def test_a_failure_of_a_whole_answer_is_a_500(at: Edge) -> None:
    assert (await at.chat(n=2, max_tokens=9)).status_code == 500
    assert at.cluster.in_flight == 0


@on(edge, max_choices=4)
async def test_more_choices_than_the_server_gives(at: Edge) -> None:
    assert len((await at.complete(n=4)).json()["choices"]) == 4
    refused = await at.complete(n=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "at most 4" in refused.json()["error"]["message"]


@on(edge, prefix_cache=True)
async def test_tokens_of_a_prefix_that_was_there_are_told(at: Edge) -> None:
    prompt = list(range(100))

    async def told(**fields: Any) -> int:
        cached: int = (await at.complete(prompt=prompt, **fields)).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        return cached

    assert await told(n=3) == 0  # that the other choices share the first one's prompt is no hit of the cache
    shared = [e.cached for e in at.events if isinstance(e, Started)]
    assert shared == [0, 96, 96]
    assert await told() == await told(n=2) == 96  # six full blocks of 16
    options = {"include_usage": True}
    *_, last, _ = events((await at.complete(prompt=prompt, stream=True, stream_options=options)).text)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}


@on(edge)
async def test_choices_of_many_clients_side_by_side(at: Edge) -> None:
    answers = await asyncio.gather(*(at.complete(n=1 + i % 4, stream=i % 2 == 0) for i in range(12)))
    assert {a.status_code for a in answers} == {200}
    assert at.cluster.offered == at.cluster.finished == 3 * (1 + 2 + 3 + 4)
