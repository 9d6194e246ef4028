"""Streams pass whole, whatever the parts they come in, and what is counted does not depend on these."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.wire.response_stream import DONE, ResponseStream, usage_of, with_fields

texts = st.lists(st.text(st.sampled_from('a" \\né{}[]:,\n'), max_size=8), max_size=12)
LAST = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'


def stream(said: list[tuple[int, str]], choices: int, reason: bool, done: bool, spaces: bool, end: bytes) -> bytes:
    """Chunks of vLLM's form: a role first, finish reasons in the last, then [DONE]; a keep-alive comment between."""
    dumps = (lambda value: orjson.dumps(value).replace(b'":', b'": ')) if spaces else orjson.dumps
    chunks = [b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}']
    chunks += [
        b"data: " + dumps({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": None}]})
        for index, text in said
    ]
    chunks.insert(1, b": ping")
    if reason:
        chunks += [b'data: {"choices":[{"index":%d,"delta":{},"finish_reason":"stop"}]}' % at for at in range(choices)]
    if done:
        chunks.append(b"data: [DONE]")
    return b"".join(chunk + end + end for chunk in chunks)


@given(
    texts, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(1, 60), min_size=1), st.integers(1, 3),
)  # fmt: skip
def test_parts_of_any_size_come_out_as_they_went_in(
    said: list[str], reason: bool, done: bool, spaces: bool, end: bytes, sizes: list[int], choices: int
) -> None:
    words = [(at % choices, text) for at, text in enumerate(said)]
    whole = stream(words, choices, reason, done, spaces, end)
    reader, passed, counted, at, turn = ResponseStream(choices), b"", [], 0, 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        now, of = reader.feed(whole[at : at + size])
        passed += now
        counted += of
        at, turn = at + size, turn + 1
    assert reader.has_ended == done
    assert reader.is_complete == (done or reason)
    rest = reader.finish({})
    assert passed + rest == whole
    assert counted == [index for index, text in words if text]
    if reason:
        assert b'"finish_reason":"stop"' in rest


@given(
    st.lists(st.text(st.sampled_from('a" \\né{}[]:,\n'), max_size=5), min_size=3, max_size=12),
    st.sampled_from(["delta", "text"]),
)
def test_what_an_event_brings_does_not_depend_on_those_before_it(said: list[str], form: str) -> None:
    """Most events differ from one before in their text alone, and are not read."""

    def event(text: str, more: bytes = b"") -> bytes:
        choice = {"index": 0, **({"delta": {"content": text}} if form == "delta" else {"text": text})}
        raw = orjson.dumps({"id": "x", "choices": [{**choice, "finish_reason": None}]})
        return b"data: " + raw + b"\n\n" + more

    odd = [event("a")[:-2] + b'"\n\n', event("a", event("b")), event("a")[:-9], event("a").replace(b'"a"', b'"a\\"')]
    for last in [*map(event, said), *odd, LAST, USAGE, DONE]:
        reader, fresh = ResponseStream(), ResponseStream()
        for text in said:
            reader.feed(event(text))
        (passed, counted), (alone, found) = reader.feed(last), fresh.feed(last)
        assert (passed, [*counted]) == (alone, [*found])
        assert (reader.finish({}), reader.has_ended, reader.usage) == (fresh.finish({}), fresh.has_ended, fresh.usage)


def test_what_looks_like_an_end_in_a_text_is_none() -> None:
    reader = ResponseStream()
    chunk = b'data: {"choices":[{"index":0,"text":"\\"finish_reason\\":\\"stop\\""}]}\n\n'
    assert reader.feed(chunk) == (chunk, [0])


@pytest.mark.parametrize(
    ("name", "events", "with_usage", "passes", "rest"),
    [
        ("the counts get the verdict", [LAST, USAGE, DONE], True, b"",
         LAST + USAGE.replace(b"}}", b'},"v":1}') + DONE),
        ("the finish reason, where the counts are taken out", [LAST, USAGE, DONE], False, b"",
         LAST.replace(b"]}", b'],"v":1}') + DONE),
        ("no [DONE]", [TOKEN, LAST], True, TOKEN, LAST.replace(b"]}", b'],"v":1}')),
        ("it goes on", [LAST, TOKEN], True, LAST + TOKEN, b""),
        ("counts in the middle", [USAGE, TOKEN], True, USAGE + TOKEN, b""),
        ("no finish reason", [TOKEN, DONE], True, TOKEN + DONE, b""),
        ("filter results first", [b'data: {"choices":[],"prompt_filter_results":[]}\n\n'], True,
         b'data: {"choices":[],"prompt_filter_results":[]}\n\n', b""),
        ("no JSON", [b"data: hello\n\n", b"data: {\n\n", b"data: [1]\n\n"], True,
         b"data: hello\n\ndata: {\n\ndata: [1]\n\n", b""),
        ("Python's JSON", [LAST.replace(b'""', b'"",\n"logprobs":-Infinity').replace(b"\n\"", b'"')], True, b"",
         b'data: {"choices":[{"index":0,"text":"","logprobs":-Infinity,"finish_reason":"length"}],"v":1}\n\n'),
        ("several fields", [b"id: 7\r\ndata: " + LAST[6:-2] + b"\r\n\r\n"], True, b"",
         b"id: 7\ndata: " + LAST[6:-3] + b',"v":1}\n\n'),
    ],
)  # fmt: skip
def test_the_end_is_held_back_for_the_verdict(
    name: str, events: list[bytes], with_usage: bool, passes: bytes, rest: bytes
) -> None:
    reader = ResponseStream(with_usage=with_usage)
    assert b"".join([reader.feed(event)[0] for event in events]) == passes
    assert reader.finish({"v": 1}) == rest


def test_errors_counts_and_named_events() -> None:
    reader = ResponseStream()
    reader.feed(b'data: {"error": {"message": "x"}}\n\n')
    assert reader.error == b'{"error": {"message": "x"}}'
    reader.feed(USAGE)
    assert reader.usage == (2, 3)

    named = ResponseStream(is_named=True)
    delta = b"event: response.output_text.delta\ndata: {}\n\n"
    end = b'event: response.completed\ndata: {"response": {"usage": {"input_tokens": 4, "output_tokens": 5}}}\n\n'
    assert named.feed(delta + end) == (delta + end, [0])
    assert (named.has_ended, named.usage) == (True, (4, 5))


def test_what_is_held_back_is_bounded() -> None:
    reader = ResponseStream()
    reader.feed(LAST)
    passed = sum([len(reader.feed(b": ping\n\n")[0]) for _ in range(1000)])
    assert passed > 6000


@pytest.mark.parametrize(
    ("raw", "usage"),
    [(b"{", (0, 0)), (b"[]", (0, 0)), (b'{"usage": 5}', (0, 0)), (b'{"usage": {"prompt_tokens": "x"}}', (0, 0)),
     (b'{"usage": {"prompt_tokens": -3, "completion_tokens": 1e400}}', (0, 0)),
     (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', (3, 4))],
)  # fmt: skip
def test_usage_of_anything(raw: bytes, usage: tuple[int, int]) -> None:
    assert usage_of(raw) == usage


def test_further_fields_of_what_is_no_object() -> None:
    assert with_fields(b'{"a": 1} \n', {"v": 1}) == b'{"a": 1,"v":1}'
    assert with_fields(b"{ }", {"v": 1}) == b'{"v":1}'
    assert with_fields(b'{"v": {"v": 2}, "a": 3}', {"v": 1}) == b'{"v":1,"a":3}'
    assert with_fields(b"[1]", {"v": 1}) == b"[1]"


def test_half_an_event_at_the_end_gives_way_to_the_end_that_is_added() -> None:
    reader = ResponseStream()
    reader.feed(TOKEN + LAST + b"data: [DO")
    assert reader.finish({}, DONE) == LAST + DONE
