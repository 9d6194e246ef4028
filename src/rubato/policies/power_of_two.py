"""Two replicas drawn at random for each request, which goes to the one with less work, as `least_loaded` counts it.

For several routers in front of the same replicas.

Nearly as even as asking all of them, and requests that several routers place in the same moment do not all land on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policy_kit.backlog import DECODE_TO_COME_TOKENS, loads

SOURCE = "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (IEEE TPDS 2001)"


@dataclass
class Router:
    """seed: of its own random stream, so that no other choice of a run shifts with it. per_request: tokens that a
    request counts for beside its pending prefill (its decode to come)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    seed: int = 0
    per_request: int = DECODE_TO_COME_TOKENS
    _draw: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        self._draw = np.random.default_rng(self.seed)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        load = loads(fleet, self.per_request)
        place = {}
        for seq in held:
            least = min(self._two(len(fleet)), key=load.__getitem__)  # of equal ones the first drawn
            place[seq.id] = fleet[least].id
            load[least] += seq.pending + self.per_request
        return Dispatch(place)

    def _two(self, replicas: int) -> Sequence[int]:
        """Draws two different replicas, or the only one."""
        if replicas == 1:
            return [0]
        first, second = int(self._draw.integers(replicas)), int(self._draw.integers(replicas - 1))
        return [first, second + (second >= first)]
