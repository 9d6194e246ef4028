"""Roofline latency (SLOs-Serve): `T = max_l (k1_l·tokens + k2_l·spec_steps + b_l)`, l = 1, 2.

One plane is the memory-bound regime (weights are read whatever the batch), the other the compute-bound one. `tokens`
are all tokens of the batch and `spec_steps` the draft steps run; KV and prefill attention are not seen, which is what
the paper reports R² 0.82–0.93 for. Prefer `affine` unless reproducing the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_base import knee_of
from rubato.latency.roofline_fit import Array, Coefficients, crossing, fit_planes, largest

MIN_SHAPES = 3  # distinct (tokens, spec_steps): two lines need three points


@dataclass(slots=True)
class Model(FittedModel):
    """A step takes the larger of two planes in its tokens and draft steps. All coefficients are finite and >= 0. The
    defaults are a rough guess to begin with when nothing is known: 10 ms a step, or 0.1 ms a token, whichever is
    more.

    Args:
        k1: seconds per token, of each plane.
        k2: seconds per draft step, of each plane.
        b: seconds per step, of each plane.

    Raises:
        ValueError: coefficients that cannot be.
    """

    KIND: ClassVar = "roofline"
    TITLE: ClassVar = "a roofline"
    SETTINGS: ClassVar = ("k1", "k2", "b")
    GUESSED: ClassVar = ("k1", "b")
    MIN_SAMPLES: ClassVar = 8
    COLUMNS: ClassVar = 3
    k1: tuple[float, float] = (0.0, 1e-4)
    k2: tuple[float, float] = (0.0, 0.0)
    b: tuple[float, float] = (1e-2, 0.0)
    _flat: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def _check(self) -> None:
        self._check_numbers(self.SETTINGS, 2)
        if max(*self.k1, *self.b) <= 0.0:
            raise ValueError("roofline k1 and b are all 0, so every step would take no time: give one a positive value")

    def features(self, shape: Shape) -> tuple[float, ...]:
        return (shape.tokens, shape.spec_steps, 1.0)

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes."""
        k, s, b, k_, s_, b_ = self._flat
        tokens, steps = shape.tokens, shape.spec_steps
        low = k * tokens + s * steps + b
        high = k_ * tokens + s_ * steps + b_
        return high if high > low else low

    def knee(self, base: Shape) -> int:
        """Tokens beyond `base` to where the two planes intersect; `knee_of` if they do not."""
        k, s, b, k_, s_, b_ = self._flat
        steps = base.spec_steps
        found = crossing((k, s * steps + b), (k_, s_ * steps + b_), base.tokens)
        return knee_of(self, base) if found is None else found

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does. From
        an empty batch it is the paper's time2bs, `min_l ⌊(seconds − b_l − k2_l·spec_steps)/k1_l⌋`, but for rounding."""
        guess = self._tokens(seconds, base.spec_steps) - base.tokens
        return largest(lambda c: self.step_time(base.plus(c, cached)) <= seconds, most, guess)

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """Outliers left out; k2 is 0 when no sample ran draft steps. Raises ValueError when there are too few different
        samples."""
        shapes = {(s.shape.tokens, s.shape.spec_steps) for s in samples}
        if len(shapes) < MIN_SHAPES or len({tokens for tokens, _ in shapes}) < 2:
            raise ValueError(
                f"the samples hold {len(shapes)} different (tokens, draft steps): a roofline needs at least "
                f"{MIN_SHAPES}, with different numbers of tokens"
            )
        self._take(fit_planes(rows[:, :3], rows[:, 3:-1], rows[:, -1]))

    def _refit(self) -> Coefficients | None:
        current = Coefficients(np.array([self.k1, self.k2, self.b]).T.copy(), np.zeros(0))
        return self.online.refit(current, 0.0)

    def _tokens(self, seconds: float, spec_steps: int) -> float:
        """Tokens at which the first plane reaches `seconds`; inf if none ever does, -inf if one has already."""
        k, s, b, k_, s_, b_ = self._flat
        first, second = s * spec_steps + b, s_ * spec_steps + b_
        if not (first <= seconds and second <= seconds):
            return -math.inf
        return min(
            (seconds - first) / k if k > 0.0 else math.inf,
            (seconds - second) / k_ if k_ > 0.0 else math.inf,
        )

    def _take(self, fitted: Coefficients) -> None:
        planes = fitted.planes.tolist()
        self.k1, self.k2, self.b = ((planes[0][i], planes[1][i]) for i in range(3))

    def _flatten(self) -> None:
        """The coefficients, plane by plane, times the factor of the moment."""
        f = self.online.factor
        self._flat = tuple([f * v for plane in zip(self.k1, self.k2, self.b, strict=True) for v in plane])
