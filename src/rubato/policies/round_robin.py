"""Each request to the next replica in turn.

For requests and replicas that are all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View

SOURCE = "the usual default of load balancers"


@dataclass
class Router:
    needs: ClassVar[frozenset[str]] = frozenset()
    _turn: int = field(default=0, init=False)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        place = {}
        for seq in held:
            place[seq.id] = fleet[self._turn % len(fleet)].id
            self._turn += 1
        return Dispatch(place)
