"""Each request to the replica with the least work: pending tokens and decodes to come; ties to the first.

For replicas that are alike, in front of any scheduler. The router where a policy has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rubato.core.interfaces import SeqView, View
from rubato.policy_kit.backlog import DECODE_TO_COME_TOKENS, loads
from rubato.policy_kit.greedy_router import GreedyRouter

SOURCE = "join-the-shortest-queue, in tokens, as gateways in front of vLLM do it"


@dataclass
class Router(GreedyRouter):
    """Places each request on the least loaded replica.

    Args:
        per_request: tokens that a request counts for beside its pending prefill (its decode to come)
    """

    per_request: int = DECODE_TO_COME_TOKENS
    _load: list[int] = field(init=False, repr=False, default_factory=list)  # of each replica, in this dispatch

    def begin(self, held: Sequence[SeqView], fleet: Sequence[View]) -> None:
        self._load = loads(fleet, self.per_request)

    def choose(self, seq: SeqView, fleet: Sequence[View]) -> int:
        least = self._load.index(min(self._load))
        self._load[least] += seq.pending + self.per_request
        return least
