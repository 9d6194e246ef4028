"""Defines a base for routers that are one rule: each held request goes where `choose` says, with those before it
counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policy_kit.stateless import Stateless


class GreedyRouter(Stateless):
    """Places all held requests, in order of arrival. A subclass defines `choose`, and `begin` if it counts work."""

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        """Begins a dispatch."""

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        """Returns the index in `fleet` of a request's replica, and counts the request there."""
        raise NotImplementedError

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        self.begin(held, fleet)
        return Dispatch({seq.id: fleet[self.choose(seq, fleet)].id for seq in held})


def random_stream(seed: int) -> np.random.Generator:
    """Returns a router's own random numbers, so that no other choice of a run shifts with them. Raises ValueError."""
    if seed < 0:
        raise ValueError(f"seed is {seed}: give 0 or more")
    return np.random.default_rng(seed)
