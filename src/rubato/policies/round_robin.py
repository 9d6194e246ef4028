"""Each request to the next replica in turn.

For requests and replicas that are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.greedy_router import GreedyRouter

SOURCE = "the usual default of load balancers"


@dataclass
class Router(GreedyRouter):
    _turn: int = field(default=-1, init=False)

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        self._turn += 1
        return self._turn % len(fleet)
