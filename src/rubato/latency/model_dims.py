"""The dimensions of a decoder-only transformer that its work per step follows from."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions of a model that decide what a step costs.

    Args:
        layers: number of layers.
        hidden: width of the residual stream.
        heads, kv_heads: query heads and (grouped) key/value heads of `head` elements each.
        ffn: width inside the feed-forward block, `gated` with two matrices in and one out.
        vocab: rows of the embedding.
        dtype: bytes per element of weights, activations and KV.
        weight_size, kv_size: of the layers' matrices (1 in FP8, 0.5625 in NVFP4 with its scales) and of KV, where they
            differ.
        tied: whether input and output embedding are one matrix.

    Raises:
        ValueError: dimensions that cannot be.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    dtype: int = 2
    weight_size: float | None = None
    kv_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < (0.5 if name == "weight_size" else 1) and name not in ("gated", "tied"):
                raise ValueError(f"a model with {name} = {value}: give 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices: q, k, v, output, and two or three of the feed-forward block."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_bytes(self) -> float:
        """Of one layer's matrices."""
        return (self.dtype if self.weight_size is None else self.weight_size) * self.layer_weights

    @property
    def weight_bytes(self) -> int:
        embeddings = (1 if self.tied else 2) * self.vocab * self.hidden
        norms = (2 * self.layers + 1) * self.hidden
        return int(self.layers * self.layer_bytes) + self.dtype * (norms + embeddings)

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values, all layers."""
        return 2 * (self.kv_size or self.dtype) * self.layers * self.kv_heads * self.head
