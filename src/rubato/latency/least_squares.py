"""Least squares under constraints, for small problems: non-negative coefficients, and values that never fall.

In NumPy alone: SciPy has both, and takes 140 MB, which an installation beside vLLM would have to add.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROUNDING = 1e-14  # of the cosine between a column and what is left to explain
MAX_FREED_COLUMNS = 30  # columns set free, for each that there is; few more than one suffice in practice


def nnls(matrix: Array, right: Array) -> Array:
    """The x >= 0 with the least |matrix @ x - right| (Lawson and Hanson, 1974, chapter 23)."""
    columns = matrix.shape[1]
    size = np.sqrt(np.einsum("ij,ij->j", matrix, matrix))
    size[size == 0.0] = 1.0
    # the same problem, in few rows
    triangle: Array = np.asarray(np.linalg.qr(np.column_stack([matrix / size, right]), mode="r"))
    a, b = triangle[:, :columns], triangle[:, columns]
    least = ROUNDING * float(np.sqrt(b @ b))
    x = np.zeros(columns)
    free, barred = np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool)
    for _ in range(MAX_FREED_COLUMNS * columns):
        gradient = np.where(free | barred, 0.0, a.T @ (b - a @ x))
        best = int(np.argmax(gradient))
        if gradient[best] <= least:
            break
        free[best] = True
        trial = _solved(a, b, free)
        if trial[best] <= 0.0:  # by rounding: the free columns explain it
            free[best], barred[best] = False, True
            continue
        barred[:] = False
        while (low := free & (trial <= 0.0)).any():  # go as far as none falls below 0; the first that would is fixed
            parts = x[low] / (x[low] - trial[low])
            x = x + (trial - x) * float(parts.min())
            free[np.flatnonzero(low)[parts == parts.min()]] = False
            x[~free] = 0.0
            trial = _solved(a, b, free)
        x = trial
    solution: Array = x / size
    return solution


def _solved(a: Array, b: Array, free: NDArray[np.bool_]) -> Array:
    x = np.zeros(len(free))
    x[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
    return x


def isotonic(values: Array, weights: Array | None = None) -> Array:
    """Returns the values closest to these that never fall: neighbours that fall get their weighted mean.

    Args:
        weights: of the values, positive.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many values
    given = np.ones(len(values)) if weights is None else weights
    for mean, weight in zip(values.tolist(), given.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] > mean:
            before, heavy, many = blocks.pop()
            mean = (before * heavy + mean * weight) / (heavy + weight)
            weight, count = weight + heavy, count + many
        blocks.append((mean, weight, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])
