"""Affine latency with a knee, the best form found for a scheduler (p50/p95 error about 1.4/4 % where trees and tables
are 40–60 % off outside what they have seen):

    T = host + host_per_seq·seqs + max_2(k·tokens + b) + a·kv + d·chunk_context + e·chunk_sq

The knee is where weights stop being free (memory-bound to compute-bound); kv is decode attention, chunk_context and
chunk_sq prefill attention, a verified tree being a chunk. Draft steps are not in it: those of a draft model are in
`with_drafter`; the cost of drafts without one is learnt in b and host_per_seq. All coefficients >= 0, so T never falls
as a batch grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.interfaces import Line
from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_base import knee_of
from rubato.latency.roofline_fit import Array, Coefficients, crossing, fit_planes, largest

NUMBERS = ("host", "host_per_seq", "a", "d", "e")
FEATURES = ("tokens", "a constant", "seqs", "kv", "chunk_context", "chunk_sq")


@dataclass(slots=True)
class Model(FittedModel):
    """A step takes time affine in its tokens and KV. Step times alone cannot tell `host` from `b`: `fit` and `update`
    keep `host` as given and fit the rest, so that b is what the device takes; with host 0 (the default) b has both.
    To change it use `dataclasses.replace`. The other defaults are a rough guess to begin with.

    Args:
        k: seconds per token, of each plane.
        b: seconds per step, of each plane.
        a: seconds per KV token.
        d: seconds per c·k.
        e: seconds per c².
        host_per_seq: seconds per sequence.
        host: seconds of every step spent outside the device (scheduling, launching).

    Raises:
        ValueError: coefficients that cannot be.
    """

    KIND: ClassVar = "affine"
    TITLE: ClassVar = "an affine model"
    SETTINGS: ClassVar = ("k", "b", *NUMBERS)
    GUESSED: ClassVar = ("k", "b")
    MIN_SAMPLES: ClassVar = 12  # for eight coefficients
    COLUMNS: ClassVar = 2
    k: tuple[float, float] = (0.0, 1e-4)
    b: tuple[float, float] = (1e-2, 0.0)
    a: float = 0.0
    d: float = 0.0
    e: float = 0.0
    host: float = 0.0
    host_per_seq: float = 0.0
    _flat: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def _check(self) -> None:
        self._check_numbers(("k", "b"), 2)
        self._check_numbers(NUMBERS)
        if max(*self.k, *self.b, self.a, self.host, self.host_per_seq) <= 0.0:
            raise ValueError("affine coefficients make a decode step take no time: give host, b or k a positive value")

    def features(self, shape: Shape) -> tuple[float, ...]:
        """As `FEATURES` names them."""
        return (shape.tokens, 1.0, shape.seqs, shape.kv, shape.chunk_context, shape.chunk_sq)

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes."""
        k, b, k_, b_, s, a, d, e = self._flat
        tokens = shape.tokens
        low, high = k * tokens + b, k_ * tokens + b_
        rest = s * shape.seqs + a * shape.kv + d * shape.chunk_context + e * shape.chunk_sq
        return (high if high > low else low) + rest

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        k, b, k_, b_, s, a, d, e = self._flat
        low, high = k * tokens + b, k_ * tokens + b_
        return (high if high > low else low) + (s * seqs + a * kv + d * chunk_context + e * chunk_sq)

    def line(self, seqs: int, kv: int) -> Line:
        """A step of `seqs` decodes as a straight line in the KV tokens that they read together, from `kv` up."""
        k, b, k_, b_, s, a, _, _ = self._flat
        return max(k * seqs + b, k_ * seqs + b_), s * seqs, a, 0, math.inf

    def knee(self, base: Shape) -> int:
        """Tokens beyond `base` to where the two planes intersect; `knee_of` if they do not."""
        k, b, k_, b_ = self._flat[:4]
        found = crossing((k, b), (k_, b_), base.tokens)
        return knee_of(self, base) if found is None else found

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        k, b, k_, b_, s, a, d, e = self._flat
        # For c > 1 each plane is a quadratic in c: e·c² + slope·c <= room. largest() settles rounding, and c = 1.
        spent = s * (base.seqs + 1) + a * (base.kv + cached) + d * base.chunk_context + e * base.chunk_sq
        rest = a + d * cached
        guess = min(
            _root(e, k + rest, seconds - spent - k * base.tokens - b),
            _root(e, k_ + rest, seconds - spent - k_ * base.tokens - b_),
        )
        return largest(lambda c: self.step_time(base.plus(c, cached)) <= seconds, most, guess)

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """`host` held, outliers left out. Raises ValueError when no step has a chunk of prefill, or some features never
        move apart. When no chunk had context (prompts prefilled whole), d is taken as 2e: a token attends to k cached
        tokens and on average to half of its chunk, so c·k costs what c²/2 does."""
        _check_rows(rows, self.host)
        found = fit_planes(rows[:, :2], rows[:, 2:-1], rows[:, -1], offset=self.host)
        if not rows[:, 4].any():
            found.shared[2] = 2.0 * found.shared[3]
        self._take(found)

    def _refit(self) -> Coefficients | None:
        shared = np.array([self.host_per_seq, self.a, self.d, self.e])
        return self.online.refit(Coefficients(np.array([self.k, self.b]).T.copy(), shared), self.host)

    def _take(self, fitted: Coefficients) -> None:
        (k, b), (k_, b_) = fitted.planes.tolist()
        self.k, self.b = (k, k_), (b, b_)
        self.host_per_seq, self.a, self.d, self.e = fitted.shared.tolist()

    def _flatten(self) -> None:
        """The coefficients as step_time wants them: times the factor of the moment, host within b."""
        f, (k, k_), (b, b_), host = self.online.factor, self.k, self.b, self.host
        flat = (k, b + host, k_, b_ + host, self.host_per_seq, self.a, self.d, self.e)
        self._flat = tuple([f * v for v in flat])


def _root(square: float, slope: float, room: float) -> float:
    """The largest c with square·c² + slope·c <= room (all >= 0), without cancellation; -1 for a negative room."""
    if room < 0.0:
        return -1.0
    under = slope + math.sqrt(slope * slope + 4.0 * square * room)
    return 2.0 * room / under if under > 0.0 else math.inf


def _check_rows(rows: Array, host: float) -> None:
    """Raise ValueError unless they determine the model."""
    seconds = rows[:, -1]
    if host >= np.median(seconds):
        raise ValueError(f"host is {host} s but the median step took {np.median(seconds):.6f} s: give a smaller host")
    if not rows[:, 5].any():
        raise ValueError("no sample runs a chunk of prefill (an entry of more than one token): measure some such steps")
    features = rows[:, :-1]
    nonzero = np.asarray(features.any(axis=0))
    columns = features[:, nonzero] / np.sqrt((features[:, nonzero] ** 2).mean(axis=0))
    singular = np.linalg.svd(columns, full_matrices=False)
    if singular.S[-1] < 1e-9 * singular.S[0] or len(singular.S) < nonzero.sum():
        names = [name for name, is_used in zip(FEATURES, nonzero.tolist(), strict=True) if is_used]
        stuck = [name for name, part in zip(names, singular.Vh[-1], strict=True) if abs(part) > 1e-3]
        raise ValueError(
            f"{', '.join(stuck)} never move apart in these samples: vary batch, context and chunk separately"
        )
