"""Server-sent events in every spelling that the standard allows, in parts of any size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rubato.wire.sse_stream import EventSplitter, SseEvent, read_event, with_data


@pytest.mark.parametrize(
    ("raw", "event"),
    [
        (b'data: {"a": 1}\n\n', SseEvent(b"", b'{"a": 1}')),
        (b'data:{"a": 1}\n\n', SseEvent(b"", b'{"a": 1}')),
        (b"data:  two blanks\n\n", SseEvent(b"", b" two blanks")),
        (b"data: a\r\n\r\n", SseEvent(b"", b"a")),
        (b"data: a\r\r", SseEvent(b"", b"a")),
        (b"data: a\ndata: b\n\n", SseEvent(b"", b"a\nb")),
        (b"data\n\n", SseEvent(b"", b"")),
        (b"event: delta\r\ndata: a\r\nid: 5\r\nretry: 10\r\n\r\n", SseEvent(b"delta", b"a")),
        (b"id: 5\ndata: [DONE]\n\n", SseEvent(b"", b"[DONE]")),
        (b": ping\n\n", SseEvent(b"", None)),
        (b":\ndata: a\n: b\n\n", SseEvent(b"", b"a")),
        (b"\xef\xbb\xbfdata: a\n\n", SseEvent(b"", b"a")),
        (b"datax: a\ndat: b\n\n", SseEvent(b"", None)),
        (b"data: a: b\n\n", SseEvent(b"", b"a: b")),
        (b"\n\n", SseEvent(b"", None)),
        (b"data: a", SseEvent(b"", b"a")),
    ],
)
def test_an_event_is_read_by_the_standard(raw: bytes, event: SseEvent) -> None:
    assert read_event(raw) == event


@given(
    st.lists(
        st.lists(st.sampled_from([b"data: a", b"data:", b"event: x", b": c", b"id: 1", b"data: {}"]), min_size=1),
        max_size=8,
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(1, 9), min_size=1),
    st.sampled_from([b"", b"data: cut"]),
)
def test_a_stream_in_parts_comes_out_as_it_went_in(
    events: list[list[bytes]], end: bytes, sizes: list[int], rest: bytes
) -> None:
    raw = [end.join([*lines, b"", b""]) for lines in events]
    whole, splitter, found, at = b"".join(raw) + rest, EventSplitter(), [], 0
    while at < len(whole):
        size = sizes[at % len(sizes)]
        found += splitter.feed(whole[at : at + size])
        at += size
    assert b"".join(found) + splitter.rest == whole
    read = [event for event in map(read_event, found) if event != SseEvent(b"", None)]
    assert read == [event for event in map(read_event, raw) if event != SseEvent(b"", None)]


def test_other_data_leaves_the_other_lines() -> None:
    assert with_data(b"id: 5\r\ndata: a\r\ndata: b\r\n\r\n", b"c") == b"id: 5\ndata: c\n\n"
    assert with_data(b"data: a\n\n", b"c") == b"data: c\n\n"


def test_an_event_without_end_passes_in_parts() -> None:
    splitter = EventSplitter(1000)
    parts = [splitter.feed(b"data: xxxx") for _ in range(101)]
    assert parts == [[]] * 100 + [[b"data: xxxx" * 101]]
    assert splitter.feed(b"x\n\ndata: a\n\n") == [b"x\n\n", b"data: a\n\n"]


@pytest.mark.parametrize(
    "raw",
    [
        b'data: {"a":\ndata: 1}\n\n',
        b'\xef\xbb\xbfdata: {"a":1}\n\n',
        b'\xef\xbb\xbfevent: x\rdata: {"a":\rdata: 1}\r\r',
    ],
)
def test_with_data_keeps_one_data_line(raw: bytes) -> None:
    """Of JSON in several lines, and behind a byte order mark."""
    data = read_event(raw).data
    assert data is not None
    said = read_event(with_data(raw, data))
    assert said.data is not None
    assert (said.name, json.loads(said.data)) == (read_event(raw).name, {"a": 1})
