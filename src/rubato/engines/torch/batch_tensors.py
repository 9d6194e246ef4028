"""One batch as tensors: every token of every entry in one row each, decodes first, then chunks of prefill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rubato.core.plan import Batch, Entry
from rubato.engines.torch import cpu_ops

SPREAD = 1.5  # decodes share one attention call when the longest has at most this many times the blocks of the shortest


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [first, last) of the batch: one token each of last - first sequences of similar length.

    blocks: (sequences * width,) ids of the blocks that are seen, each sequence padded to `width` by its last; length:
    tokens in them to attend to, the most of any. mask: (sequences, 1, 1, length), 0 where a sequence sees that token
    and -inf where not, or None.
    """

    first: int
    last: int
    width: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, last): a chunk of one sequence's prefill; its last token is number `length` of those in `blocks`.

    mask: (last - first, length), causal within the window, or None for a chunk that begins at 0 (plainly causal).
    """

    first: int
    last: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What the layers of one window attend to: decodes, then chunks, in the order of their rows."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """ids, positions, slots: (rows,) int64; slot = block id * block size + offset. sampled: the rows whose logits
    are wanted, for `seqs` in this order. Attention reads `work` with the native kernels, else `seen`, by window."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seen: Mapping[int | None, Seen]
    sampled: Tensor
    seqs: tuple[str, ...]
    work: cpu_ops.Work | None


def pack(
    batch: Batch,
    tokens: Mapping[str, Sequence[int]],
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None] = (None,),
    for_native: bool = False,
) -> Packed:
    """Lay the batch out; `tokens` holds every token id so far of each sequence in it, `windows` the different ones
    that the model's layers have."""
    single = sorted((e for e in batch.entries if e.count == 1), key=lambda e: e.start)
    many = [e for e in batch.entries if e.count > 1]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    for e in (*single, *many):
        ids += tokens[e.seq][e.start : e.start + e.count]
        positions += range(e.start, e.start + e.count)
        slots += _slots(e, block)
        if e.sample:
            sampled.append(len(ids) - 1)
    packed = torch.tensor([ids, positions, slots]).to(device)
    seen: dict[int | None, Seen] = {}
    work = None
    if for_native:
        work = cpu_ops.work([*single, *many], packed[1], packed[2], block)
    else:
        seen = {window: _seen(single, many, block, window, dtype, device) for window in windows}
    return Packed(
        ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        seen=seen,
        sampled=torch.tensor(sampled, dtype=torch.int64, device=device),
        seqs=tuple(e.seq for e in (*single, *many) if e.sample),
        work=work,
    )


def _slots(e: Entry, block: int) -> list[int]:
    if e.count == 1:
        return [e.blocks[e.start // block] * block + e.start % block]
    return [e.blocks[i // block] * block + i % block for i in range(e.start, e.start + e.count)]


def _seen(
    single: list[Entry], many: list[Entry], block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Seen:
    spans = [_span(e, block, window) for e in single]
    chunks = []
    first = len(single)
    for e in many:
        chunks.append(_chunk(_span(e, block, window), e.count, first, block, window, dtype, device))
        first += e.count
    return Seen(tuple(_groups(spans, block, window, dtype, device)), tuple(chunks))


@dataclass(frozen=True, slots=True)
class _Span:
    """The blocks that an entry's tokens see, and the place of its first token in them."""

    blocks: tuple[int, ...]
    start: int


def _span(e: Entry, block: int, window: int | None) -> _Span:
    before = 0 if window is None else max(0, e.start + 1 - window) // block
    return _Span(e.blocks[before : (e.start + e.count - 1) // block + 1], e.start - before * block)


def _groups(
    spans: list[_Span], block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Decodes]:
    """Cut decodes, sorted by length, into runs of similar length: padding costs at most SPREAD - 1 of the reading."""
    groups = []
    first = 0
    while first < len(spans):
        most = SPREAD * len(spans[first].blocks)
        last = first + 1
        while last < len(spans) and len(spans[last].blocks) <= most:
            last += 1
        groups.append(_decodes(spans[first:last], first, block, window, dtype, device))
        first = last
    return groups


def _decodes(
    group: list[_Span], first: int, block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Decodes:
    starts = [span.start for span in group]
    length = max(starts) + 1
    width = (length + block - 1) // block
    blocks: list[int] = []
    for span in group:
        blocks += span.blocks
        blocks += span.blocks[-1:] * (width - len(span.blocks))
    mask = None
    if min(starts) + 1 < length or (window is not None and length > window):
        mask = _mask(torch.tensor(starts, device=device), length, window, dtype)[:, None, None, :]
    return Decodes(first, first + len(group), width, torch.tensor(blocks, device=device), length, mask)


def _chunk(
    span: _Span, count: int, first: int, block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Chunk:
    length = span.start + count
    blocks = torch.tensor(span.blocks, device=device)
    mask = None
    if span.start or (window is not None and length > window):
        mask = _mask(torch.arange(span.start, length, device=device), length, window, dtype)
    return Chunk(first, first + count, blocks, length, mask)


def _mask(at: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """(len(at), length): 0 where the token at that place sees the one in that column, -inf where not."""
    keys = torch.arange(length, device=at.device)
    hidden = keys > at[:, None]
    if window is not None:
        hidden |= keys <= at[:, None] - window
    return torch.zeros(hidden.shape, dtype=dtype, device=at.device).masked_fill_(hidden, float("-inf"))
