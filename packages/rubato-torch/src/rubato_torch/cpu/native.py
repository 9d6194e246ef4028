"""The bfloat16 CPU path's own kernels: attention over paged KV in place, norms, and the gate of the MLP.

They read KV in a layout of their own, which `kernels` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rubato.core.plan import Entry
from rubato_torch.cpu import kernels, llvm_jit
from rubato_torch.cpu.kernels import ROWS, STEP, UNIT, Arguments
from rubato_torch.model_config import Config

NO_WINDOW = 1 << 40  # tokens: more than any context
TILE = 32  # tokens of a chunk that pass over the keys together


def suits(config: Config, dtype: torch.dtype, device: torch.device, block: int) -> bool:
    """Whether the kernels can run this model here."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and config.head_dim % 32 == 0
        and config.hidden % llvm_jit.LANES == 0
        and config.intermediate % llvm_jit.LANES == 0
        and block % UNIT == 0
        and llvm_jit.available()
    )


@dataclass(frozen=True, slots=True)
class Work:
    """What attention does in one batch, the same in every layer. positions, slots, ends: (rows,) int64; ends is 1 for
    an entry's last row. tasks: (decodes + tiles, 4) int64: first row, tokens, position of the first, first of its
    units in `units`."""

    positions: Tensor
    slots: Tensor
    ends: Tensor
    tasks: Tensor
    decodes: int
    units: Tensor


def work(entries: list[Entry], positions: Tensor, slots: Tensor, block: int, trees: Sequence[Entry] = ()) -> Work:
    """`entries` in the order of their rows, those of one token first. trees: entries whose rows follow; their queries
    are rotated and their KV is written, but what they attend to is left to the caller."""
    per_block = block // UNIT
    tasks: list[tuple[int, int, int, int]] = []
    tiles: list[tuple[int, int, int, int]] = []
    units: list[int] = []
    row = 0
    for e in entries:
        at = len(units)
        count = -(-(e.start + e.count) // UNIT)
        if per_block == 1:
            units += e.blocks[:count]
        else:
            held = [b * per_block + i for b in e.blocks[: -(-count // per_block)] for i in range(per_block)]
            units += held[:count]
        units += units[-1:] * (-count % (STEP // UNIT))  # a step reads so many, masked
        if e.count == 1:
            tasks.append((row, 1, e.start, at))
        else:
            tiles += [(row + i, min(TILE, e.count - i), e.start + i, at) for i in range(0, e.count, TILE)]
        row += e.count
    ends = [int(i == e.count - 1) for e in (*entries, *trees) for i in range(e.count)]
    tiles.sort(key=lambda tile: -tile[2])  # the longest first
    tasks.sort(key=lambda task: -task[2])
    all_tasks = torch.tensor(tasks + tiles, dtype=torch.int64).view(-1, 4)
    all_units = torch.tensor(units, dtype=torch.int64)
    return Work(positions, slots, torch.tensor(ends), all_tasks, len(tasks), all_units)


class Native:
    """Kernels for one model's shape, and the buffers they need."""

    def __init__(self, config: Config, cos: Tensor, sin: Tensor, threads: int) -> None:
        """cos, sin: (context, 1, 2, head_dim/2) as in `Weights`."""
        c = self.config = config
        self.threads = threads
        self.angles = torch.stack((cos[:, 0, 0], sin[:, 0, 1]), 1).float().contiguous()
        group = c.heads // c.kv_heads
        self.few = max(rows for rows in range(1, ROWS + 1) if group % rows == 0)
        most = -(-TILE * group // ROWS) * ROWS
        self.layout = kernels.Scratch(c.head_dim, most)
        self.scratch = torch.zeros(threads, self.layout.size, dtype=torch.uint8)
        self.counters = torch.zeros(2, dtype=torch.int64)
        self.kernels = llvm_jit.Kernels(
            {
                "attention": lambda code: kernels.attention(code, c, self.layout, self.few),
                "norm": lambda code: kernels.norm(code, c.hidden, c.norm_eps),
                "gate": lambda code: kernels.gate(code, c.intermediate),
            }
        )

    @property
    def instructions(self) -> str:
        """Which the kernels are compiled for."""
        return self.kernels.instructions

    def kv(self, blocks: int, block: int) -> Tensor:
        """(layers, blocks, units, kv_heads, keys and values, 16 * head_dim), zeros."""
        c = self.config
        shape = (c.layers, blocks, block // UNIT, c.kv_heads, 2, UNIT * c.head_dim)
        return torch.zeros(shape, dtype=torch.bfloat16)

    def _parts(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """KV of some blocks as views of its keys, (layers, units, kv_heads, head_dim/2, 16, 2), and of its values,
        (layers, units, kv_heads, 8, head_dim, 2)."""
        heads, dim = self.config.kv_heads, self.config.head_dim
        units = kv.view(kv.shape[0], -1, heads, 2, UNIT * dim)
        one = units.shape[:3]
        return units[:, :, :, 0].view(*one, dim // 2, UNIT, 2), units[:, :, :, 1].view(*one, UNIT // 2, dim, 2)

    def tokens(self, kv: Tensor) -> Tensor:
        """KV of some blocks, (layers, blocks, ...) -> (layers, tokens, 2, kv_heads, head_dim)."""
        c = self.config
        keys, values = self._parts(kv)
        flat = (kv.shape[0], -1, c.kv_heads, c.head_dim)
        return torch.stack(
            (keys.permute(0, 1, 4, 2, 3, 5).reshape(flat), values.permute(0, 1, 3, 5, 2, 4).reshape(flat)), 2
        )

    def units(self, kv: Tensor) -> Tensor:
        """The inverse of `tokens`, of whole units: (layers, units, kv_heads, 2, 16 * head_dim)."""
        layers, heads, dim = kv.shape[0], self.config.kv_heads, self.config.head_dim
        made = kv.new_empty(layers, kv.shape[1] // UNIT, heads, 2, UNIT * dim)
        keys, values = self._parts(made)
        keys.copy_(kv[:, :, 0].reshape(layers, -1, UNIT, heads, dim // 2, 2).permute(0, 1, 3, 4, 2, 5))
        values.copy_(kv[:, :, 1].reshape(layers, -1, UNIT // 2, 2, heads, dim).permute(0, 1, 4, 2, 5, 3))
        return made

    def move(self, kv: Tensor, slots: Tensor, to: Tensor) -> None:
        """Copy the keys and values of the tokens at `slots`, all layers, to the slots `to`."""
        keys, values = self._parts(kv)
        at, old, new, place = slots // UNIT, slots % UNIT, to // UNIT, to % UNIT
        keys[:, new, :, :, place] = keys[:, at, :, :, old]
        values[:, new, :, place // 2, :, place % 2] = values[:, at, :, old // 2, :, old % 2]

    def attention(
        self, qkv: Tensor, kv: Tensor, work: Work, window: int | None = None, qk_norm: Tensor | None = None
    ) -> Tensor:
        """(rows, heads + 2 * kv_heads, head_dim) -> (rows, heads * head_dim), writing the rows' KV.

        Norms (with the weights `qk_norm`, as in `Layer`) and rotates the queries in place. window: tokens that a token
        sees, its own included.
        """
        c = self.config
        out = torch.empty(qkv.shape[0], c.heads * c.head_dim, dtype=torch.bfloat16)
        self.counters.zero_()
        arguments = Arguments[Tensor | int](
            qkv=qkv,
            out=out,
            kv=kv,
            rows=qkv.shape[0],
            positions=work.positions,
            slots=work.slots,
            ends=work.ends,
            tasks=work.tasks,
            decodes=work.decodes,
            total=work.tasks.shape[0],
            counters=self.counters,
            scratch=self.scratch,
            angles=self.angles,
            units=work.units,
            window=NO_WINDOW if window is None else window,
            norm=0 if qk_norm is None else qk_norm,
        )
        self.kernels.launch("attention", self.threads, *arguments)
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = x.shape[0]
        self.kernels.launch("norm", self._threads(rows, 8), x, weight, out, rows)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """(rows, gate and up) -> silu(gate) * up"""
        rows = x.shape[0]
        out = torch.empty(rows, x.shape[1] // 2, dtype=torch.bfloat16)
        self.kernels.launch("gate", self._threads(rows, 4), x, out, rows)
        return out

    def _threads(self, rows: int, each: int) -> int:
        """Of few rows one thread is done before another would have woken up."""
        return max(1, min(self.threads, rows // each))
