"""AdaServe without SLO-customised selection, for `adaserve_rate`: whatever a request lacks, the most probable nodes of
all are verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import SeqView
from rubato.policies import adaserve

SOURCE = "ours, to see what SLO-customised selection brings"


@dataclass
class Scheduler(adaserve.Scheduler):
    """As `adaserve`."""

    def _needed(self, decodes: Sequence[SeqView], end: float, now: float) -> list[float]:
        return [0.0] * len(decodes)
