"""The chunks of a stream as one answer."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from rubato.wire.folded_answer import FoldedAnswer


def fold(*chunks: Any, is_chat: bool = True) -> dict[str, Any]:
    answer = FoldedAnswer(is_chat=is_chat)
    for chunk in chunks:
        answer.add(b"data: " + (chunk if isinstance(chunk, bytes) else orjson.dumps(chunk)) + b"\n\n")
    answer.add(b"data: [DONE]\n\n")
    assert not answer.is_broken
    found: dict[str, Any] = json.loads(answer.to_json())
    return found


def delta(index: int = 0, finish_reason: str | None = None, /, **said: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": said, "finish_reason": finish_reason}]}


def message(*deltas: dict[str, Any]) -> dict[str, Any]:
    """Of the only choice."""
    (choice,) = fold(*(delta(**said) for said in deltas))["choices"]
    found: dict[str, Any] = choice["message"]
    return found


def call(index: int, **said: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **said}]}


ROLE = {"role": "assistant", "content": ""}
MESSAGES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([ROLE, {"content": "a"}, {"content": "b"}, {}], {"content": "ab"}),
    ([ROLE, {}], {"content": ""}),
    ([{"role": "assistant", "content": None}, {"refusal": "I "}, {"refusal": "must not"}], {"refusal": "I must not"}),
    (
        [ROLE, {"reasoning_content": "so"}, {"reasoning_content": " then"}, {"content": "x"}],
        {"content": "x", "reasoning_content": "so then"},
    ),
    ([ROLE, {"reasoning": "cut "}, {"reasoning": "short"}], {"reasoning": "cut short"}),
    (
        [
            ROLE,
            call(0, id="c1", type="function", function={"name": "look", "arguments": ""}),
            call(0, function={"arguments": '{"a'}),
            call(1, id="c2", type="function", function={"name": "up", "arguments": "{}"}),
            call(0, id=None, function={"name": None, "arguments": '": 1}'}),
            call(0, id="", type="function", function={"name": "", "arguments": ""}),
        ],
        {
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "up", "arguments": "{}"}},
            ]
        },
    ),
    ([ROLE, {"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}],
     {"function_call": {"name": "f", "arguments": "{}"}}),
    ([{"content": "x", "citations": [{"at": 1}]}, {"citations": [{"at": 2}], "audio": {"id": "a", "data": "Z"}},
      {"audio": {"data": "Y", "expires_at": 7}}],
     {"content": "x", "citations": [{"at": 1}, {"at": 2}], "audio": {"id": "a", "data": "ZY", "expires_at": 7}}),
]  # fmt: skip


@pytest.mark.parametrize(("deltas", "expected"), MESSAGES)
def test_a_message_from_deltas_is_what_they_say_together(
    deltas: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    assert message(*deltas) == {"role": "assistant", "content": None, "refusal": None, **expected}


def test_an_answer_of_several_choices_has_each_by_its_index_with_all_that_chunks_say() -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 5, "model": "m", "usage": None}
    counts = {"prompt_tokens": 1, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    ends = delta(1, "stop", content="!")
    ends["choices"][0]["stop_reason"] = 13
    answer = fold(
        {**head, **delta(0, role="assistant", content="")}, {**head, **delta(1, role="assistant", content="")},
        {**head, **delta(1, content="b")}, {**head, **delta(0, content="a")}, {**head, **ends},
        {**head, **delta(0, "length"), "service_tier": "default"},
        {**head, "choices": [], "usage": counts, "system_fingerprint": "f", "odd": [1]},
    )  # fmt: skip
    rest = {"role": "assistant", "refusal": None}
    assert answer == {
        "id": "c", "object": "chat.completion", "created": 5, "model": "m", "usage": counts,
        "system_fingerprint": "f", "service_tier": "default", "odd": [1],
        "choices": [
            {"index": 0, "message": {**rest, "content": "a"}, "logprobs": None, "finish_reason": "length"},
            {"index": 1, "message": {**rest, "content": "b!"}, "logprobs": None, "finish_reason": "stop",
             "stop_reason": 13},
        ],
    }  # fmt: skip


def test_logprobs_of_chunks_follow_each_other() -> None:
    def chat(*tokens: str) -> dict[str, Any]:
        said = delta(content="".join(tokens))
        content = [{"token": token, "logprob": -1.5, "top_logprobs": [{"token": token}]} for token in tokens]
        said["choices"][0]["logprobs"] = {"content": content, "refusal": None} if tokens else None
        return said

    (choice,) = fold(chat(), chat("a"), chat("b", "c"), chat())["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "b", "c"]
    assert choice["logprobs"]["content"][2] == {"token": "c", "logprob": -1.5, "top_logprobs": [{"token": "c"}]}
    assert choice["logprobs"]["refusal"] is None

    def text(at: int, *tokens: str) -> dict[str, Any]:
        lists = {
            "tokens": list(tokens), "token_logprobs": [None] * len(tokens), "top_logprobs": [{t: -1} for t in tokens],
            "text_offset": [at + i for i in range(len(tokens))],
        }  # fmt: skip
        return {"choices": [{"index": 0, "text": "".join(tokens), "logprobs": lists, "finish_reason": None}]}

    end = {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "token_ids": [1]}]}
    (choice,) = fold(text(0, "a", "b"), text(2), text(2, "c"), end, is_chat=False)["choices"]
    lists = {
        "tokens": ["a", "b", "c"], "token_logprobs": [None] * 3, "top_logprobs": [{"a": -1}, {"b": -1}, {"c": -1}],
        "text_offset": [0, 1, 2],
    }  # fmt: skip
    assert choice == {"index": 0, "text": "abc", "logprobs": lists, "finish_reason": "stop", "token_ids": [1]}


def test_a_character_cut_in_two_halves_is_whole_again() -> None:
    chunks = [b'{"choices":[{"index":0,"text":"%s"}]}' % half for half in (b"\\ud83d", b"\\ude00")]
    assert fold(*chunks, is_chat=False)["choices"][0]["text"] == "😀"


@pytest.mark.parametrize("odd", [b'data: {"choices": [\n\n', b"data: 5\n\n", b'data: "x"\n\n'])
def test_what_is_no_chunk_is_not_left_out_unseen(odd: bytes) -> None:
    answer = FoldedAnswer(is_chat=True)
    answer.add(b": ping\n\ndata: \n\n")
    assert not answer.is_broken
    answer.add(odd)
    assert answer.is_broken


def test_bytes_of_an_answer_grow_with_all_that_is_kept() -> None:
    answer = FoldedAnswer(is_chat=True)
    for n in range(1, 101):
        answer.add(b"data: " + orjson.dumps(delta(content="x" * 1000, tool_calls=[{"index": n, "id": "y"}])) + b"\n\n")
        assert answer.bytes >= 1000 * n
    deep: Any = {}
    for _ in range(100):
        deep = {"a": deep}
    answer.add(b"data: " + orjson.dumps(delta(deep=deep)) + b"\n\n")
    assert len(answer.to_json()) < 2 * answer.bytes


def test_bytes_of_an_answer_do_not_grow_with_what_is_said_again() -> None:
    answer = FoldedAnswer(is_chat=True)
    for _ in range(1000):
        answer.add(b"data: " + orjson.dumps({"id": "x", "created": 1, "model": "m", **delta(content="x")}) + b"\n\n")
    assert answer.bytes < 2000
