"""From the probability that a drafter gives a token to the share of such tokens that are right."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rubato.latency.least_squares import isotonic

WEIGHT = 20  # verified nodes that a share of the first table is worth: 14 of them, 280 nodes
REFIT = 64  # verified nodes from one fit to the next


class Calibration:
    """A monotone map, learned as drafts are verified.

    It maps steps, a node's probability given that its parent is right. Path probabilities cannot be learned from what
    is judged, nodes whose parent was right: those are right far more often than their paths say (the map of paths was
    off by 0.103 in the mean where the product of mapped steps was off by 0.016). That product never rises along a path.

    edges: of bins of probability, from 0 to 1. shares: the share right in each bin before anything is verified, rising.
    A bin's counts begin with `WEIGHT` nodes of that share, so that a few hundred nodes outweigh the table. Isotonic
    regression over bins, linear between their middles. observed: nodes so far.
    """

    def __init__(self, edges: Sequence[float], shares: Sequence[float]) -> None:
        self._edges = edges
        self._middles = (0.0, *((low + high) / 2.0 for low, high in pairwise(edges)), 1.0)
        self._nodes = [float(WEIGHT) for _ in shares]
        self._right = [WEIGHT * share for share in shares]
        self.observed = 0
        self._shares = self._fit()

    def __call__(self, step: float) -> float:
        """The share right of steps of this probability."""
        middles, shares = self._middles, self._shares
        i = min(max(bisect_left(middles, step), 1), len(middles) - 1)
        low, from_share = middles[i - 1], shares[i - 1]
        return from_share + (shares[i] - from_share) * (step - low) / (middles[i] - low)

    def observe(self, step: float, right: bool) -> None:
        """A node that was verified, its parent having been right, and whether it was right itself."""
        i = min(bisect_right(self._edges, step), len(self._nodes)) - 1
        self._nodes[i] += 1.0
        self._right[i] += right
        self.observed += 1
        if self.observed % REFIT == 0:
            self._shares = self._fit()

    def _fit(self) -> list[float]:
        """The share at each of `_middles`."""
        nodes = np.array(self._nodes)
        shares = isotonic(np.array(self._right) / nodes, nodes).tolist()
        return [0.0, *shares, shares[-1]]
