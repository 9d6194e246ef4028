"""Each request to the replica with the least work: pending tokens and decodes to come; ties to the first.

For replicas that are alike, in front of any scheduler. The router where a policy has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.policy_kit.backlog import DECODE_TO_COME_TOKENS, loads

SOURCE = "join-the-shortest-queue, in tokens, as gateways in front of vLLM do it"


@dataclass
class Router:
    """per_request: tokens that a request counts for beside its pending prefill (its decode to come)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    per_request: int = DECODE_TO_COME_TOKENS

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        per = self.per_request
        load = loads(fleet, per)
        place = {}
        for seq in held:
            least = load.index(min(load))
            place[seq.id] = fleet[least].id
            load[least] += seq.pending + per
        return Dispatch(place)
