"""One batch as tensors: every token of every entry in one row each: decodes, then chunks of prefill (and the chains of
candidates, which are no different), then trees of candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rubato.core.plan import Batch, Entry
from rubato.core.request import NOTHING
from rubato_torch.attention_groups import Grouping, Seen
from rubato_torch.cpu import native
from rubato_torch.trees import Candidates


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
    the attention of the others, the last `masked` rows, they leave to PyTorch. kept: the slot of each candidate
    of a sequence after the step; front: the slots behind its pending tokens, for those accepted."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    seen: Mapping[int | None, Seen]
    sampled: Tensor
    seqs: tuple[str, ...]
    work: native.Work | None
    paths: Paths | None
    masked: int
    kept: Mapping[str, Sequence[int]]
    front: Mapping[str, Sequence[int]]


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
    sequence.

    An entry of fewer tokens than candidates runs the last ones alone: the KV of those before them is there, from an
    earlier batch (`model_drafter`, which runs a tree layer by layer)."""
    trees = sorted((e for e in batch.entries if e.verify and candidates[e.seq].branch), key=lambda e: e.start + e.count)
    branching = {e.seq for e in trees}
    single = sorted((e for e in batch.entries if e.count == 1 and e.seq not in branching), key=lambda e: e.start)
    many = [e for e in batch.entries if e.count > 1 and e.seq not in branching]
    found: list[_Path] = []
    free = list(spare)
    for e in trees if for_native and spare else ():
        found += _paths_of(e, candidates[e.seq], block, free)
    in_paths = {path.entry.seq for path in found}
    masked = [e for e in trees if e.seq not in in_paths]
    ordered = [*single, *many, *(e for e in trees if e.seq in in_paths), *masked]
    rows = _Rows()
    for e in ordered:
        rows.add(e, tokens[e.seq], candidates[e.seq] if e.verify else None, block)
    first = len(rows.ids) - sum(e.count for e in masked)
    ids, positions, slots = torch.tensor([rows.ids, rows.positions, rows.slots]).to(device)
    work = paths = None
    if for_native:
        at, to = positions, slots
        if found:
            plain = sum(e.count for e in (*single, *many))
            paths, at, to = _lay_out(found, rows, plain, first, block, device)
        work = native.work([*single, *many, *(path.entry for path in found)], at, to, block, masked)
    seen: dict[int | None, Seen] = {}
    for window in windows:
        grouping = Grouping(block, window, dtype, device)
        if not for_native:
            seen[window] = grouping.seen(single, many, trees, 0, candidates)
        elif masked:
            seen[window] = grouping.seen([], [], masked, first, candidates)
    sampled = torch.tensor(rows.sampled, dtype=torch.int64, device=device)
    seqs = tuple(e.seq for e in ordered if e.sample)
    return Packed(ids, positions, slots, seen, sampled, seqs, work, paths, len(rows.ids) - first, rows.kept, rows.front)


@dataclass(slots=True)
class _Rows:
    """What each row of the batch is. firsts: the first row of each sequence; the others as in `Packed`."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    firsts: dict[str, int] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)
    front: dict[str, list[int]] = field(default_factory=dict)

    def add(self, e: Entry, tokens: Sequence[int], candidates: Candidates | None, block: int) -> None:
        self.firsts[e.seq] = len(self.ids)
        end = e.start + e.count - len(e.verify)
        there = max(0, e.start - end)  # candidates in KV
        self.ids += tokens[e.start : end]
        self.positions += range(e.start, end)
        slots = _slots(e, block)
        self.slots += slots
        if candidates is not None:
            self.ids += candidates.tokens[there:]
            self.positions += [end - 1 + depth for depth in candidates.depths[there:]]
            self.front[e.seq] = slots[-len(e.verify) :]
            self.kept[e.seq] = slots[-len(e.verify) :]
        if e.sample:
            self.sampled += range(len(self.ids) - min(e.count, 1 + len(e.verify)), len(self.ids))


@dataclass(frozen=True, slots=True)
class _Path:
    """One path of a tree. entry: it as a chunk; way: the places of its candidates, the chunk's last tokens, among the
    tree's; copied: the block that it shares in part, and the spare one that gets a copy."""

    entry: Entry
    way: tuple[int, ...]
    copied: tuple[int, int] | None


def _paths_of(e: Entry, tree: Candidates, block: int, spare: list[int]) -> list[_Path]:
    """The paths to a tree's leaves, with what they take of `spare`; none, with nothing taken, where that is too little.
    The one in the sequence's own blocks comes last: candidates that several hold are looked for there."""
    pending, before = e.count - len(e.verify), e.start // block
    ways = tree.ways()
    blocks = [(e.start + pending + len(way) - 1) // block + 1 - before for way in ways]
    if sum(blocks[:-1]) > len(spare):
        return []
    found = []
    for way, count in zip(ways, blocks, strict=True):
        held, copied = e.blocks, None
        if way is not ways[-1]:
            held = (*e.blocks[:before], *(spare.pop() for _ in range(count)))
            copied = (e.blocks[before], held[before]) if e.start % block else None
        found.append(_Path(Entry(e.seq, e.start, pending + len(way), held, True), way, copied))
    return found


def _lay_out(
    found: Sequence[_Path], rows: _Rows, plain: int, masked: int, block: int, device: torch.device
) -> tuple[Paths, Tensor, Tensor]:
    """What the kernels run in place of the rows `plain` to `masked`, those of the trees that have paths; and the
    positions and slots of all that they run. Notes in `rows` where candidates are kept."""
    expand, collapse = list(range(plain)), list(range(len(rows.ids)))
    at, to = rows.positions[:plain], rows.slots[:plain]
    for path in found:
        e, base = path.entry, rows.firsts[path.entry.seq]
        pending, slots = e.count - len(path.way), _slots(e, block)
        for i in (*range(pending), *(pending + node for node in path.way)):
            collapse[base + i] = len(expand)
            expand.append(base + i)
        at += range(e.start, e.start + e.count)
        to += slots
        for node, held in zip(path.way, slots[pending:], strict=True):
            rows.kept[e.seq][node] = held
    for row in range(masked, len(rows.ids)):
        collapse[row] = len(expand)
        expand.append(row)
    at += rows.positions[masked:]
    to += rows.slots[masked:]
    pairs = torch.tensor([path.copied for path in found if path.copied], dtype=torch.int64, device=device).view(-1, 2)
    to_chunks, to_rows, positions, slots_of = (torch.tensor(x, device=device) for x in (expand, collapse, at, to))
    return Paths(to_chunks, to_rows, pairs[:, 0], pairs[:, 1]), positions, slots_of


def _slots(e: Entry, block: int) -> list[int]:
    """Where the KV of the entry's tokens lies."""
    return [e.blocks[place // block] * block + place % block for place in range(e.start, e.start + e.count)]
