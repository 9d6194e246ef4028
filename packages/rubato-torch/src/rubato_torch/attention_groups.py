"""What PyTorch's attention reads in one batch: rows in groups that one call runs, their KV blocks and their masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rubato.core.plan import Entry
from rubato_torch.trees import Candidates

SPREAD = 1.5  # decodes, or trees, share one attention call when the longest has at most this many times the blocks of
# the shortest


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [first, last) of the batch: one token each of last - first sequences of similar length.

    blocks: (sequences * width,) ids of the blocks that are seen, each sequence padded to the same width by its last;
    length: tokens in them to attend to, the most of any. mask: (sequences, 1, 1, length), 0 where a sequence sees that
    token and -inf where not, or None.
    """

    first: int
    last: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """Sequences with `most` rows each: one with a chunk of its prefill, or several of similar length with trees (the
    pending tokens, then the candidates).

    rows: (sequences * most,) rows of the batch, each sequence padded by its last; own: those that are no padding, so
    that rows[own] is a contiguous part of the batch. blocks, length: as `Decodes`. mask: 0 where a row sees the token
    in that column, -inf where not, (sequences, 1, most, length), or (most, length) for a chunk; None for a chunk that
    begins at 0 (plainly causal).
    """

    rows: Tensor | slice
    own: Tensor | slice
    most: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the layers of one window attend to: decodes, then chunks, then trees, in the order of their rows."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunks, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    """The blocks that an entry's tokens see, the place of its first token in them, and how many tokens it has."""

    blocks: Sequence[int]
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups entries for the layers of one window (None: all tokens are seen)."""

    block: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def seen(
        self, single: list[Entry], many: list[Entry], trees: list[Entry], row: int, candidates: Mapping[str, Candidates]
    ) -> Seen:
        """Entries of one token, chunks and trees; their rows follow each other from `row` on. Entries of one token and
        trees are sorted by length."""
        decodes = tuple(self._decodes([self._span(e) for e in single], row))
        row += len(single)
        chunks: list[Chunks] = []
        for e in many:
            chunks.append(self._chunk(self._span(e), row))
            row += e.count
        return Seen(decodes, (*chunks, *self._trees(trees, row, candidates)))

    def _span(self, e: Entry) -> _Span:
        first = min(e.start, e.start + e.count - len(e.verify))  # its first token's position, or less
        before = 0 if self.window is None else max(0, first + 1 - self.window) // self.block
        blocks = e.blocks[before : (e.start + e.count - 1) // self.block + 1]
        return _Span(blocks, e.start - before * self.block, e.count)

    def _decodes(self, spans: list[_Span], row: int) -> Iterator[Decodes]:
        for first, last in _of_similar_length(spans):
            group = spans[first:last]
            starts = [span.start for span in group]
            length = max(starts) + 1
            mask = None
            if min(starts) + 1 < length or (self.window is not None and length > self.window):
                mask = self._causal(torch.tensor(starts, device=self.device), length)[:, None, None, :]
            yield Decodes(row + first, row + last, self._blocks(group, length), length, mask)

    def _chunk(self, span: _Span, row: int) -> Chunks:
        mask = None
        if span.start or (self.window is not None and span.end > self.window):
            mask = self._causal(torch.arange(span.start, span.end, device=self.device), span.end)
        rows = slice(row, row + span.count)
        return Chunks(rows, slice(None), span.count, self._blocks([span], span.end), span.end, mask)

    def _trees(self, entries: list[Entry], row: int, candidates: Mapping[str, Candidates]) -> Iterator[Chunks]:
        spans = [self._span(e) for e in entries]
        for first, last in _of_similar_length(spans):
            group = spans[first:last]
            most = max(span.count for span in group)
            length = max(span.end for span in group)
            rows: list[int] = []
            own: list[int] = []
            hidden = np.ones((len(group), 1, most, length), np.bool_)
            for i, (e, span) in enumerate(zip(entries[first:last], group, strict=True)):
                own += range(len(rows), len(rows) + e.count)
                rows += range(row, row + e.count)
                rows += [row + e.count - 1] * (most - e.count)
                hidden[i, 0, : e.count, : span.end] = _hidden_in_tree(candidates[e.seq], span, self.window)
                hidden[i, 0, e.count :] = hidden[i, 0, e.count - 1]
                row += e.count
            yield Chunks(
                torch.tensor(rows, device=self.device),
                torch.tensor(own, device=self.device),
                most,
                self._blocks(group, length),
                length,
                self._mask(torch.from_numpy(hidden).to(self.device)),
            )

    def _blocks(self, group: list[_Span], length: int) -> Tensor:
        width = (length + self.block - 1) // self.block
        padded: list[int] = []
        for span in group:
            padded += span.blocks
            padded += [span.blocks[-1]] * (width - len(span.blocks))
        return torch.tensor(padded, device=self.device)

    def _causal(self, at: Tensor, length: int) -> Tensor:
        """(len(at), length): the mask of tokens at these places."""
        keys = torch.arange(length, device=at.device)
        hidden = keys > at[:, None]
        if self.window is not None:
            hidden |= keys <= at[:, None] - self.window
        return self._mask(hidden)

    def _mask(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))


def _of_similar_length(spans: Sequence[_Span]) -> Iterator[tuple[int, int]]:
    """Cut spans, sorted by length, into runs [first, last): padding costs at most SPREAD - 1 of the reading."""
    first = 0
    while first < len(spans):
        most = SPREAD * len(spans[first].blocks)
        last = first + 1
        while last < len(spans) and len(spans[last].blocks) <= most:
            last += 1
        yield first, last
        first = last


def _hidden_in_tree(tree: Candidates, span: _Span, window: int | None) -> NDArray[np.bool_]:
    """(span.count, span.end): whether a row does not see the token in a column. Rows are the pending tokens, the first
    of them in column `span.start`, then the candidates, which see their ancestors alone, but for those that are in KV
    already; a candidate's position is its depth behind the last pending token, wherever its KV lies, and windows reckon
    with positions."""
    end = span.end - len(tree.nodes)
    positions = np.concatenate((np.arange(end), end - 1 + np.array(tree.depths)))
    at = positions[span.start :, None]
    hidden: NDArray[np.bool_] = positions > at
    nodes = np.ones((len(tree.nodes), len(tree.nodes)), np.bool_)
    for i, parent in enumerate(tree.parents):
        if parent >= 0:
            nodes[i] = nodes[parent]
        nodes[i, i] = False
    hidden[max(0, end - span.start) :, end:] = nodes[max(0, span.start - end) :]
    if window is not None:
        hidden |= positions <= at - window
    return hidden
