"""Two replicas drawn at random for each request, which goes to the one with less work, as `least_loaded` counts it.

For several routers in front of the same replicas.

Nearly as even as asking all of them, and requests that several routers place in the same moment do not all land on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.backlog import DECODE_TO_COME_TOKENS, loads
from rubato.policy_kit.greedy_router import GreedyRouter, random_stream

SOURCE = "Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (IEEE TPDS 2001)"


@dataclass
class Router(GreedyRouter):
    """Places each request on the less loaded of two replicas drawn at random.

    Args:
        seed: of its own random stream, so that no other choice of a run shifts with it
        per_request: tokens that a request counts for beside its pending prefill (its decode to come)
    """

    seed: int = 0
    per_request: int = DECODE_TO_COME_TOKENS
    _load: list[int] = field(init=False, repr=False, default_factory=list)  # of each replica, in this dispatch
    _draw: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._draw = random_stream(self.seed)

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        self._load = loads(fleet, self.per_request)

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        least = min(self._draw_two(len(fleet)), key=self._load.__getitem__)  # of equal ones the first drawn
        self._load[least] += seq.pending + self.per_request
        return least

    def _draw_two(self, replicas: int) -> Sequence[int]:
        """Draws two different replicas, or the only one."""
        if replicas == 1:
            return [0]
        first, second = int(self._draw.integers(replicas)), int(self._draw.integers(replicas - 1))
        return [first, second + (second >= first)]
