"""Log probabilities in OpenAI's shapes, streamed and not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rubato.core.plan import Logprob
from rubato.serving import logprobs
from tests.kit import on
from tests.kit.apps import Edge, edge
from tests.serving.test_response import events

EACH = pytest.approx(-math.log(8))  # the simulated model: eight words, equally likely
SPELL = {1: b"a", 2: "€".encode()[:1], 3: "€".encode()[1:], 4: b" b", 5: b"\xff"}


@on(edge)
async def test_a_chat_has_a_list_of_tokens(at: Edge) -> None:
    choice = (await at.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert choice["logprobs"]["refusal"] is None
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert content[0] == {
        "token": "la ",
        "logprob": EACH,
        "bytes": list(b"la "),
        "top_logprobs": [
            {"token": "la ", "logprob": EACH, "bytes": list(b"la ")},
            {"token": "ti ", "logprob": EACH, "bytes": list(b"ti ")},
        ],
    }
    alone = (await at.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in alone] == [[]] * 3


@on(edge)
async def test_a_completion_has_parallel_lists(at: Edge) -> None:
    choice = (await at.complete(logprobs=2)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["la ", "ti ", "do "],
        "token_logprobs": [EACH] * 3,
        "top_logprobs": [{a: EACH, b: EACH} for a, b in (("la ", "ti "), ("ti ", "do "), ("do ", "re "))],
        "text_offset": [0, 3, 6],
    }
    chosen = (await at.complete(logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert [list(top) for top in chosen] == [["la "], ["ti "], ["do "]]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_a_stream_says_the_same_of_every_choice(at: Edge, endpoint: str) -> None:
    fields: dict[str, Any] = {"n": 2, "max_tokens": 5, "logprobs": 3}
    if endpoint == "chat":
        fields |= {"logprobs": True, "top_logprobs": 3}
    whole = (await getattr(at, endpoint)(**fields)).json()
    *chunks, _ = events((await getattr(at, endpoint)(**fields, stream=True)).text)
    for index in range(2):
        joined: dict[str, list[Any]] = {}
        for part in (c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["index"] == index):
            for key, value in (part or {}).items():
                joined.setdefault(key, []).extend(value or [])
        expected = {key: value or [] for key, value in whole["choices"][index]["logprobs"].items()}
        assert joined == expected


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@on(edge)
async def test_nobody_gets_them_unasked(at: Edge, endpoint: str) -> None:
    assert (await getattr(at, endpoint)()).json()["choices"][0]["logprobs"] is None
    *chunks, _ = events((await getattr(at, endpoint)(stream=True)).text)
    assert {c["choices"][0]["logprobs"] for c in chunks} == {None}


def test_a_character_across_tokens_in_a_chat() -> None:
    said = logprobs.chat(SPELL.__getitem__, [Logprob(2, -1.0, ((3, -0.5),)), Logprob(3, -2.0)])["content"]
    assert bytes(b for one in said for b in one["bytes"]).decode() == "€"
    assert said[0]["token"] == "\ufffd"
    assert said[0]["top_logprobs"][0]["bytes"] == list(SPELL[3])


def test_a_character_across_tokens_in_a_completion() -> None:
    """Offsets count characters of the text; two tokens that are no UTF-8 stay two keys."""
    offsets = logprobs.Offsets(SPELL.__getitem__)
    first = offsets.add([Logprob(1, -0.1), Logprob(2, -3.0, ((5, -0.5), (2, -3.0)))])
    second = offsets.add([Logprob(3, -0.2), Logprob(4, -0.3)])
    assert first["tokens"] == ["a", r"bytes:\xe2"]
    assert first["top_logprobs"][1] == {r"bytes:\xff": -0.5, r"bytes:\xe2": -3.0}
    assert (first["text_offset"], second["text_offset"]) == ([0, 1], [1, 2])
