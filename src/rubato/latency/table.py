"""A profile table (PolyServe, §4.5): (tokens of the batch, KV tokens it reads) -> measured time of a step.

Between the measured knots it interpolates on both axes; it never falls along either. Outside the measured range it
takes the nearest edge, and warns once: such a prediction is a guess. Prefill attention is not seen, as in the paper,
which argues that for prompts below 10,000 tokens it is small; `affine` sees it.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel, numbers
from rubato.latency.least_squares import isotonic
from rubato.latency.model_base import knee_of
from rubato.latency.roofline_fit import Array

KNOTS = 20  # on each axis, at most
SMOOTH = 1e-3  # weight of a second difference beside one measured step: decides only where nothing was measured
UNSEEN = 1e-6  # what a cell without samples weighs beside the one with most, when the table is made to rise
PROJECTIONS = 30


@dataclass(slots=True)
class Model(FittedModel):
    """A step takes the time of a table, interpolated. The default is a rough guess to begin with. A table that falls
    along an axis is evened out first (the mean of its running maxima from both ends).

    Args:
        tokens, kv: the knots, rising.
        seconds: seconds[i][j] is the time of a step of tokens[i] that reads kv[j].

    Raises:
        ValueError: a table that is not one.
    """

    KIND: ClassVar = "table"
    TITLE: ClassVar = "a table"
    SETTINGS: ClassVar = ("tokens", "kv", "seconds")
    GUESSED: ClassVar = ("tokens", "kv", "seconds")
    MIN_SAMPLES: ClassVar = 16
    tokens: tuple[float, ...] = (1.0, 128.0, 8192.0)
    kv: tuple[float, ...] = (0.0, 1e6)
    seconds: tuple[tuple[float, ...], ...] = ((0.01, 0.04), (0.01, 0.04), (0.4, 0.43))
    _warned: bool = field(init=False, repr=False, compare=False, default=False)

    def _check(self) -> None:
        for name in ("tokens", "kv"):
            knots = numbers(f"table {name}", getattr(self, name))
            if len(knots) < 2 or not all(a < b < math.inf for a, b in pairwise(knots)) or knots[0] < 0.0:
                raise ValueError(f"table {name} is {knots}: give two or more rising numbers of tokens")
            setattr(self, name, knots)
        grid = np.array(self.seconds, dtype=np.float64)
        if grid.shape != (len(self.tokens), len(self.kv)):
            raise ValueError(f"table seconds is {grid.shape}: give {len(self.tokens)} rows of {len(self.kv)}")
        if not ((grid > 0.0) & (grid < np.inf)).all():
            raise ValueError("table seconds holds one that is not positive and finite: every step takes some time")
        self.seconds = tuple(tuple(row) for row in _rising(grid).tolist())

    def features(self, shape: Shape) -> tuple[float, ...]:
        return (1.0, shape.tokens, shape.kv)

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes. Warns once when it is outside the measured range."""
        tokens, kv = float(shape.tokens), float(shape.kv)
        x, y = self.tokens, self.kv
        if not (x[0] <= tokens <= x[-1] and y[0] <= kv <= y[-1]):
            self._warn(shape)
            tokens, kv = min(max(tokens, x[0]), x[-1]), min(max(kv, y[0]), y[-1])
        i, j = min(bisect_right(x, tokens), len(x) - 1), min(bisect_right(y, kv), len(y) - 1)
        down, up = self.seconds[i - 1], self.seconds[i]
        u, v = (tokens - x[i - 1]) / (x[i] - x[i - 1]), (kv - y[j - 1]) / (y[j] - y[j - 1])
        low = down[j - 1] + u * (up[j - 1] - down[j - 1])
        high = down[j] + u * (up[j] - down[j])
        return self.online.factor * (low + v * max(high - low, 0.0))

    def knee(self, base: Shape) -> int:
        """By default, within the measured range."""
        return knee_of(self, base, max(0, int(self.tokens[-1]) - base.tokens))

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """Knots where the samples are (quantiles of each axis, its ends among them), times by least squares in relative
        error; a cell without samples goes on as its neighbours do. Raises ValueError when tokens or KV are the same in
        all."""
        at, seconds = rows[:, 1:3], rows[:, -1]
        axes = [_knots(column, len(samples)) for column in at.T]
        for name, knots in zip(("tokens", "KV"), axes, strict=True):
            if len(knots) < 2:
                raise ValueError(f"all samples have the same number of {name} tokens: vary it")
        grid = _solve(at, seconds, axes)
        self.tokens, self.kv = (tuple(knots.tolist()) for knots in axes)
        self.seconds = tuple(tuple(row) for row in _rising(np.maximum(grid, seconds.min())).tolist())
        self._warned = False

    def _warn(self, shape: Shape) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a batch of {shape.tokens} tokens that reads {shape.kv} of KV is outside the measured table "
                f"({self.tokens[0]:.0f} to {self.tokens[-1]:.0f} tokens, {self.kv[0]:.0f} to {self.kv[-1]:.0f} of KV): "
                "its edge is taken, for this and all further batches",
                stacklevel=3,
            )


def _knots(values: Array, count: int) -> Array:
    """Half of them quantiles of what was seen, half at even ratios between its ends: many where the steps are, some
    everywhere. No more than the samples can bear."""
    distinct = np.unique(values)
    most = max(2, min(KNOTS, math.isqrt(count // 4)))
    if len(distinct) <= most:
        return distinct
    quantiles = np.quantile(distinct, np.linspace(0.0, 1.0, most - most // 2))
    ratios = np.geomspace(max(distinct[0], 1.0), distinct[-1], most // 2 + 2)[1:-1]
    return np.unique(np.round(np.concatenate([quantiles, ratios])))


def _weights(values: Array, knots: Array) -> tuple[NDArray[np.intp], Array]:
    """Index of the knot below each value, and its share of the way to the next."""
    i = np.clip(np.searchsorted(knots, values, side="right") - 1, 0, len(knots) - 2)
    return i, np.clip((values - knots[i]) / (knots[i + 1] - knots[i]), 0.0, 1.0)


def _solve(at: Array, seconds: Array, axes: list[Array]) -> Array:
    """Times at the knots whose interpolation fits the samples best, smooth where there are none, never falling."""
    (i, u), (j, v) = (_weights(column, knots) for column, knots in zip(at.T, axes, strict=True))
    n, m = len(axes[0]), len(axes[1])
    parts = [(i, j, (1 - u) * (1 - v)), (i + 1, j, u * (1 - v)), (i, j + 1, (1 - u) * v), (i + 1, j + 1, u * v)]
    terms = [(a * m + b, part / seconds) for a, b, part in parts]
    smooth = _bends(axes[0], axes[1]) * (SMOOTH / float(np.median(seconds)))
    normal: Array = smooth.T @ smooth
    right, mass = np.zeros(n * m), np.zeros(n * m)
    for cells, shares in terms:  # a sample's row of the matrix has four numbers in it: only their products are summed
        right += np.bincount(cells, shares, n * m)
        mass += np.bincount(cells, shares * shares, n * m)
        for others, their in terms:
            products = np.bincount(cells * (n * m) + others, shares * their, (n * m) ** 2)
            normal = normal + products.reshape(n * m, n * m)
    grid = np.asarray(np.linalg.lstsq(normal, right)[0], dtype=np.float64).reshape(n, m)
    return _isotonic(grid, (mass + UNSEEN * mass.max()).reshape(n, m))


def _isotonic(grid: Array, weights: Array) -> Array:
    """The table closest to `grid` (least squares) whose rows and columns never fall, by Dykstra's projections."""
    now, off_rows, off_columns = grid, np.zeros_like(grid), np.zeros_like(grid)
    for _ in range(PROJECTIONS):
        target = now + off_rows
        now = np.array([isotonic(y, w) for y, w in zip(target, weights, strict=True)])
        off_rows = target - now
        target = now + off_columns
        now = np.array([isotonic(y, w) for y, w in zip(target.T, weights.T, strict=True)]).T
        off_columns = target - now
    return now


def _bends(x: Array, y: Array) -> Array:
    """How much the table bends at each inner knot of each row and column, against a straight line."""
    n, m = len(x), len(y)
    rows: list[Array] = []
    for knots, along, across in ((x, m, 1), (y, 1, m)):
        for k in range(1, len(knots) - 1):
            part = (knots[k] - knots[k - 1]) / (knots[k + 1] - knots[k - 1])
            for other in range(n * m // len(knots)):
                row = np.zeros(n * m)
                row[np.array([k, k - 1, k + 1]) * along + other * across] = 1.0, part - 1.0, -part
                rows.append(row)
    return np.array(rows).reshape(len(rows), n * m)


def _rising(grid: Array) -> Array:
    """The closest simple table that never falls: between the running maximum from the start and the running minimum
    from the end; neither falls."""
    up = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
    back = grid[::-1, ::-1]
    down = np.minimum.accumulate(np.minimum.accumulate(back, axis=0), axis=1)[::-1, ::-1]
    middle: Array = (up + down) / 2.0
    return middle
