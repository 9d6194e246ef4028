"""Straight lines below a step's time: what a step takes at least, as a sum over its entries.

    T >= fixed + token·tokens + seq·seqs + [if it decodes] (decode_fixed + decode·decodes + kv·KV that they read)
         + chunk_token·Σc + pair·Σ((k + c)² - k²), over chunks of c tokens on k cached ones

Why this is below `components`: seconds by tokens lie above each side of their lower convex hull; those by sequences
above the line of slope host_per_seq through their least excess; decode attention, bilinear between the knots of its
table, above a plane that is below it at all of these, found by a linear programme; and of the two times of prefill
attention one is left out, with its launch, while e·c² + d·c·k >= min(e, d/2)·(c² + 2ck). `affine` is such a sum, but
for its knee, which is the larger of two lines; the KV that its chunks read is left out. The last sum telescopes, so
the chunks of a prompt pay the same however it is cut. A chunk of one token is an entry that decodes, as in `Shape`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rubato.core.extras import extra
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits, Shape
from rubato.latency import affine, components

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Minorant:
    """Seconds: of a step (fixed), of each of its tokens and sequences; of its decodes together (decode_fixed), of each
    of them, and of each KV token that they read; of each token of its chunks, and each pair of tokens of one prompt.
    decode >= -seq, all others >= 0: to leave an entry out never makes the sum larger."""

    fixed: float
    token: float
    seq: float
    decode_fixed: float
    decode: float
    kv: float
    chunk_token: float
    pair: float

    def seconds(self, shape: Shape) -> float:
        """Of a step without drafts: never more than the model's `step_time`."""
        decodes = shape.seqs - shape.chunks
        own = self.fixed + self.token * shape.tokens + self.seq * shape.seqs
        if decodes:
            own += self.decode_fixed + self.decode * decodes + self.kv * (shape.kv - shape.chunk_kv)
        chunks = self.chunk_token * (shape.tokens - decodes) + self.pair * (shape.chunk_sq + 2 * shape.chunk_context)
        return own + (chunks if shape.chunks else 0.0)

    def decode_seconds(self, kv: Array) -> Array:
        """Of one decode that reads `kv` tokens, beside what is fixed."""
        return self.token + self.seq + self.decode + self.kv * kv

    def prefill_seconds(self, tokens: int) -> Array:
        """[n - 1]: of all chunks of a prompt of n tokens, beside what is fixed, n up to `tokens`, however it is cut: a
        token on k cached ones is part of a chunk, or an entry of its own; the last one's entry is there in any case."""
        k = np.arange(tokens, dtype=np.float64)
        in_chunk, single = self.chunk_token + self.pair * (2.0 * k + 1.0), self.decode + self.kv * (k + 1.0)
        before = np.concatenate([[0.0], np.cumsum(np.minimum(in_chunk, self.seq + single))[:-1]])
        last: Array = before + self.seq + np.minimum(in_chunk, single) + self.token * (k + 1.0)
        return last


def minorants(model: LatencyModel, limits: Limits, seqs: float, kv: float) -> list[Minorant]:
    """One for each line of the seconds by tokens, the plane of decode attention close at `seqs` decodes that read `kv`
    tokens. Raises ValueError for a model that this is not worked out for, MissingExtra without SciPy."""
    if isinstance(model, affine.Model):
        factor = model.online.factor
        attention = (0.0, 0.0, model.a * factor, 0.0, min(model.e, model.d / 2.0) * factor)
        return [
            Minorant((b + model.host) * factor, k * factor, model.host_per_seq * factor, *attention)
            for k, b in zip(model.k, model.b, strict=True)
        ]
    if not isinstance(model, components.Model):
        raise ValueError(
            f"no bound is worked out for step times of {type(model).__module__}: give a packaged --profile of kernel "
            "tables, or `latency` of kind affine"
        )
    seq = model.host_per_seq
    rows = min(_fixed(model, 1, n) - seq * n for n in range(1, limits.max_num_seqs + 1))

    def seconds(tokens: int) -> float:
        return _fixed(model, tokens, 0) - _fixed(model, 1, 0) + rows

    _, chunk_token, square, context = model.tables.chunk_attention(model.factors)
    plane = _plane_below_decodes(model, limits, seqs, kv)
    return [
        Minorant(fixed, token, seq, *plane, chunk_token, min(square, context / 2.0))
        for fixed, token in _lines_below(seconds, limits.max_num_batched_tokens)
    ]


def _fixed(model: components.Model, tokens: int, seqs: int) -> float:
    """Seconds of a step of so many tokens and sequences without attention."""
    return model.seconds_of(tokens, seqs, 0, 0, 0, seqs, 0)


def _lines_below(seconds: Callable[[int], float], most: int) -> list[tuple[float, float]]:
    """(intercept, slope) of those sides of the lower convex hull of `seconds` over 1 to `most` that a power of two is
    on (to leave others out only loosens a bound) and that begin at 0 or above: a negative intercept could not be spread
    over a batch."""
    hull: list[tuple[int, float]] = []
    for n in range(1, most + 1):
        y = seconds(n)
        while len(hull) > 1 and _above(hull[-2], hull[-1], (n, y)):
            hull.pop()
        hull.append((n, y))
    lines = []
    for (x0, y0), (x1, y1) in pairwise(hull):
        if 1 << (x1 - 1).bit_length() - 1 >= x0:
            slope = (y1 - y0) / (x1 - x0)
            lines.append((y0 - slope * x0, slope))
    return [line for line in lines if line[0] >= 0.0] or [(0.0, min(y / x for x, y in hull))]


def _above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _plane_below_decodes(model: components.Model, limits: Limits, seqs: float, kv: float) -> tuple[float, float, float]:
    """(constant, for each decode, for each KV token) of the plane that is largest at (seqs, kv) among those below
    decode attention wherever a batch can be."""
    with extra("bound", "a bound"):
        from scipy.optimize import linprog
    most, memory = limits.max_num_seqs, limits.kv_blocks * limits.block_size
    batches = sorted({1, most, *(n for n in model.tables.decode["batch"] if n < most)})
    totals = sorted({4, memory, *(int(k) for k in components.knots() if k < memory)})
    corners = [(n, k) for n in batches for k in totals]
    times = np.array([model.seconds_of(n, n, k, 0, 0, 0, 0) - _fixed(model, n, n) for n, k in corners])
    unit = np.array([1.0, most, memory])  # so that all three are of one size
    rows = np.column_stack([np.ones(len(corners)), np.array(corners)]) / unit
    scale = float(times.max()) or 1.0
    best = linprog(
        -np.array([1.0, seqs, kv]) / unit, A_ub=rows, b_ub=times / scale,
        bounds=[(0.0, None), (-model.host_per_seq * most / scale, None), (0.0, None)],
    )  # fmt: skip
    if best.status != 0:
        raise RuntimeError(f"no plane below decode attention: {best.message}")
    constant, each, token = (best.x / unit * scale).tolist()
    lowered = constant - max(0.0, float((rows @ (best.x * scale) - times).max()))  # by the solver's tolerance
    return max(0.0, lowered), max(each, -model.host_per_seq), token
