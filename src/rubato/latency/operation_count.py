"""Operation count (Ascendra, §4.2 and its appendix A.4): the arithmetic F and the memory traffic M of a batch follow
from the model's dimensions; with t_M = M/memory and t_F = F/compute the step takes

    T = C2·max(t_M, t_F) + C3·t_M + C4·t_F + C5

The paper also has C1·(t_M + t_F), which C3 and C4 say already: it is left out (C1 = 0). F is two operations a
multiply-add, M the elements read and written; weights are read once a batch. Unlike the paper's tables this counts
grouped-query heads and gated feed-forward blocks as the model has them. A chunk of c tokens on k cached ones attends to
l = k + c: F = 4·s·n_q·l·c, M = dtype·(2·l·s·n_kv + 3·c·s·n_q·l/b), b the rows of a FlashAttention block; a decode:
F = 4·s·n_q·l, M = dtype·(2·l·s·n_kv + 2·s·n_kv). Both are linear in a `Shape`'s sums, so nothing is approximated. One
row a sequence goes through the output matrix. Heads and widths are divided by the GPUs, and so is everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from rubato.core.plan import Sample, Shape
from rubato.latency.model_dims import Dims
from rubato.latency.online import Learns, Online
from rubato.latency.roofline_fit import Coefficients, fit_planes, largest, numbers

MIN_SAMPLES = 8
NUMBERS = ("c2", "c3", "c4", "c5")
LLAMA_8B = Dims(layers=32, hidden=4096, heads=32, kv_heads=8, head=128, ffn=14336, vocab=128256)


@dataclass(slots=True)
class Model(Learns):
    """dims: of the model served; gpus: over which it is split. compute, memory: operations/s and bytes/s of one GPU
    (the defaults are the paper's, an A100); block: rows of an attention kernel's block. c2, c3, c4: shares of time, c5:
    seconds; all >= 0. The default takes the larger of the two times, and 5 ms. `window`: the number of steps that
    `update` remembers. Raises ValueError on numbers that cannot be.
    """

    GUESSED: ClassVar = ("dims", "compute", "memory", "c5")  # whose defaults are a guess: of some model on some GPU
    dims: Dims = LLAMA_8B
    gpus: int = 1
    compute: float = 312e12
    memory: float = 2e12
    block: int = 128
    c2: float = 1.0
    c3: float = 0.0
    c4: float = 0.0
    c5: float = 5e-3
    window: int = field(default=512, compare=False, kw_only=True)
    online: Online = field(init=False, repr=False, compare=False)
    _traffic: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _work: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.dims, Mapping):  # from a configuration
            self.dims = Dims(**self.dims)
        for name in ("gpus", "compute", "memory", "block"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"opcount {name} is {getattr(self, name)!r}: give a positive, finite number")
        for name in NUMBERS:
            (value,) = numbers(f"opcount {name}", [getattr(self, name)])
            if not 0.0 <= value < math.inf:
                raise ValueError(f"opcount {name} is {value}: give a finite number, 0 or more")
            setattr(self, name, value)
        if max(self.c2, self.c3, self.c4, self.c5) <= 0.0:
            raise ValueError("opcount c2 to c5 are all 0, so every step would take no time: give one a positive value")
        self.online = Online(columns=1, size=self.window)
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

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        return largest(lambda c: self.step_time(base.plus(c, cached)) <= seconds, most, float(most))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fit c2 to c5 from scratch by non-negative least squares in relative error, outliers left out. Raises
        ValueError when there are too few samples, or too few different ones."""
        if len(samples) < MIN_SAMPLES:
            raise ValueError(
                f"{len(samples)} samples cannot determine an opcount: measure at least {MIN_SAMPLES} steps"
            )
        rows = np.array([self._row(s) for s in samples], dtype=np.float64)
        if not ((rows[:, -1] > 0.0) & (rows[:, -1] < np.inf)).all():
            raise ValueError("a sample took no time or for ever: every step needs a positive, finite number of seconds")
        if len(np.unique(rows[:, :-1], axis=0)) < 3:
            raise ValueError(
                "the samples hold fewer than 3 different batches: an opcount cannot be told from a constant"
            )
        self._take(fit_planes(rows[:, :1], rows[:, 1:-1], rows[:, -1]))
        self.online = Online(columns=1, size=self.window)
        for sample in samples:
            self.online.window.add(sample.shape, self._row(sample))

    def update(self, sample: Sample) -> None:
        """Learn from one more step (`online`): the speed at once, the coefficients every so many steps, from a bounded
        window. Raises ValueError on an empty step or one that took no time."""
        if sample.shape.tokens < 1:
            raise ValueError("a sample has no tokens: only steps that ran something can be learnt from")
        raw = self.step_time(sample.shape) / self.online.factor
        if self.online.seen(sample.shape, self._row(sample), raw):
            current = Coefficients(np.array([[0.0], [self.c5]]), np.array([self.c2, self.c3, self.c4]))
            found = self.online.refit(current, 0.0)
            if found is not None:
                self._take(found)

    def to_dict(self) -> dict[str, object]:
        """For JSON. The factor of the moment and the window are not in it."""
        names = ("gpus", "compute", "memory", "block", *NUMBERS)
        return {"model": "opcount", "dims": asdict(self.dims), **{name: getattr(self, name) for name in names}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Model:
        """What `to_dict` gave. Raises ValueError, naming the keys, when it did not."""
        names = {"dims", "gpus", "compute", "memory", "block", *NUMBERS}
        if set(data) != {"model", *names} or data["model"] != "opcount":
            raise ValueError(
                f"not an opcount model: has {sorted(data)}, wants model = opcount, {', '.join(sorted(names))}"
            )
        return cls(**{name: data[name] for name in names})

    def _take(self, found: Coefficients) -> None:
        self.c5 = float(found.planes.max())
        self.c2, self.c3, self.c4 = found.shared.tolist()

    def _row(self, sample: Sample) -> tuple[float, ...]:
        """Two planes of a constant alone are one constant, the larger; all else is shared."""
        t_m, t_f = self.times(sample.shape)
        return (1.0, max(t_m, t_f), t_m, t_f, sample.seconds)

    def _counted(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of traffic per (batch, token, sequence, KV token, Σ c·l, decode), and of arithmetic per (token,
        sequence, pair of query and key)."""
        d, b = self.dims, self.block
        queries, kv = d.heads * d.head, d.kv_heads * d.head
        # elements in and out of a layer's matrices, per token
        ffn = d.hidden + (2 if d.gated else 1) * d.ffn + d.ffn + d.hidden
        through = (d.hidden + queries + 2 * kv) + (queries + d.hidden) + ffn
        m = (
            d.layers * d.layer_weights + d.hidden * d.vocab,
            d.layers * through,
            d.hidden + d.vocab,
            d.layers * 2 * kv,
            d.layers * 3 * queries / b,
            d.layers * 2 * kv,
        )
        f = (2 * d.layers * d.layer_weights, 2 * d.hidden * d.vocab, 4 * d.layers * queries)
        return (
            tuple(d.dtype * x / self.gpus / self.memory for x in m),
            tuple(x / self.gpus / self.compute for x in f),
        )
