"""One batch as tensors: every token of every entry in one row each: decodes, then chunks of prefill (and the chains of
candidates, which are no different), then trees of candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rubato.core.plan import Batch, Entry
from rubato.core.request import NOTHING
from rubato.engines.torch import cpu_ops
from rubato.engines.torch.trees import Candidates

SPREAD = 1.5  # decodes, or trees, share one attention call when the longest has at most this many times the blocks of
# the shortest


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
class Trees:
    """The pending tokens and the candidates of sequences of similar length, in `most` rows each.

    rows: (sequences * most,) rows of the batch, each sequence padded by its last; own: those that are no padding, so
    that rows[own] is a contiguous part of the batch. blocks, width, length: as `Decodes`. mask: (sequences, 1, most,
    length), 0 where a row sees the token in that column, -inf where not: candidates see their ancestors alone.
    """

    rows: Tensor
    own: Tensor
    most: int
    width: int
    blocks: Tensor
    length: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """What the layers of one window attend to: decodes, then chunks, then trees, in the order of their rows."""

    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]
    trees: tuple[Trees, ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """Trees for kernels that know no masks: each path from the last token to a leaf is a chunk of its own. One of a
    tree lies in its sequence's blocks, each other one in spare blocks behind the full blocks that they share.

    expand: the batch's row that each row of the chunks is; collapse: a row of the chunks for each row of the batch.
    blocks, copies: blocks that a path shares in part, and the spare ones that get a copy before the step.
    """

    expand: Tensor
    collapse: Tensor
    blocks: Tensor
    copies: Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """ids, positions, slots: (rows,) int64; slot = block id * block size + offset. sampled: the rows whose logits
    are wanted, for `seqs` in this order: of each the last pending token, then its candidates. Attention reads `work`
    with the native kernels, else `seen`, by window. Trees are `paths` to the kernels as far as there are spare blocks;
    the attention of the others, the last `masked` rows, they leave to PyTorch. kept: where the KV of each candidate of
    a sequence lies after the step."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seen: Mapping[int | None, Seen]
    sampled: Tensor
    seqs: tuple[str, ...]
    work: cpu_ops.Work | None
    paths: Paths | None
    masked: int
    kept: Mapping[str, tuple[int, ...]]


def pack(
    batch: Batch,
    tokens: Mapping[str, Sequence[int]],
    block: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Iterable[int | None] = (None,),
    for_native: bool = False,
    candidates: Mapping[str, Candidates] = NOTHING,
    spare: Sequence[int] = (),
) -> Packed:
    """Lay the batch out; `tokens` holds every token id so far of each sequence in it, `windows` the different ones
    that the model's layers have, `candidates` what the entries with nodes to verify run of them, `spare` blocks of no
    sequence."""
    single = sorted((e for e in batch.entries if e.count == 1), key=lambda e: e.start)
    trees = sorted((e for e in batch.entries if e.verify and candidates[e.seq].branch), key=lambda e: e.start + e.count)
    branching = {e.seq for e in trees}
    in_paths: list[_Path] = []
    if for_native:
        masked: list[Entry] = []
        free = list(spare)
        for e in trees:
            found = _paths_of(e, candidates[e.seq], block, free)
            in_paths += found
            if not found:
                masked.append(e)
        trees = sorted(trees, key=lambda e: e in masked)
    else:
        masked = trees
    many = [e for e in batch.entries if e.count > 1 and e.seq not in branching]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    kept: dict[str, tuple[int, ...]] = {}
    for e in (*single, *many, *trees):
        end = e.start + e.count - len(e.verify)
        ids += tokens[e.seq][e.start : end]
        positions += range(e.start, end)
        if e.verify:
            ids += candidates[e.seq].tokens
            positions += [end - 1 + depth for depth in candidates[e.seq].depths]
        slots += _slots(e, block)
        if e.verify:
            kept[e.seq] = tuple(slots[-len(e.verify) :])
        if e.sample:
            sampled += range(len(ids) - 1 - len(e.verify), len(ids))
    packed = torch.tensor([ids, positions, slots]).to(device)
    seen: dict[int | None, Seen] = {}
    work = paths = None
    first = len(ids) - sum(e.count for e in masked)
    if for_native:
        at, to = packed[1], packed[2]
        if in_paths:
            plain = sum(e.count for e in (*single, *many))
            paths, places = _expanded(in_paths, trees, plain, len(ids), positions, slots, block, device)
            at, to = torch.tensor(places, device=device)
            for path in in_paths:
                kept[path.entry.seq] = path.kept(kept[path.entry.seq], block)
        work = cpu_ops.work([*single, *many, *(path.entry for path in in_paths)], at, to, block, masked)
    for window in windows if masked or not for_native else ():
        grouped = tuple(_trees(masked, candidates, first, block, window, dtype, device))
        if for_native:
            seen[window] = Seen((), (), grouped)
        else:
            seen[window] = _seen(single, many, grouped, block, window, dtype, device)
    return Packed(
        ids=packed[0],
        positions=packed[1],
        slots=packed[2],
        seen=seen,
        sampled=torch.tensor(sampled, dtype=torch.int64, device=device),
        seqs=tuple(e.seq for e in (*single, *many, *trees) if e.sample),
        work=work,
        paths=paths,
        masked=len(ids) - first,
        kept=kept,
    )


@dataclass(frozen=True, slots=True)
class _Path:
    """One path of a tree as a chunk. rows: of the tree's entry, those that it runs; pending: how many of them are no
    candidates; own: whether it lies in the sequence's blocks."""

    entry: Entry
    rows: list[int]
    pending: int
    own: bool

    def kept(self, slots: tuple[int, ...], block: int) -> tuple[int, ...]:
        """`slots`, of the tree's candidates, with those of this path where they lie here."""
        found = list(slots)
        for row, at in zip(self.rows[self.pending :], _slots(self.entry, block)[self.pending :], strict=True):
            found[row - self.pending] = at
        return tuple(found)


def _paths_of(e: Entry, tree: Candidates, block: int, spare: list[int]) -> list[_Path]:
    """The paths to a tree's leaves, with what they take of `spare`; none, with nothing taken, where that is too little.
    The one in the sequence's own blocks comes last: candidates that several hold are looked for there."""
    pending, before = e.count - len(e.verify), e.start // block
    inner = set(tree.parents)
    ways = []
    for leaf in range(len(tree.nodes)):
        way = [] if leaf in inner else [leaf]
        while way and tree.parents[way[-1]] >= 0:
            way.append(tree.parents[way[-1]])
        if way:
            ways.append(way[::-1])
    blocks = [(e.start + pending + len(way) - 1) // block + 1 - before for way in ways]
    if sum(blocks[:-1]) > len(spare):
        return []
    found = []
    for way, count in zip(ways, blocks, strict=True):
        own = way is ways[-1]
        held = e.blocks if own else (*e.blocks[:before], *(spare.pop() for _ in range(count)))
        entry = Entry(e.seq, e.start, pending + len(way), held, True)
        found.append(_Path(entry, [*range(pending), *(pending + i for i in way)], pending, own))
    return found


def _expanded(
    in_paths: list[_Path],
    trees: list[Entry],
    plain: int,
    rows: int,
    positions: list[int],
    slots: list[int],
    block: int,
    device: torch.device,
) -> tuple[Paths, list[list[int]]]:
    """What the kernels run in place of the batch's rows, of which the first `plain` are of no tree; and the positions
    and slots of theirs."""
    first = {}
    row = plain
    for e in trees:
        first[e.seq] = row
        row += e.count
    expand, collapse = list(range(plain)), list(range(rows))
    at, to = positions[:plain], slots[:plain]
    copied: list[tuple[int, int]] = []
    own = {path.entry.seq: path.entry for path in in_paths if path.own}
    for path in in_paths:
        e, base = path.entry, first[path.entry.seq]
        for i in path.rows:
            collapse[base + i] = len(expand)
            expand.append(base + i)
        at += range(e.start, e.start + e.count)
        to += _slots(e, block)
        if not path.own and e.start % block:
            shared = e.start // block  # the first block that it writes to
            copied.append((own[e.seq].blocks[shared], e.blocks[shared]))
    masked = range(sum(e.count for e in trees if e.seq in own) + plain, rows)
    for i in masked:
        collapse[i] = len(expand)
        expand.append(i)
        at.append(positions[i])
        to.append(slots[i])
    pairs = torch.tensor(copied, dtype=torch.int64, device=device).view(-1, 2)
    index = [torch.tensor(some, device=device) for some in (expand, collapse)]
    return Paths(index[0], index[1], pairs[:, 0], pairs[:, 1]), [at, to]


def slot(e: Entry, place: int, block: int) -> int:
    """Where the KV of the sequence's token number `place` lies."""
    return e.blocks[place // block] * block + place % block


def _slots(e: Entry, block: int) -> list[int]:
    return [slot(e, i, block) for i in range(e.start, e.start + e.count)]


def _seen(
    single: list[Entry],
    many: list[Entry],
    trees: tuple[Trees, ...],
    block: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Seen:
    spans = [_span(e, block, window) for e in single]
    chunks = []
    first = len(single)
    for e in many:
        chunks.append(_chunk(_span(e, block, window), e.count, first, block, window, dtype, device))
        first += e.count
    return Seen(tuple(_groups(spans, block, window, dtype, device)), tuple(chunks), trees)


@dataclass(frozen=True, slots=True)
class _Span:
    """The blocks that an entry's tokens see, and the place of its first token in them."""

    blocks: Sequence[int]
    start: int


def _span(e: Entry, block: int, window: int | None) -> _Span:
    before = 0 if window is None else max(0, e.start + 1 - window) // block
    return _Span(e.blocks[before : (e.start + e.count - 1) // block + 1], e.start - before * block)


def _groups(
    spans: list[_Span], block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Decodes]:
    """Cut decodes, sorted by length, into runs of similar length: padding costs at most SPREAD - 1 of the reading."""
    return [
        _decodes(spans[first:last], first, block, window, dtype, device) for first, last in _of_similar_length(spans)
    ]


def _of_similar_length(spans: Sequence[_Span]) -> Iterable[tuple[int, int]]:
    first = 0
    while first < len(spans):
        most = SPREAD * len(spans[first].blocks)
        last = first + 1
        while last < len(spans) and len(spans[last].blocks) <= most:
            last += 1
        yield first, last
        first = last


def _decodes(
    group: list[_Span], first: int, block: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Decodes:
    starts = [span.start for span in group]
    length = max(starts) + 1
    width = (length + block - 1) // block
    blocks = _padded(group, width)
    mask = None
    if min(starts) + 1 < length or (window is not None and length > window):
        mask = _mask(torch.tensor(starts, device=device), length, window, dtype)[:, None, None, :]
    return Decodes(first, first + len(group), width, torch.tensor(blocks, device=device), length, mask)


def _padded(group: Sequence[_Span], width: int) -> list[int]:
    blocks: list[int] = []
    for span in group:
        blocks += span.blocks
        blocks += [span.blocks[-1]] * (width - len(span.blocks))
    return blocks


def _trees(
    entries: list[Entry],
    candidates: Mapping[str, Candidates],
    row: int,
    block: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterable[Trees]:
    """The trees, sorted by length, in runs of similar length as decodes are; `row`: the batch's first row of them."""
    spans = [_span(e, block, window) for e in entries]
    for first, last in _of_similar_length(spans):
        most = max(e.count for e in entries[first:last])
        length = max(span.start + e.count for span, e in zip(spans[first:last], entries[first:last], strict=True))
        width = (length + block - 1) // block
        rows: list[int] = []
        own: list[int] = []
        hidden = np.ones((last - first, 1, most, length), np.bool_)
        for i, (e, span) in enumerate(zip(entries[first:last], spans[first:last], strict=True)):
            own += range(len(rows), len(rows) + e.count)
            rows += range(row, row + e.count)
            rows += [row + e.count - 1] * (most - e.count)
            seen = _hidden_in_tree(candidates[e.seq], span.start, e.count, window)
            hidden[i, 0, : e.count, : seen.shape[1]] = seen
            hidden[i, 0, e.count :] = hidden[i, 0, e.count - 1]
            row += e.count
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(hidden).to(device), float("-inf"))
        yield Trees(
            torch.tensor(rows, device=device),
            torch.tensor(own, device=device),
            most,
            width,
            torch.tensor(_padded(spans[first:last], width), device=device),
            length,
            mask,
        )


def _hidden_in_tree(
    tree: Candidates, start: int, count: int, window: int | None
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(count, start + count): whether a row does not see the token in a column. Rows are the pending tokens, the first
    of them in column `start`, then the candidates; a candidate's position is its depth behind the last pending token,
    wherever its KV lies, and windows reckon with positions."""
    end = start + count - len(tree.nodes)
    positions = np.concatenate((np.arange(end), end - 1 + np.array(tree.depths)))
    at = positions[start:, None]
    hidden: np.ndarray[Any, np.dtype[np.bool_]] = positions > at
    nodes = hidden[end - start :, end:]
    nodes[:] = True
    for i, parent in enumerate(tree.parents):
        if parent >= 0:
            nodes[i] = nodes[parent]
        nodes[i, i] = False
    if window is not None:
        hidden |= positions <= at - window
    return hidden


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
