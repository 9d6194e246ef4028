"""Several prompts in one completion: each is a request of its own, or `n` of them; together they are one answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rubato.core.events import Finished, Offered
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request
from rubato.engines.simulated import Engine
from rubato.serving.app import LONG_TEXT_BYTES
from tests.kit import on
from tests.kit.apps import STEP, Edge, edge
from tests.kit.asgi import key, tenant
from tests.serving.test_request_history import page
from tests.serving.test_response import events
from tests.serving.test_response_choices import Uneven, by_choice, ended, offered

WORDS = ["a", "bb", "ccc"]


def each_ended_once(at: Edge) -> bool:
    ends = Counter(e.id for e in at.events if isinstance(e, Finished))
    return ends == Counter(e.id for e in at.events if isinstance(e, Offered)) and at.cluster.in_flight == 0


@pytest.mark.parametrize("prompt", [WORDS, [list(word.encode()) for word in WORDS]])
@on(edge, engine=Uneven)
async def test_choices_come_prompt_by_prompt(at: Edge, prompt: list[Any]) -> None:
    slo = {"ttft_ms": 5000}
    answer = await at.complete(prompt=prompt, n=2, seed=5, max_tokens=9, slo=slo)
    body, asked = answer.json(), offered(at)
    assert answer.headers["x-request-id"] == body["id"]
    assert [r.id for r in asked] == [f"{body['id']}-{i}" for i in range(6)]
    assert [bytes(r.stages[0].token_ids).decode() for r in asked] == ["a", "a", "bb", "bb", "ccc", "ccc"]
    assert [r.stages[0].slo for r in asked] == [SLO(ttft=5.0)] * 6
    assert [r.sampling.seed for r in asked] == [5, 6] * 3  # what each prompt would have by itself
    groups = [r.group for r in asked]
    assert groups[::2] == groups[1::2]
    assert len(set(groups)) == 3  # only choices of one prompt may share its KV
    assert [c["index"] for c in body["choices"]] == list(range(6))
    assert [len(c["text"].split()) for c in body["choices"]] == [1, 2, 3, 4, 5, 6]
    counts = body["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (1 + 2 + 3, 21)
    assert [(r["index"], r["targets"]["ttft_ms"]) for r in body["rubato"]["choices"]] == [(i, 5000.0) for i in range(6)]
    assert each_ended_once(at)


@on(edge)
async def test_a_prompt_without_further_choices_is_in_no_group_and_a_list_of_one_is_no_list(at: Edge) -> None:
    body = (await at.complete(prompt=WORDS)).json()
    assert [(r.id, r.group) for r in offered(at)] == [(f"{body['id']}-{i}", "") for i in range(3)]
    for prompt in (["abc"], [[97, 98, 99]]):
        body = (await at.complete(prompt=prompt)).json()
        assert (offered(at)[-1].id, offered(at)[-1].prompt) == (body["id"], 3)
        assert "choices" not in body["rubato"]


@on(edge, engine=Uneven)
async def test_a_stream_interleaves_them(at: Edge) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": WORDS, "n": 2, "max_tokens": 9, "logprobs": 1, "stop": "re"}
    whole = (await at.complete(**fields)).json()
    *chunks, last, done = events((await at.complete(**fields, stream=True, stream_options=options)).text)
    assert done == "[DONE]"
    assert [c["choices"][0]["index"] for c in chunks[:7]] == [0, 0, 1, 2, 3, 4, 5]  # the first ends at once
    assert [len(c["text"].split()) for c in whole["choices"]] == [1, 2, 3, 3, 3, 3]
    choices = by_choice(chunks)
    for index, parts in choices.items():
        said = whole["choices"][index]
        assert "".join(part["text"] for part in parts) == said["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [said["finish_reason"]]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == said["logprobs"]["tokens"]
    assert [choices[i][-1]["finish_reason"] for i in range(6)] == ["stop"] * 6
    told = {c["choices"][0]["index"]: c["usage"]["prompt_tokens"] for c in chunks}
    assert told == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert [r["index"] for r in last["rubato"]["choices"]] == list(range(6))


@on(
    edge,
    policy="vllm",
    limits=Limits(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=64, kv_blocks=64, block_size=16),
)
async def test_each_prompt_has_its_own_room_and_verdict(at: Edge) -> None:
    """Room for two at once: the third prompt begins when one of the others has ended, beyond its TTFT."""
    body = (await at.complete(prompt=WORDS, max_tokens=None, slo={"ttft_ms": 1e3 * 2.5 * STEP})).json()
    assert [r.sampling.max_tokens for r in offered(at)] == [63, 62, 61]
    report = body["rubato"]
    assert [c["met"] for c in report["choices"]] == [True, True, False]
    assert (report["met"], report["margin_ms"]) == (False, report["choices"][2]["margin_ms"])


@on(edge, prefix_cache=True)
async def test_what_the_prefix_cache_had_of_each(at: Edge) -> None:
    prompts = [list(range(100)), list(range(100, 150))]
    cached = []
    for n in (1, 2):
        usage = (await at.complete(prompt=prompts, n=n)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 96 + 48]  # full blocks of 16; once for each prompt


class Picky(Engine):
    def add(self, request: Request) -> None:
        if request.prompt == 2:
            raise ValueError("token id 98 is not in the vocabulary")
        super().add(request)


@pytest.mark.parametrize("stream", [False, True])
@on(edge, max_in_flight=3, engine=Picky)
async def test_one_refused_prompt_refuses_all_and_ends_the_others(at: Edge, stream: bool) -> None:
    full = await at.complete(prompt=list("abcd"), max_tokens=50, stream=stream)
    assert (full.status_code, full.headers["x-rubato-reject-reason"]) == (429, "rejected-saturated")
    assert sorted(ended(at)) == ["cancelled"] * 3 + ["refused"]
    bad = await at.complete(prompt=WORDS, max_tokens=50, stream=stream)
    assert (bad.status_code, "token id 98" in bad.json()["error"]["message"]) == (400, True)
    assert each_ended_once(at)


@on(edge, tenants=[tenant("a", requests_per_minute=7, tokens_per_minute=100), tenant("t", tokens_per_minute=100)])
async def test_a_limit_counts_every_prompt(at: Edge) -> None:
    answer = await at.complete(headers=key("a"), prompt=WORDS, n=2, max_tokens=5)
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - 6 - 6 * 5)
    over = await at.complete(headers=key("a"), prompt=WORDS[:2])
    assert (over.status_code, over.headers["retry-after"]) == (429, "17")  # two of seven a minute
    assert ended(at)[-2:] == ["refused"] * 2  # both: all pass, or none
    assert over.headers["x-ratelimit-remaining-requests"] == "0"  # of the two it was charged the first
    await at.clock.sleep_until(at.clock.now() + 30, 0)
    assert (await at.complete(headers=key("a"), prompt=WORDS[:2], max_tokens=5)).status_code == 200
    await at.clock.sleep_until(at.clock.now() + 60, 0)  # more than the bucket holds passes when it is full
    assert (await at.complete(headers=key("a"), prompt=[*WORDS, *WORDS], n=2, max_tokens=1)).status_code == 200
    assert (await at.complete(headers=key("a"))).headers["retry-after"] == "52"
    first = asyncio.create_task(at.complete(headers=key("t"), prompt=["x" * 10] * 2, max_tokens=15))
    await at.clock.sleep_until(at.clock.now() + STEP / 2, 0)  # 50 of 100 are taken
    assert (await at.complete(headers=key("t"), prompt=["x" * 20] * 2, max_tokens=6)).status_code == 429
    assert (await at.complete(headers=key("t"), prompt=["x" * 20] * 2, max_tokens=5)).status_code == 200
    assert (await first).status_code == 200
    assert each_ended_once(at)


@on(edge, tenants=[tenant("a", max_in_flight=6)])
async def test_prompts_of_one_request_count_each_in_flight(at: Edge) -> None:
    two, one = {"prompt": WORDS[:2], "n": 2}, {"prompt": "a", "n": 2}
    for bodies, statuses in (
        ([two, one, one], [200, 200, 429]),
        ([one, one, two], [200, 200, 429]),
        ([two, two], [200, 429]),
        ([{"prompt": WORDS, "n": 2}], [200]),
    ):
        answers = await asyncio.gather(*(at.complete(headers=key("a"), **body) for body in bodies))
        assert [a.status_code for a in answers] == statuses
    never = await at.complete(headers=key("a"), prompt=[*WORDS, *WORDS, "d"])
    assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")  # waiting would not help
    assert "at most 6" in never.json()["error"]["message"]
    assert each_ended_once(at)


@on(edge, tenants=[tenant("a")])
async def test_its_debug_page_has_them_all(at: Edge) -> None:
    answer = (await at.complete(headers=key("a"), prompt=WORDS, n=2)).json()
    told = await page(at, answer["id"])
    assert (told["state"], told["prompt_tokens"]) == ("finished", 6)
    assert [c["id"] for c in told["choices"]] == [f"{answer['id']}-{i}" for i in range(6)]
    assert [c["prompt_tokens"] for c in told["choices"]] == [1, 1, 2, 2, 3, 3]


@on(edge)
async def test_an_empty_list_and_a_mixed_one_are_told_apart(at: Edge) -> None:
    messages = [(await at.complete(prompt=p)).json()["error"]["message"] for p in ([], ["a", [1]], [1, "a"])]
    assert messages == [
        "prompt: the list is empty: give at least one prompt, or one token id.",
        "prompt[1]: this must be a string, as the first one is.",
        "prompt[1]: this must be a token id, as the first one is.",
    ]


@on(edge, max_model_len=LONG_TEXT_BYTES)
async def test_prompts_are_tokenized_off_the_event_loop_where_together_they_are_long(
    at: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = 0

    async def to_thread(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal threads
        threads += 1
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    for share, expected in ((4, 0), (3, 4)):
        await at.complete(prompt=["x" * (LONG_TEXT_BYTES // share)] * 4)
        assert threads == expected
