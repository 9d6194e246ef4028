"""Learning while serving: a bounded, varied window of steps, a fast correction for drift, and when to refit.

Two time scales. A machine becomes slower or faster within a step (another tenant takes a core): the `factor`, the
median of measured / predicted over the last few steps, follows within five steps and one odd step does not move it.
The coefficients change slowly: every `MAX_REFIT_STEPS` steps they are refitted to the window, and the refit is taken
only if it explains the most recent steps clearly better than the present coefficients times a factor; otherwise drift
would enter the wrong coefficients (KV grows with time, so a slowdown looks like dearer KV).

Without steps nothing is learnt, and a policy that refuses all requests by a prediction runs none. So a slow spell is
forgotten while nothing runs (`idle`). A slowdown and the spread stand for `STALE_S`; then the slowdown's logarithm
halves every `HALVING_S`, down to the coefficients' predictions. A slow spell may be in these, too (the first refit
comes after 16 steps): after `DOUBT_AFTER_S` predictions halve every `DOUBT_HALVING_S`, down to 1/`MAX_FACTOR`, until a
step has run, which ends that doubt at once. A speedup is not forgotten: predictions would rise, and refusals with them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rubato.core.plan import Shape
from rubato.latency.roofline_fit import Array, Coefficients, fit_planes

MAX_REFIT_STEPS = 128  # steps between refits
FIRST_REFIT_STEPS = 16  # the first refit comes this early, then at doubled distances up to MAX_REFIT_STEPS
FACTOR_STEPS = 8  # steps in the median behind the factor
MAX_FACTOR = 8.0  # the factor lies within [1/MAX_FACTOR, MAX_FACTOR]: beyond, the coefficients are wrong
MIN_GAIN_ERRORS = 2.0  # standard errors by which a refit must predict the recent steps better, paired step by step
BLOCK_STEPS = 64  # recent steps that are compared under one factor
ERROR_CAP = 0.7  # of |log(measured / predicted)|, so that outliers do not decide
MIN_SPREAD = 1e-3  # a spread below it is rounding
STALE_S, HALVING_S = 10.0, 2.0  # idle time until a slowdown fades, and its half-life
DOUBT_AFTER_S, DOUBT_HALVING_S = 30.0, 10.0  # the same for the coefficients

Row = tuple[float, ...]


@dataclass(slots=True)
class StepWindow:
    """At most `size` rows, shared evenly among kinds of step: with or without a chunk, by power of two of tokens.

    When full, the oldest row of the fullest kind goes: a thousand decodes cannot push out the last prefill."""

    size: int
    kinds: dict[tuple[bool, int], deque[Row]] = field(default_factory=dict)
    count: int = 0

    def add(self, shape: Shape, row: Row) -> None:
        kind = (shape.chunk_sq > 0, shape.tokens.bit_length())
        if kind not in self.kinds:
            self.kinds[kind] = deque()
        self.kinds[kind].append(row)
        self.count += 1
        if self.count > self.size:
            max(self.kinds.values(), key=len).popleft()
            self.count -= 1

    def rows(self) -> list[Row]:
        return [row for kind in self.kinds.values() for row in kind]


@dataclass(slots=True)
class Online:
    """Learns a model with `columns` plane features while it is used. A row is (plane features, shared features,
    seconds).

    Args:
        factor: multiplies the coefficients' predictions; the model reads it after each `observe` and `idle`.
    """

    columns: int
    size: int = 512
    factor: float = 1.0
    window: StepWindow = field(init=False)
    _recent: deque[Row] = field(init=False)
    _ratios: deque[float] = field(init=False)
    _errors: deque[float] = field(init=False)  # log(measured / predicted), squared, of the last MAX_REFIT_STEPS steps
    _wait: int = field(init=False, default=FIRST_REFIT_STEPS)
    _steps_to_refit: int = field(init=False, default=FIRST_REFIT_STEPS)
    _belief: float = field(init=False, default=1.0)  # in the slowdown and the spread as measured
    _doubt: float = field(init=False, default=1.0)  # what predictions are multiplied by for long idleness

    def __post_init__(self) -> None:
        if self.size < 2 * FIRST_REFIT_STEPS:
            raise ValueError(f"window is {self.size} samples: give at least {2 * FIRST_REFIT_STEPS}")
        self.window = StepWindow(self.size)
        self._recent = deque(maxlen=MAX_REFIT_STEPS)
        self._ratios = deque([1.0] * FACTOR_STEPS, maxlen=FACTOR_STEPS)
        self._errors = deque(maxlen=MAX_REFIT_STEPS)

    @property
    def spread(self) -> float:
        """Relative error of step predictions, root mean square over the last `MAX_REFIT_STEPS`, faded by idle time;
        0 while fewer than `FIRST_REFIT_STEPS` are known."""
        if len(self._errors) < FIRST_REFIT_STEPS:
            return 0.0
        spread = self._belief * math.sqrt(math.fsum(self._errors) / len(self._errors))
        return spread if spread >= MIN_SPREAD else 0.0

    def idle(self, seconds: float) -> bool:
        """Lets the factor fade after `seconds` without a step. Returns whether it changed."""
        if seconds <= STALE_S and self._belief == 1.0:
            return False
        self._belief = 0.5 ** (max(0.0, seconds - STALE_S) / HALVING_S)
        self._doubt = 0.5 ** (max(0.0, seconds - DOUBT_AFTER_S) / DOUBT_HALVING_S)
        before, self.factor = self.factor, self._believed()
        return self.factor != before

    def observe(self, shape: Shape, row: Row, raw: float) -> bool:
        """Learns from one step, for which the coefficients alone (factor 1) predicted `raw` seconds. Returns whether a
        refit is due."""
        seconds = row[-1]
        if not 0.0 < seconds < float("inf"):
            raise ValueError(f"a step took {seconds!r} s: a sample needs a positive, finite number of seconds")
        self.window.add(shape, row)
        self._recent.append(row)
        ratio = seconds / max(raw, 1e-12)
        if self._belief == 1.0:
            self._errors.append(min(abs(math.log(ratio / self.factor)), ERROR_CAP) ** 2)
        else:  # what was forgotten stays so, and what was doubted was no prediction
            self._ratios = deque([r**self._belief if r > 1.0 else r for r in self._ratios], maxlen=FACTOR_STEPS)
            self._belief = self._doubt = 1.0
        self._ratios.append(ratio)
        self.factor = self._believed()
        self._steps_to_refit -= 1
        if self._steps_to_refit > 0:
            return False
        self._wait = min(2 * self._wait, MAX_REFIT_STEPS)
        self._steps_to_refit = self._wait
        return True

    def refit(self, current: Coefficients, offset: float) -> Coefficients | None:
        """Returns better coefficients than `current`, or None; `offset` seconds in every step are not fitted."""
        refitted = fit_planes(*self._split(self.window.rows()), offset=offset, prior=current)
        x, y, seconds = self._split(list(self._recent))
        with np.errstate(divide="ignore"):
            new = np.log(seconds / (offset + refitted.predict(x, y)))
            old = np.log(seconds / (offset + current.predict(x, y)))
        if not np.isfinite(new).all():
            return None
        gain = _unexplained(old) - _unexplained(new)  # paired, so that what neither predicts (noise, odd steps) cancels
        if not float(gain.mean()) > MIN_GAIN_ERRORS * float(gain.std()) / math.sqrt(len(gain)):  # also for NaN
            return None
        self._ratios.extend(np.exp(new[-FACTOR_STEPS:]).tolist())
        self.factor = self._believed()
        return refitted

    def _believed(self) -> float:
        measured = min(max(statistics.median(self._ratios), 1.0 / MAX_FACTOR), MAX_FACTOR)
        if self._belief == 1.0:
            return measured
        if measured > 1.0:
            measured = measured**self._belief
        return max(measured * self._doubt, 1.0 / MAX_FACTOR)

    def _split(self, rows: list[Row]) -> tuple[Array, Array, Array]:
        table = np.array(rows, dtype=np.float64)
        return table[:, : self.columns], table[:, self.columns : -1], table[:, -1]


def _unexplained(logs: Array) -> Array:
    """Returns |log(measured / predicted)| with a factor of its own for each block of steps: the errors with the fast
    correction, whatever the machine's speed was."""
    limit = float(np.log(MAX_FACTOR))
    blocks = np.array_split(logs, max(1, len(logs) // BLOCK_STEPS))
    errors = [np.abs(block - np.clip(np.median(block), -limit, limit)) for block in blocks]
    capped: Array = np.minimum(np.concatenate(errors), ERROR_CAP)
    return capped
