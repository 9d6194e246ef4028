"""What a scheduler may know of output lengths: nothing, a running mean, or an oracle blurred by stated noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rubato.core.types import Request


@dataclass
class RunningMean:
    """The mean output length of finished requests of the same app (all apps until `least` of its own have finished)."""

    least: int = 5
    _sums: dict[str, tuple[int, int]] = field(default_factory=dict)

    def remaining(self, request: Request, output: int) -> float | None:
        count, total = self._sums.get(request.app, (0, 0))
        if count < self.least:
            count = sum(c for c, _ in self._sums.values())
            total = sum(t for _, t in self._sums.values())
        if count == 0:
            return None
        expected = min(total / count, request.sampling.max_tokens)
        return max(1.0, expected - output)

    def learn(self, request: Request, output: int) -> None:
        count, total = self._sums.get(request.app, (0, 0))
        self._sums[request.app] = (count + 1, total + output)


class Oracle:
    """The true length times a factor uniform in [1 - noise, 1 + noise], drawn once per request from its own stream.

    truth: request id -> output tokens. Raises KeyError for a request it does not hold, ValueError for a bad noise.
    """

    def __init__(self, truth: Mapping[str, int], noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise < 1.0:
            raise ValueError(f"oracle noise is {noise}: give a fraction in [0, 1)")
        self._truth = truth
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._drawn: dict[str, float] = {}

    def remaining(self, request: Request, output: int) -> float | None:
        if request.id not in self._drawn:
            factor = 1.0 + self._noise * float(self._rng.uniform(-1.0, 1.0)) if self._noise else 1.0
            self._drawn[request.id] = max(1.0, self._truth[request.id] * factor)
        return max(1.0, self._drawn[request.id] - output)

    def learn(self, request: Request, output: int) -> None:
        self._drawn.pop(request.id, None)
