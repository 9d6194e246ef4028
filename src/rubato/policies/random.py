"""Each request to a replica drawn at random, all equally likely.

For comparison: what a router brings that knows nothing.

With prefill and decode apart (under distserve's scheduler), a prompt goes to a replica that prefills, its KV to one
that decodes and has memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.greedy_router import random_stream
from rubato.policy_kit.pools import PooledRouter

SOURCE = "PolyServe, §5.1: baselines PD-Random and CO-Random"


@dataclass
class Router(PooledRouter):
    """Places each request on a replica drawn at random.

    Args:
        prefill: with `decode`, the ratio of replicas that do one of them only; 0: all do both
        decode: see `prefill`
        seed: of its own random stream, so that no other choice of a run shifts with it
    """

    seed: int = 0
    _draw: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._draw = random_stream(self.seed)

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        return int(self._draw.integers(len(fleet)))
