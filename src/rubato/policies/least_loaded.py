"""Each request to the replica with the least work: pending tokens and decodes to come; ties to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rubato.interfaces import Dispatch, View
from rubato.types import Event, Request

SOURCE = "join-the-shortest-queue, in tokens, as gateways in front of vLLM do it"


@dataclass
class Router:
    """per_request: tokens that a request counts for beside its pending prefill (its decode to come)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    per_request: int = 64

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[Request], fleet: Sequence[View], now: float) -> Dispatch:
        load = {view.id: self._load(view) for view in fleet}
        place = {}
        for request in held:
            replica = min(load, key=lambda id: load[id])
            place[request.id] = replica
            load[replica] += request.stages[0].prompt + self.per_request
        return Dispatch(place, {})

    def _load(self, view: View) -> int:
        return view.pending + self.per_request * view.count
