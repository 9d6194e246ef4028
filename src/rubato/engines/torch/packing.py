"""One batch as tensors: every token of every entry in one row each, decodes first, then chunks of prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rubato.engines.torch import native
from rubato.types import Batch, Entry

SPREAD = 1.5  # decodes share one attention call when the longest has at most this many times the blocks of the shortest


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows [first, last) of the batch: one token each of last - first sequences of similar length.

    blocks: (sequences * width,) block ids, each sequence padded to `width` by its last; length: tokens to attend to,
    the most of any. mask: (sequences, 1, 1, length), 0 where a sequence has that token and -inf where not, or None.
    """

    first: int
    last: int
    width: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, last): a chunk of one sequence's prefill that ends at token `length`.

    mask: (last - first, length), causal, or None for a chunk that begins at 0 (plainly causal).
    """

    first: int
    last: int
    blocks: Tensor
    length: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Packed:
    """ids, positions, slots: (rows,) int64; slot = block id * block size + offset. sampled: the rows whose logits
    are wanted, for `seqs` in this order. Attention reads `work` with the native kernels, else decodes and chunks."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]
    sampled: Tensor
    seqs: tuple[str, ...]
    work: native.Work | None


def pack(
    batch: Batch,
    tokens: Mapping[str, Sequence[int]],
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    for_native: bool = False,
) -> Packed:
    """Lay the batch out; `tokens` holds every token id so far of each sequence in it."""
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
    decodes: list[Decodes] = []
    chunks: list[Chunk] = []
    work = None
    if for_native:
        work = native.work([*single, *many], packed[1], packed[2], block)
    else:
        decodes = _groups(single, block, dtype, device)
        first = len(single)
        for e in many:
            chunks.append(_chunk(e, first, block, dtype, device))
            first += e.count
    return Packed(
        ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        decodes=tuple(decodes),
        chunks=tuple(chunks),
        sampled=torch.tensor(sampled, dtype=torch.int64, device=device),
        seqs=tuple(e.seq for e in (*single, *many) if e.sample),
        work=work,
    )


def _slots(e: Entry, block: int) -> list[int]:
    if e.count == 1:
        return [e.blocks[e.start // block] * block + e.start % block]
    return [e.blocks[i // block] * block + i % block for i in range(e.start, e.start + e.count)]


def _groups(single: list[Entry], block: int, dtype: torch.dtype, device: torch.device) -> list[Decodes]:
    """Cut decodes, sorted by length, into runs of similar length: padding costs at most SPREAD - 1 of the reading."""
    groups = []
    first = 0
    while first < len(single):
        most = SPREAD * (single[first].start // block + 1)
        last = first + 1
        while last < len(single) and single[last].start // block + 1 <= most:
            last += 1
        groups.append(_decodes(single[first:last], first, block, dtype, device))
        first = last
    return groups


def _decodes(group: list[Entry], first: int, block: int, dtype: torch.dtype, device: torch.device) -> Decodes:
    length = group[-1].start + 1
    width = (length + block - 1) // block
    blocks: list[int] = []
    for e in group:
        held = e.blocks[: e.start // block + 1]
        blocks += held
        blocks += held[-1:] * (width - len(held))
    mask = None
    if group[0].start != group[-1].start:
        ends = torch.tensor([e.start for e in group], device=device)
        hidden = torch.arange(length, device=device) > ends[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        mask = mask[:, None, None, :]
    return Decodes(first, first + len(group), width, torch.tensor(blocks, device=device), length, mask)


def _chunk(e: Entry, first: int, block: int, dtype: torch.dtype, device: torch.device) -> Chunk:
    length = e.start + e.count
    blocks = torch.tensor(e.blocks[: (length + block - 1) // block], device=device)
    mask = None
    if e.start:
        at = torch.arange(e.start, length, device=device)
        hidden = torch.arange(length, device=device) > at[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return Chunk(first, first + e.count, blocks, length, mask)
