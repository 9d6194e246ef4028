"""The bfloat16 CPU path's own kernels: attention over paged KV in place, norms, and the gate of the MLP.

They read KV in a layout of their own, which `kernels` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rubato.core.plan import Entry
from rubato.engines.torch import cpu_kernels, llvm_jit
from rubato.engines.torch.cpu_kernels import ROWS, STEP, UNIT
from rubato.engines.torch.model_config import Config

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
    ends: list[int] = []
    row = 0
    for e in entries:
        last = e.start + e.count
        at = len(units)
        if per_block == 1:
            units += e.blocks[: (last + UNIT - 1) // UNIT]
        else:
            held = (b * per_block + i for b in e.blocks for i in range(per_block))
            units += [u for u, _ in zip(held, range((last + UNIT - 1) // UNIT), strict=False)]
        units += units[-1:] * (-(len(units) - at) % (STEP // UNIT))  # a step reads so many, masked
        if e.count == 1:
            tasks.append((row, 1, e.start, at))
        else:
            tiles += [(row + i, min(TILE, e.count - i), e.start + i, at) for i in range(0, e.count, TILE)]
        ends += [0] * (e.count - 1)
        ends.append(1)
        row += e.count
    for e in trees:
        ends += [0] * (e.count - 1)
        ends.append(1)
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
        self.layout = cpu_kernels.Scratch(c.head_dim, most)
        self.scratch = torch.zeros(threads, self.layout.size, dtype=torch.uint8)
        self.counters = torch.zeros(2, dtype=torch.int64)
        self.kernels = llvm_jit.Kernels(
            {
                "attention": lambda code: cpu_kernels.attention(code, c, self.layout, self.few),
                "norm": lambda code: cpu_kernels.norm(code, c.hidden, c.norm_eps),
                "gate": lambda code: cpu_kernels.gate(code, c.intermediate),
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

    def tokens(self, kv: Tensor) -> Tensor:
        """KV of some blocks, (layers, blocks, ...) -> (layers, tokens, 2, kv_heads, head_dim)."""
        c = self.config
        units = kv.reshape(kv.shape[0], -1, c.kv_heads, 2, UNIT * c.head_dim)
        one = units.shape[:3]
        keys = units[:, :, :, 0].view(*one, c.head_dim // 2, UNIT, 2).permute(0, 1, 4, 2, 3, 5)
        values = units[:, :, :, 1].view(*one, UNIT // 2, c.head_dim, 2).permute(0, 1, 3, 5, 2, 4)
        flat = (kv.shape[0], -1, c.kv_heads, c.head_dim)
        return torch.stack((keys.reshape(flat), values.reshape(flat)), 2)

    def units(self, kv: Tensor) -> Tensor:
        """The inverse of `tokens`, of whole units: (layers, units, kv_heads, 2, 16 * head_dim)."""
        c = self.config
        at = (c.layers, -1, UNIT, c.kv_heads, c.head_dim)
        keys, values = kv[:, :, 0].reshape(at), kv[:, :, 1].reshape(at)
        one = keys.shape[:2]
        keys = keys.view(*one, UNIT, c.kv_heads, c.head_dim // 2, 2).permute(0, 1, 3, 4, 2, 5)
        values = values.view(*one, UNIT // 2, 2, c.kv_heads, c.head_dim).permute(0, 1, 4, 2, 5, 3)
        flat = (*one, c.kv_heads, UNIT * c.head_dim)
        return torch.stack((keys.reshape(flat), values.reshape(flat)), 3)

    def move(self, kv: Tensor, slots: Tensor, to: Tensor) -> None:
        """Copy the keys and values of the tokens at `slots`, all layers, to the slots `to`."""
        c = self.config
        units = kv.view(c.layers, -1, c.kv_heads, 2, UNIT * c.head_dim)
        one = units.shape[:3]
        keys = units[:, :, :, 0].view(*one, c.head_dim // 2, UNIT, 2)
        values = units[:, :, :, 1].view(*one, UNIT // 2, c.head_dim, 2)
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
        self.kernels.launch(
            "attention",
            self.threads,
            qkv.data_ptr(),
            out.data_ptr(),
            kv.data_ptr(),
            qkv.shape[0],
            work.positions.data_ptr(),
            work.slots.data_ptr(),
            work.ends.data_ptr(),
            work.tasks.data_ptr(),
            work.decodes,
            work.tasks.shape[0],
            self.counters.data_ptr(),
            self.scratch.data_ptr(),
            self.angles.data_ptr(),
            work.units.data_ptr(),
            NO_WINDOW if window is None else window,
            0 if qk_norm is None else qk_norm.data_ptr(),
        )
        return out

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = x.shape[0]
        self.kernels.launch("norm", self._threads(rows, 8), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows)
        return out

    def gate(self, x: Tensor) -> Tensor:
        """(rows, gate and up) -> silu(gate) * up"""
        rows = x.shape[0]
        out = torch.empty(rows, x.shape[1] // 2, dtype=torch.bfloat16)
        self.kernels.launch("gate", self._threads(rows, 4), x.data_ptr(), out.data_ptr(), rows)
        return out

    def _threads(self, rows: int, each: int) -> int:
        """Of few rows one thread is done before another would have woken up."""
        return max(1, min(self.threads, rows // each))
