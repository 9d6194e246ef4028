"""Learning while serving: a bounded, varied window of steps, a fast correction for drift, and when to refit.

Two time scales. A machine becomes slower or faster within a step (another tenant takes a core): the `factor`, the
median of measured / predicted over the last few steps, follows within five steps and one odd step does not move it.
The coefficients change slowly: every `EVERY` steps they are refitted to the window, and the refit is taken only if it
explains the most recent steps clearly better than the present coefficients times a factor; else drift would be
written into coefficients that it does not belong to (KV grows with time, so a slowdown looks like dearer KV).

Without steps nothing is learnt, and a policy that refuses all requests by a prediction runs none. So what was slow is
forgotten while nothing runs (`idle`). A slowdown, and the spread, stand for `STALE` seconds; then its logarithm halves
every `HALVING`, down to what the coefficients say. A slow spell may be in these, too (a first refit comes after 16
steps): so after `DOUBTED` seconds predictions halve every `DOUBTING`, down to 1/`FACTOR`, until a step has run, which
ends that doubt at once. What was fast is not forgotten: that would be to predict more, and to refuse more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rubato.core.plan import Shape
from rubato.latency.roofline_fit import Array, Coefficients, fit_planes

EVERY = 128  # steps between refits
FIRST = 16  # the first refit comes this early, then at doubled distances up to EVERY
RATIOS = 8  # steps in the median behind the factor
FACTOR = 8.0  # the factor lies within [1/FACTOR, FACTOR]; further off, coefficients are wrong, not the machine slow
CLEARLY = 2.0  # standard errors by which a refit must predict the recent steps better, paired step by step
BLOCK = 64  # recent steps that are compared under one factor
ERROR_CAP = 0.7  # of |log(measured / predicted)|, so that outliers do not decide
FINEST = 1e-3  # a spread below it is rounding
STALE, HALVING = 10.0, 2.0  # idle seconds: a slowdown stands as measured so long, and is half believed so much later
DOUBTED, DOUBTING = 30.0, 10.0  # idle seconds: the coefficients stand so long, and predict half so much later

Row = tuple[float, ...]


@dataclass(slots=True)
class Window:
    """At most `size` rows, shared evenly among kinds of step: with or without a chunk, by power of two of tokens.

    When full, the oldest row of the fullest kind goes: a thousand decodes cannot push out the last prefill."""

    size: int
    kinds: dict[tuple[bool, int], deque[Row]] = field(default_factory=dict)
    held: int = 0

    def add(self, shape: Shape, row: Row) -> None:
        kind = (shape.chunk_sq > 0, shape.tokens.bit_length())
        if kind not in self.kinds:
            self.kinds[kind] = deque()
        self.kinds[kind].append(row)
        self.held += 1
        if self.held > self.size:
            max(self.kinds.values(), key=len).popleft()
            self.held -= 1

    def rows(self) -> list[Row]:
        return [row for kind in self.kinds.values() for row in kind]


@dataclass(slots=True)
class Online:
    """What a model with `columns` plane features learns from. A row is (plane features, shared features, seconds).

    factor: what the coefficients' predictions are multiplied by; the model reads it after each `seen` and `idle`."""

    columns: int
    size: int = 512
    factor: float = 1.0
    window: Window = field(init=False)
    _recent: deque[Row] = field(init=False)
    _ratios: deque[float] = field(init=False)
    _errors: deque[float] = field(init=False)  # log(measured / predicted), squared, of the last EVERY steps
    _wait: int = field(init=False, default=FIRST)
    _left: int = field(init=False, default=FIRST)
    _belief: float = field(init=False, default=1.0)  # in the slowdown and the spread as measured
    _doubt: float = field(init=False, default=1.0)  # what predictions are multiplied by for long idleness

    def __post_init__(self) -> None:
        if self.size < 2 * FIRST:
            raise ValueError(f"window is {self.size} samples: give at least {2 * FIRST}")
        self.window = Window(self.size)
        self._recent = deque(maxlen=EVERY)
        self._ratios = deque([1.0] * RATIOS, maxlen=RATIOS)
        self._errors = deque(maxlen=EVERY)

    @property
    def spread(self) -> float:
        """Relative error of step predictions, root mean square over the last EVERY, less what idle time forgets; 0
        while fewer than FIRST are known."""
        if len(self._errors) < FIRST:
            return 0.0
        spread = self._belief * math.sqrt(math.fsum(self._errors) / len(self._errors))
        return spread if spread >= FINEST else 0.0

    def idle(self, seconds: float) -> bool:
        """No step has run for so long, the last one included. Whether the factor has changed."""
        if seconds <= STALE and self._belief == 1.0:
            return False
        self._belief = 0.5 ** (max(0.0, seconds - STALE) / HALVING)
        self._doubt = 0.5 ** (max(0.0, seconds - DOUBTED) / DOUBTING)
        before, self.factor = self.factor, self._believed()
        return self.factor != before

    def seen(self, shape: Shape, row: Row, raw: float) -> bool:
        """One step, and what the coefficients alone (factor 1) predicted for it. True: a refit is due."""
        seconds = row[-1]
        if not 0.0 < seconds < float("inf"):
            raise ValueError(f"a step took {seconds!r} s: a sample needs a positive, finite number of seconds")
        self.window.add(shape, row)
        self._recent.append(row)
        ratio = seconds / max(raw, 1e-12)
        if self._belief == 1.0:
            self._errors.append(min(abs(math.log(ratio / self.factor)), ERROR_CAP) ** 2)
        else:  # what was forgotten stays so, and what was doubted was no prediction
            self._ratios = deque([r**self._belief if r > 1.0 else r for r in self._ratios], maxlen=RATIOS)
            self._belief = self._doubt = 1.0
        self._ratios.append(ratio)
        self.factor = self._believed()
        self._left -= 1
        if self._left > 0:
            return False
        self._wait = min(2 * self._wait, EVERY)
        self._left = self._wait
        return True

    def refit(self, current: Coefficients, offset: float) -> Coefficients | None:
        """Better coefficients than `current`, or None. `offset`: seconds in every step that are not fitted."""
        found = fit_planes(*self._split(self.window.rows()), offset=offset, prior=current)
        x, y, seconds = self._split(list(self._recent))
        with np.errstate(divide="ignore"):
            new = np.log(seconds / (offset + found.predict(x, y)))
            old = np.log(seconds / (offset + current.predict(x, y)))
        if not np.isfinite(new).all():
            return None
        gain = _left(old) - _left(new)  # paired, so that what neither predicts (noise, odd steps) cancels
        if not float(gain.mean()) > CLEARLY * float(gain.std()) / math.sqrt(len(gain)):  # also where it is no number
            return None
        self._ratios.extend(np.exp(new[-RATIOS:]).tolist())
        self.factor = self._believed()
        return found

    def _believed(self) -> float:
        measured = min(max(statistics.median(self._ratios), 1.0 / FACTOR), FACTOR)
        if self._belief == 1.0:
            return measured
        if measured > 1.0:
            measured = measured**self._belief
        return max(measured * self._doubt, 1.0 / FACTOR)

    def _split(self, rows: list[Row]) -> tuple[Array, Array, Array]:
        table = np.array(rows, dtype=np.float64)
        return table[:, : self.columns], table[:, self.columns : -1], table[:, -1]


def _left(logs: Array) -> Array:
    """|log(measured / predicted)| left when every block of steps has a factor of its own: what prediction with the fast
    correction amounts to, whatever the machine's speed was."""
    limit = float(np.log(FACTOR))
    blocks = np.array_split(logs, max(1, len(logs) // BLOCK))
    left = [np.abs(block - np.clip(np.median(block), -limit, limit)) for block in blocks]
    capped: Array = np.minimum(np.concatenate(left), ERROR_CAP)
    return capped
