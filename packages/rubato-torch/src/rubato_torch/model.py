"""The packed forward pass over paged KV, of every family in `model_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rubato.core.plan import Batch, Entry
from rubato.core.request import NOTHING
from rubato_torch.attention_groups import Chunks, Decodes, Seen
from rubato_torch.batch_tensors import Packed, pack
from rubato_torch.cpu import native
from rubato_torch.model_config import Config
from rubato_torch.trees import Candidates
from rubato_torch.weights import Weights


def bytes_per_token(config: Config, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes, all layers."""
    return config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize


class Model:
    """Weights and KV. kv: (layers, blocks, block, 2, kv_heads, head_dim): per token its keys, then its values, so
    that a step writes both at once and reads both at once. Where the native kernels suit, they do all but the matrix
    products, and kv is (layers, blocks, ...) as they lay it out."""

    def __init__(
        self, config: Config, weights: Weights, blocks: int, block: int, spare: int = 0, threads: int | None = None
    ) -> None:
        """spare: blocks beyond these that the native kernels may lay candidates in; without them trees that branch are
        PyTorch's. threads: the most that a step may run on; None: PyTorch's at this moment, which is right only where
        no other engine of the process may change it meanwhile."""
        self.most_threads = torch.get_num_threads() if threads is None else threads
        self.config = config
        self.weights = weights
        dtype, device = weights.embed.dtype, weights.embed.device
        self.native: native.Native | None = None
        if native.suits(config, dtype, device, block):
            self.native = native.Native(config, weights.cos, weights.sin, self.most_threads)
            self.kv = self.native.kv(blocks + spare, block)
        else:
            shape = (config.layers, blocks, block, 2, config.kv_heads, config.head_dim)
            self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.block = block
        self.spare = range(blocks, blocks + spare)
        self.threads = self.most_threads
        self.windows = frozenset(config.windows)

    def use_threads(self, count: int) -> None:
        """Run further steps on so many threads; to be called on the thread that runs them. Raises ValueError for more
        than `most_threads`: the kernels have scratch memory for no more."""
        if not 1 <= count <= self.most_threads:
            raise ValueError(f"{count} threads: this model has memory for 1 to {self.most_threads}")
        if count != self.threads:
            self.threads = count
            torch.set_num_threads(count)
            if self.native is not None:
                self.native.threads = count

    def pack(
        self, batch: Batch, tokens: Mapping[str, Sequence[int]], candidates: Mapping[str, Candidates] = NOTHING
    ) -> Packed:
        """Lay a batch out for `forward`; `tokens` holds every token id so far of each sequence in it, `candidates` the
        nodes that its entries verify."""
        compiled, dtype, device = self.native is not None, self.kv.dtype, self.kv.device
        return pack(batch, tokens, self.block, dtype, device, self.windows, compiled, candidates, self.spare)

    def forward(self, packed: Packed) -> Tensor:
        """Write the batch's KV and return the logits of its sampled rows, (len(packed.sampled), vocab)."""
        w = self.weights
        x = F.embedding(packed.ids, w.embed)
        if (paths := packed.paths) is not None and len(paths.blocks):
            self.kv[:, paths.copies] = self.kv[:, paths.blocks]
        turns = (w.cos[packed.positions], w.sin[packed.positions]) if self.native is None else None
        for layer, kv, window in zip(w.layers, self.kv, self.config.windows, strict=True):
            qkv = layer.qkv(self._norm(x, layer.attention_norm))
            if turns is not None:
                mixed = self._attention(qkv, kv, packed.slots, packed.seen[window], layer.qk_norm, *turns)
            else:
                mixed = self._native_attention(qkv, kv, packed, window, layer.qk_norm)
            x = layer.out.add(mixed, x)
            x = layer.down.add(self._gate(layer.gate_up(self._norm(x, layer.mlp_norm))), x)
        if len(packed.sampled) != x.shape[0]:
            x = x[packed.sampled]
        return w.head(self._norm(x, w.norm))

    def warm_up(self) -> None:
        """Run one step of a decode and a chunk in block 0, so that kernels and buffers are there before the first."""
        entries = (Entry("decode", 0, 1, (0,), True), Entry("chunk", 0, self.block, (0,), True))
        ids = {entry.seq: (0,) * entry.count for entry in entries}
        self.forward(self.pack(Batch(entries), ids))
        self.kv[:, 0].zero_()

    def read_kv(self, blocks: Sequence[int], tokens: int) -> Tensor:
        """(layers, tokens, 2, kv_heads, head_dim): a copy of the first `tokens` tokens' keys and values in `blocks`."""
        held = self.kv[:, torch.tensor(blocks[: self._blocks(tokens)], dtype=torch.int64, device=self.kv.device)]
        if self.native is not None:
            held = self.native.tokens(held)
        c = self.config
        return held.reshape(c.layers, -1, 2, c.kv_heads, c.head_dim)[:, :tokens].contiguous()

    def write_kv(self, blocks: Sequence[int], new: Tensor) -> None:
        """The same back: `new` into the first tokens of `blocks`, of which the rest of the last one becomes 0."""
        tokens = new.shape[1]
        count = self._blocks(tokens)
        at = torch.tensor(blocks[:count], dtype=torch.int64, device=self.kv.device)
        held = F.pad(new, (0, 0, 0, 0, 0, 0, 0, count * self.block - tokens))
        if self.native is not None:
            held = self.native.units(held)
        self.kv[:, at] = held.reshape(self.kv.shape[0], count, *self.kv.shape[2:])

    def move_kv(self, slots: Sequence[int], to: Sequence[int]) -> None:
        """Copy the KV of the tokens at `slots`, all layers, to the slots `to`; all are read before any is written."""
        if not slots:
            return
        old, new = torch.tensor([slots, to], device=self.kv.device)
        if self.native is not None:
            self.native.move(self.kv, old, new)
        else:
            flat = self.kv.view(self.config.layers, -1, 2 * self.config.kv_heads * self.config.head_dim)
            flat[:, new] = flat[:, old]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.native is not None:
            return self.native.norm(x, weight)
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _gate(self, x: Tensor) -> Tensor:
        """(rows, gate and up) -> silu(gate) * up"""
        if self.native is not None:
            return self.native.gate(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def _native_attention(
        self, qkv: Tensor, kv: Tensor, packed: Packed, window: int | None, qk_norm: Tensor | None
    ) -> Tensor:
        """As `_attention`, by the kernels."""
        assert self.native is not None
        assert packed.work is not None
        paths = packed.paths
        if paths is not None:
            qkv = qkv[paths.expand]
        mixed = self.native.attention(qkv, kv, packed.work, window, qk_norm)
        if paths is not None:
            mixed = mixed[paths.collapse]
        if packed.masked:  # their queries are rotated, and their KV is written
            qkv = qkv if paths is None else qkv[paths.collapse]
            parts = [self._chunks(qkv, kv, group) for group in packed.seen[window].chunks]
            torch.cat(parts, out=mixed[-packed.masked :])
        return mixed

    def _attention(
        self, qkv: Tensor, kv: Tensor, slots: Tensor, seen: Seen, qk_norm: Tensor | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """(rows, (heads + 2 * kv_heads) * head_dim) -> (rows, heads * head_dim), the rows' keys and values written to
        `kv`; qkv is normed and rotated in place."""
        c = self.config
        rows = qkv.shape[0]
        heads = qkv[:, : (c.heads + c.kv_heads) * c.head_dim].view(rows, -1, c.head_dim)
        if qk_norm is not None:
            heads.copy_(F.rms_norm(heads, (c.head_dim,), None, c.norm_eps).mul_(qk_norm))
        rotated = heads.view(rows, -1, 2, c.head_dim // 2)
        swapped = rotated.flip(2)
        rotated.mul_(cos).addcmul_(swapped, sin)
        q, new = qkv.tensor_split((c.heads * c.head_dim,), -1)
        kv.view(-1, new.shape[1]).index_copy_(0, slots, new)
        parts = [self._decode(q, kv, group) for group in seen.decodes]
        parts += [self._chunks(q, kv, group) for group in seen.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, q: Tensor, kv: Tensor, group: Decodes) -> Tensor:
        """The query heads that share a KV head are the rows of one product: KV is read once, and never repeated."""
        c = self.config
        n = group.last - group.first
        q = q[group.first : group.last].view(n, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        held = kv.index_select(0, group.blocks).view(n, -1, 2, c.kv_heads, c.head_dim)
        keys, values = held[:, : group.length].permute(2, 0, 3, 1, 4)
        mask = None if group.mask is None else group.mask.expand(n, c.kv_heads, q.shape[2], group.length)
        return F.scaled_dot_product_attention(q, keys, values, mask).reshape(n, -1)

    def _chunks(self, q: Tensor, kv: Tensor, group: Chunks) -> Tensor:
        """q: (rows, heads * head_dim and whatever follows), rotated; kv: one layer's, in either layout."""
        c = self.config
        q = q[group.rows, : c.heads * c.head_dim].view(-1, group.most, c.heads, c.head_dim).transpose(1, 2)
        held = kv.index_select(0, group.blocks)
        if self.native is not None:
            held = self.native.tokens(held[None])
        held = held.view(q.shape[0], -1, 2, c.kv_heads, c.head_dim)
        keys, values = held[:, : group.length].permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, keys, values, group.mask, is_causal=group.mask is None, enable_gqa=c.heads != c.kv_heads
        )
        return mixed.transpose(1, 2).reshape(-1, c.heads * c.head_dim)[group.own]
