"""Streams pass whole, whatever the parts they come in, and what is counted does not depend on these."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from rubato.fleet.sse_relay import StreamRelay, is_usage

texts = st.lists(st.text(st.sampled_from('a" \\né{}[]:,\n'), max_size=8), max_size=12)


def stream(said: list[tuple[int, str]], reason: bool, done: bool, spaces: bool) -> bytes:
    """Chunks of vLLM's form: a role first, a finish reason in the last, then [DONE]; a keep-alive comment between."""
    dumps = (lambda value: orjson.dumps(value).replace(b'":', b'": ')) if spaces else orjson.dumps
    chunks = [b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}']
    chunks += [
        b"data: " + dumps({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": None}]})
        for index, text in said
    ]
    chunks.insert(1, b": ping")
    if reason:
        chunks.append(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
    if done:
        chunks.append(b"data: [DONE]")
    return b"".join(chunk + b"\n\n" for chunk in chunks)


@given(texts, st.booleans(), st.booleans(), st.lists(st.integers(1, 60), min_size=1), st.integers(1, 3))
def test_parts_of_any_size_come_out_as_they_went_in(
    said: list[str], reason: bool, done: bool, sizes: list[int], choices: int
) -> None:
    words = [(at % choices, text) for at, text in enumerate(said)]
    whole = stream(words, reason, done, spaces=False)
    relay, passed, counted, at, turn = StreamRelay(choices), b"", [], 0, 0
    while at < len(whole):
        size = sizes[turn % len(sizes)]
        now, of = relay.feed(whole[at : at + size])
        assert now == b"" or now.endswith(b"\n\n")
        passed += now
        counted += of
        at, turn = at + size, turn + 1
    assert passed + relay.rest() == whole
    assert relay.ended == done
    assert counted == [index for index, text in words if text]
    if reason:
        assert b'"finish_reason":"stop"' in relay.rest()


def test_what_looks_like_an_end_in_a_text_is_none() -> None:
    relay = StreamRelay()
    chunk = b'data: {"choices":[{"index":0,"text":"\\"finish_reason\\":\\"stop\\""}]}\n\n'
    assert relay.feed(chunk) == (chunk, (0,))


def test_counts_with_blanks_between_are_counts_too() -> None:
    relay = StreamRelay()
    last = b'data: {"choices": [{"index": 0, "text": "", "finish_reason":  "length"}]}\n\n'
    usage = b'data: {"choices": [ ], "usage": {"completion_tokens": 3}}\n\n'
    assert relay.feed(b'data: {"choices": [{"index": 0, "text": "", "finish_reason": null}]}\n\n')[1] == ()
    assert relay.feed(last + usage) == (b"", [])
    assert (relay.usage, is_usage(usage)) == (usage[6:-2], True)


def test_usage_after_the_finish_reason_is_held_back_with_it() -> None:
    relay = StreamRelay()
    last = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
    assert relay.feed(last) == (b"", [])
    now, _ = relay.feed(usage + b"data: [DONE]\n\n")
    assert now + relay.rest() == last + usage + b"data: [DONE]\n\n"
    assert relay.rest().startswith(last)  # which gets the verdict where the counts are taken out
