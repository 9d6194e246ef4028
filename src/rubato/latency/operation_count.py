"""Operation count (Ascendra, §4.2 and its appendix A.4): the arithmetic F and the memory traffic M of a batch follow
from the model's dimensions; with t_M = M/memory and t_F = F/compute the step takes

    T = C2·max(t_M, t_F) + C3·t_M + C4·t_F + C5

The paper also has C1·(t_M + t_F), which C3 and C4 say already: it is left out (C1 = 0). F is two operations a
multiply-add, M the elements read and written; weights are read once a batch. Unlike the paper's tables this counts
grouped-query heads and gated feed-forward blocks as the model has them. A chunk of c tokens on k cached ones attends to
l = k + c: F = 4·s·n_q·l·c, M = dtype·(2·l·s·n_kv + 3·c·s·n_q·l/b), b the rows of a FlashAttention block; a decode:
F = 4·s·n_q·l, M = dtype·(2·l·s·n_kv + 2·s·n_kv). Both are linear in a `Shape`'s sums, so nothing is approximated. One
row a sequence goes through the output matrix. Heads and widths, hence all costs, are divided by the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_dims import Dims
from rubato.latency.roofline_fit import Array, Coefficients, fit_planes

LLAMA_8B = Dims(layers=32, hidden=4096, heads=32, kv_heads=8, head=128, ffn=14336, vocab=128256)


@dataclass(slots=True)
class Model(FittedModel):
    """A step takes the time of its operations or of its memory traffic, whichever is longer. By default compute and
    memory are the paper's, an A100's, and the longer of the two counts, plus 5 ms.

    Args:
        dims: of the model served.
        gpus: over which it is split.
        compute: operations/s of one GPU.
        memory: bytes/s of one GPU.
        block: rows of an attention kernel's block.
        c2, c3, c4: shares of time, >= 0.
        c5: seconds, >= 0.

    Raises:
        ValueError: numbers that cannot be.
    """

    KIND: ClassVar = "operation_count"
    TITLE: ClassVar = "an operation_count model"
    SETTINGS: ClassVar = ("dims", "gpus", "compute", "memory", "block", "c2", "c3", "c4", "c5")
    GUESSED: ClassVar = ("dims", "compute", "memory", "c5")  # of some model on some GPU
    MIN_SAMPLES: ClassVar = 8
    dims: Dims = LLAMA_8B
    gpus: int = 1
    compute: float = 312e12
    memory: float = 2e12
    block: int = 128
    c2: float = 1.0
    c3: float = 0.0
    c4: float = 0.0
    c5: float = 5e-3
    _traffic: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _work: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def _check(self) -> None:
        if isinstance(self.dims, Mapping):  # from a configuration
            self.dims = Dims(**self.dims)
        for name in ("gpus", "compute", "memory", "block"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"operation_count {name} is {getattr(self, name)!r}: give a positive, finite number")
        self._check_numbers(("c2", "c3", "c4", "c5"), unit="")
        if max(self.c2, self.c3, self.c4, self.c5) <= 0.0:
            raise ValueError(
                "operation_count c2 to c5 are all 0, so every step would take no time: give one a positive value"
            )
        self._traffic, self._work = self._counted()

    def times(self, shape: Shape) -> tuple[float, float]:
        """(t_M, t_F): seconds that the batch's memory traffic and its arithmetic would take by themselves."""
        tokens, seqs, kv, span = shape.tokens, shape.seqs, shape.kv, shape.chunk_context + shape.chunk_sq
        decodes = seqs - shape.chunks
        m, f = self._traffic, self._work
        return (
            m[0] + m[1] * tokens + m[2] * seqs + m[3] * kv + m[4] * span + m[5] * decodes,
            f[0] * tokens + f[1] * seqs + f[2] * (kv - shape.chunk_kv + span),
        )

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes."""
        t_m, t_f = self.times(shape)
        slower = t_m if t_m > t_f else t_f
        return self.online.factor * (self.c2 * slower + self.c3 * t_m + self.c4 * t_f + self.c5)

    def features(self, shape: Shape) -> tuple[float, ...]:
        """Two planes of a constant alone are one constant, the larger; all else is shared."""
        t_m, t_f = self.times(shape)
        return (1.0, max(t_m, t_f), t_m, t_f)

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """c2 to c5 by non-negative least squares, outliers left out. Raises ValueError when there are too few different
        samples."""
        if len(np.unique(rows[:, :-1], axis=0)) < 3:
            raise ValueError(
                "the samples hold fewer than 3 different batches: an operation_count cannot be told from a constant"
            )
        self._take(fit_planes(rows[:, :1], rows[:, 1:-1], rows[:, -1]))

    def _refit(self) -> Coefficients | None:
        current = Coefficients(np.array([[0.0], [self.c5]]), np.array([self.c2, self.c3, self.c4]))
        return self.online.refit(current, 0.0)

    def _take(self, fitted: Coefficients) -> None:
        self.c5 = float(fitted.planes.max())
        self.c2, self.c3, self.c4 = fitted.shared.tolist()

    def _counted(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of traffic per (batch, token, sequence, KV token, Σ c·l, decode), and of arithmetic per (token,
        sequence, pair of query and key)."""
        d, b = self.dims, self.block
        queries, kv = d.heads * d.head, d.kv_heads * d.head
        # elements in and out of a layer's matrices, per token
        ffn = d.hidden + (2 if d.gated else 1) * d.ffn + d.ffn + d.hidden
        through = (d.hidden + queries + 2 * kv) + (queries + d.hidden) + ffn
        m = (
            d.layers * d.layer_bytes + d.dtype * d.hidden * d.vocab,
            d.dtype * d.layers * through,
            d.dtype * (d.hidden + d.vocab),
            d.kv_bytes,
            d.dtype * d.layers * 3 * queries / b,
            d.kv_bytes,
        )
        f = (2 * d.layers * d.layer_weights, 2 * d.hidden * d.vocab, 4 * d.layers * queries)
        return (
            tuple(x / self.gpus / self.memory for x in m),
            tuple(x / self.gpus / self.compute for x in f),
        )
