"""How well a latency model predicts measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample


@dataclass(frozen=True, slots=True)
class Report:
    """r2: share of the variance of seconds explained (nan when all steps took equally long); p50, p95: quantiles of
    |predicted − measured| / measured; n: steps."""

    r2: float
    p50: float
    p95: float
    n: int

    def format(self) -> str:
        return f"R² {self.r2:.4f}, relative error p50 {self.p50:.2%} p95 {self.p95:.2%}, {self.n} steps"


def error_report(model: LatencyModel, samples: Sequence[Sample]) -> Report:
    """Raises ValueError when there is nothing to compare with."""
    if not samples:
        raise ValueError("no samples: give at least one measured step to judge a latency model by")
    measured = np.array([s.seconds for s in samples])
    predicted = np.array([model.step_time(s.shape) for s in samples])
    error = np.abs(predicted - measured) / measured
    around = float(((measured - measured.mean()) ** 2).sum())
    r2 = 1.0 - float(((measured - predicted) ** 2).sum()) / around if around > 0.0 else float("nan")
    p50, p95 = np.quantile(error, [0.5, 0.95]).tolist()
    return Report(r2, p50, p95, len(samples))
