"""Goodput bounds in vLLM's spelling, `ttft:200 tpot:30 e2el:5000` (milliseconds): a request is good if it keeps all.

As in `vllm bench serve --goodput`: TPOT is the mean over the tokens after the first, a single token has a TPOT of 0,
and what did not complete is not good. Unlike there, goodput counts good requests per second in which requests were
*offered*, not per second until the last has ended, so that a slow tail does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.request import Outcome

NAMES = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e"}  # vLLM's names and ours


@dataclass(frozen=True, slots=True)
class SLOBounds:
    """Bounds in seconds; None = not bounded. A good request meets all of them."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def are_met(self, outcome: Outcome, ttft: float | None, tpot: float | None, e2e: float | None) -> bool:
        """Whether a request with these measures (seconds) meets every bound."""
        if outcome != "completed" or ttft is None:
            return False
        measures = ((self.ttft, ttft), (self.tpot, 0.0 if tpot is None else tpot), (self.e2e, e2e))
        return all(bound is None or (measure is not None and measure <= bound) for bound, measure in measures)

    def __str__(self) -> str:
        values = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2e}
        return " ".join(f"{name}:{1e3 * bound:g}" for name, bound in values.items() if bound is not None)


def parse(words: Sequence[str]) -> SLOBounds:
    """Parses bounds from words such as `tpot:30` (milliseconds). Raises ValueError for an unknown name or no number."""
    bounds: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = math.nan
        if name not in NAMES or not 0.0 < milliseconds < math.inf:
            raise ValueError(f"goodput {word!r}: write NAME:MILLISECONDS with a name among {', '.join(NAMES)}")
        if NAMES[name] in bounds:
            raise ValueError(f"goodput names {name} twice")
        bounds[NAMES[name]] = milliseconds / 1e3
    if not bounds:
        raise ValueError("goodput needs at least one bound, such as ttft:200")
    return SLOBounds(**bounds)
