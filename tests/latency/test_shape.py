"""A batch's shape counts decodes and chunks exactly, however it was put together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rubato.core.events import Stepped
from rubato.core.plan import Batch, Entry, Shape

entries = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), max_size=8)


def joined(parts: list[tuple[int, int]]) -> Shape:
    shape = Shape()
    for tokens, cached in parts:
        shape = shape.plus(tokens, cached)
    return shape


@given(entries)
def test_plus_and_the_batch_itself_agree(parts: list[tuple[int, int]]) -> None:
    batch = Batch(tuple(Entry(str(i), cached, tokens, (), False) for i, (tokens, cached) in enumerate(parts)))
    assert batch.shape == joined(parts)


@given(entries)
def test_decodes_and_their_kv_are_what_the_chunks_leave(parts: list[tuple[int, int]]) -> None:
    shape = joined(parts)
    assert shape.seqs - shape.chunks == sum(1 for c, _ in parts if c == 1)
    assert shape.kv - shape.chunk_kv == sum(c + k for c, k in parts if c == 1)
    assert shape.tokens - (shape.seqs - shape.chunks) == sum(c for c, _ in parts if c > 1)


@given(entries, st.tuples(st.integers(1, 300), st.integers(0, 3000)))
def test_minus_takes_back_what_plus_gave(parts: list[tuple[int, int]], one: tuple[int, int]) -> None:
    shape = joined(parts)
    assert shape.plus(*one).minus(*one) == shape


def test_a_log_from_before_chunks_were_counted_is_still_read() -> None:
    old = {"tokens": 20, "seqs": 2, "kv": 50, "chunk_context": 0, "chunk_sq": 361, "spec_steps": 0}
    event = TypeAdapter(Stepped).validate_python({"at": 1.0, "id": "r0", "shape": old, "seconds": 0.01})
    assert event.shape == Shape(20, 2, 50, 0, 361)
    assert (event.shape.chunks, event.shape.chunk_kv, event.shape.draft_tokens) == (0, 0, 0)


def test_draft_tokens_are_what_the_later_draft_steps_run() -> None:
    """Depth 4 and width 3, a chain of 2, and one that drafts nothing: 3 steps of 3 tokens, and one of 1."""
    drafts = [(4, 3), (2, 1), None, (1, 8)]
    batch = Batch(tuple(Entry(str(i), 10, 1, (), True, draft=d) for i, d in enumerate(drafts)))
    assert (batch.shape.spec_steps, batch.shape.draft_tokens) == (4, 10)
    assert batch.shape.plus(5, 2).plus(1, 2).minus(5, 2).draft_tokens == 10
