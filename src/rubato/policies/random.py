"""Each request to a replica drawn at random, all equally likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View

SOURCE = "PolyServe, §5.1: baselines PD-Random and CO-Random"


@dataclass
class Router:
    """seed: of its own random stream, so that no other choice of a run shifts with it."""

    needs: ClassVar[frozenset[str]] = frozenset()
    seed: int = 0
    _draw: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        self._draw = np.random.default_rng(self.seed)

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        return Dispatch({seq.id: fleet[int(self._draw.integers(len(fleet)))].id for seq in held})
