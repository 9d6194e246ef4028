"""Where a function of one number crosses zero."""

from __future__ import annotations

import sys
from collections.abc import Callable


def root(function: Callable[[float], float], low: float, high: float, within: float) -> float:
    """A number between `low` and `high` at most `within` from where the sign of the function changes.

    By Brent's method (Algorithms for Minimization Without Derivatives, 1973, chapter 4): interpolation where it gains
    on halving. Raises ValueError where the function has one sign at both ends.
    """
    best, before = high, low
    at_best, at_before = function(high), function(low)
    if at_best * at_before > 0.0:
        raise ValueError(f"no change of sign between {low} and {high}: {at_before} and {at_best}")
    other, at_other, step, last = before, at_before, best - before, best - before
    while True:
        if at_before != 0.0 and at_best != 0.0 and (at_before < 0.0) != (at_best < 0.0):
            other, at_other = before, at_before
            step = last = best - before
        if abs(at_other) < abs(at_best):
            before, best, other = best, other, best
            at_before, at_best, at_other = at_best, at_other, at_best
        close = (within + 4.0 * sys.float_info.epsilon * abs(best)) / 2.0
        half = (other - best) / 2.0
        if at_best == 0.0 or abs(half) < close:
            return best
        tried = _interpolated(before, best, other, at_before, at_best, at_other)
        if (
            abs(last) > close
            and abs(at_best) < abs(at_before)
            and 2 * abs(tried) < min(abs(last), 3 * abs(half) - close)
        ):
            last, step = step, tried
        else:
            last = step = half
        before, at_before = best, at_best
        best += step if abs(step) > close else close if half > 0.0 else -close
        at_best = function(best)


def _interpolated(a: float, b: float, c: float, at_a: float, at_b: float, at_c: float) -> float:
    """How far from b the function is 0 on the line through a and b, or on the inverse parabola through them and c."""
    if at_a == at_b:
        return float("inf")
    if a == c:
        return -at_b * (b - a) / (at_b - at_a)
    by_a, by_c = (at_a - at_b) / (a - b), (at_c - at_b) / (c - b)
    below = by_c * by_a * (at_c - at_a)
    return -at_b * (at_c * by_c - at_a * by_a) / below if below else float("inf")
