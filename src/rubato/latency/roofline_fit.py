"""Fitting `T = max_l (x · planes_l) + y · shared`, l = 1, 2, all coefficients >= 0, to step times.

A maximum of planes is not linear in its coefficients, but it is once each sample is assigned to one plane: so assign
every sample to the larger plane, refit by non-negative least squares, repeat until no sample changes sides. That finds
a local optimum, hence several starts: the samples split in two at quantiles of each plane feature (a knee lies at some
quantile): no randomness is needed.

Rows are divided by the measured seconds, so that 3 ms and 300 ms count alike; a slow outlier then has a residual below
1 and cannot pull far. What is still beyond `OUTLIER` scaled MADs of the best fit is left out and the fit repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rubato.latency.least_squares import nnls

Array = NDArray[np.float64]

OUTLIER = 4.0  # scaled MADs
MAD_TO_SIGMA = 1.4826  # of a normal distribution
NOISE_FLOOR = 1e-4  # relative; on exact data the MAD is rounding noise, and nothing is an outlier for that
ALTERNATIONS = 16
CUTS = (0.05, 0.2, 0.35, 0.5, 0.7, 0.9)  # where the knee is looked for, as quantiles of distinct values
CUTS_NEAR = (0.3, 0.7)  # when there is a prior, whose own knee is tried too
ROBUST_ROUNDS = 3
ROUNDING = 1e-9  # relative, of differences and quotients of coefficients

# The pull towards known coefficients, as relative standard deviations: of one measured step over that of a coefficient,
# and the share of a step's time that a coefficient now at 0 may be expected to explain.
PRIOR_STRENGTH = 0.1
PRIOR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The coefficients of the two planes and of what they share.

    Args:
        planes: of shape (2, columns of x); the flatter plane (smaller first coefficient) first.
        shared: of shape (columns of y,).
    """

    planes: Array
    shared: Array

    def predict(self, x: Array, y: Array) -> Array:
        """Seconds per row; x (n, p), y (n, q)."""
        time: Array = (x @ self.planes.T).max(axis=1) + y @ self.shared
        return time


@dataclass(frozen=True, slots=True)
class _Problem:
    """Rows already divided by the measured seconds; `pull` and `towards` are the prior's rows (one per coefficient)."""

    x: Array
    y: Array
    target: Array
    pull: Array
    towards: Array

    def solve(self, upper: NDArray[np.bool_], keep: NDArray[np.bool_]) -> Coefficients:
        """Non-negative least squares with each sample assigned to one plane."""
        width = self.x.shape[1]
        above, below = upper & keep, ~upper & keep
        rows = np.concatenate([self.x * below[:, None], self.x * above[:, None], self.y * keep[:, None]], axis=1)
        matrix = np.concatenate([rows, np.diag(self.pull)])
        size = np.sqrt(np.einsum("ij,ij->j", matrix, matrix))
        size[size == 0.0] = 1.0
        right = np.concatenate([self.target * keep, self.pull * self.towards])
        solution = nnls(matrix / size, right) / size
        planes = solution[: 2 * width].reshape(2, width)
        return Coefficients(planes, solution[2 * width :])

    def alternate(self, upper: NDArray[np.bool_], keep: NDArray[np.bool_]) -> Coefficients:
        """From a first assignment; returns the best fit on the way, as the loss may rise again."""
        best, least = None, np.inf
        for _ in range(ALTERNATIONS):
            candidate = self.solve(upper, keep)
            loss = float(np.abs(self.residuals(candidate)[keep]).sum())
            if best is None or loss < least:
                best, least = candidate, loss
            sides = self.x @ candidate.planes.T
            moved = sides[:, 1] > sides[:, 0]
            if np.array_equal(moved, upper):
                break
            upper = moved
        assert best is not None
        return best

    def residuals(self, fitted: Coefficients) -> Array:
        """Relative error of each row."""
        return fitted.predict(self.x, self.y) - self.target


def fit_planes(
    x: Array, y: Array, seconds: Array, offset: float = 0.0, prior: Coefficients | None = None
) -> Coefficients:
    """Finds the coefficients that explain `seconds - offset` best in relative error. With a `prior`, coefficients that
    the rows leave open stay at it, scaled by how much slower the rows are; without, they are 0 or arbitrary: check
    before.

    Args:
        x: plane features, of shape (n, p).
        y: shared features, of shape (n, q).
        seconds: above 0, of shape (n,).
    """
    inverse = 1.0 / seconds
    target = (seconds - offset) * inverse
    xs, ys = x * inverse[:, None], y * inverse[:, None]
    pull, towards = _prior_rows(xs, ys, target, prior)
    problem = _Problem(xs, ys, target, pull, towards)
    keep = np.ones(len(seconds), dtype=bool)
    starts = list(_splits(x, CUTS if prior is None else CUTS_NEAR))
    if prior is not None:
        sides = x @ prior.planes.T
        starts.append(sides[:, 1] > sides[:, 0])
    fitted = min(
        (problem.alternate(upper, keep) for upper in starts), key=lambda c: float(np.abs(problem.residuals(c)).sum())
    )
    for _ in range(ROBUST_ROUNDS):
        error = problem.residuals(fitted)
        middle = float(np.median(error))
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(error - middle))), NOISE_FLOOR)
        kept = np.abs(error - middle) <= OUTLIER * spread
        if np.array_equal(kept, keep):
            break
        keep = kept
        sides = xs @ fitted.planes.T
        fitted = problem.alternate(sides[:, 1] > sides[:, 0], keep)
    order = np.argsort(fitted.planes[:, 0], kind="stable")
    return Coefficients(fitted.planes[order], fitted.shared)


def _prior_rows(xs: Array, ys: Array, target: Array, prior: Coefficients | None) -> tuple[Array, Array]:
    """One row per coefficient, pulling it towards the prior relative to its size, so that a per-token cost seen only at
    20 tokens is not bent to explain what a constant can."""
    if prior is None:
        nothing = np.zeros(2 * xs.shape[1] + ys.shape[1])
        return nothing, nothing
    slower = float(np.median(target / np.maximum(prior.predict(xs, ys), 1e-12)))
    towards = np.concatenate([prior.planes.ravel(), prior.shared]) * max(slower, 0.0)
    columns = np.concatenate([xs, xs, ys], axis=1)
    reach = np.sqrt(np.mean(columns * columns, axis=0))
    room = np.maximum(towards, np.divide(PRIOR_SHARE, reach, out=np.zeros_like(reach), where=reach > 0.0))
    pull = np.divide(PRIOR_STRENGTH, room, out=np.zeros_like(room), where=room > 0.0)
    return pull, towards


def _splits(x: Array, parts: tuple[float, ...]) -> Iterable[NDArray[np.bool_]]:
    """First assignments: all on one plane; each plane feature that varies, cut at these quantiles of its values."""
    yield np.zeros(len(x), dtype=bool)
    for column in x.T:
        values = np.unique(column)
        if len(values) > 1:
            for cut in sorted({max(int(len(values) * part), 1) for part in parts}):
                yield column >= values[cut]


def crossing(first: tuple[float, float], second: tuple[float, float], tokens: int) -> int | None:
    """How many more than `tokens` tokens there are where two lines (seconds per token, seconds) cross, at least 0; None
    where they do not, so that one of them holds for every number of tokens."""
    (k, b), (k_, b_) = sorted((first, second))
    if not (k < k_ and b > b_):
        return None
    at = (b - b_) / (k_ - k) * (1.0 + ROUNDING)
    return max(0, int(min(at, sys.maxsize)) - tokens)


def largest(fits: Callable[[int], bool], most: int, guess: float) -> int:
    """The largest c in [0, most] with fits(c), for a `fits` that never turns true again (fits(0) is taken as true).

    `guess` only saves calls: two when it is right, a bisection of what remains when it is not."""
    low, high = 0, most + 1
    first = int(min(max(guess, 0.0), float(max(most, 0)))) if guess == guess else 0
    for c in (first, first + 1):
        if low < c < high:
            if fits(c):
                low = c
            else:
                high = c
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
