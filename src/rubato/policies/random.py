"""Each request to a replica drawn at random, all equally likely.

For comparison: what a router brings that knows nothing.

With prefill and decode apart (under distserve's scheduler), a prompt to one that prefills, its KV to one that decodes
and has memory for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.events import Event
from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Role
from rubato.policy_kit.pools import candidates, check_ratio, split

SOURCE = "PolyServe, §5.1: baselines PD-Random and CO-Random"


@dataclass
class Router:
    """seed: of its own random stream, so that no other choice of a run shifts with it. prefill, decode: the ratio of
    replicas that do one of them only; 0 = all do both."""

    needs: ClassVar[frozenset[str]] = frozenset()
    seed: int = 0
    prefill: int = 0
    decode: int = 0
    _draw: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        check_ratio(self.prefill, self.decode)
        self._draw = np.random.default_rng(self.seed)

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        return split("random", replicas, self.prefill, self.decode) if self.prefill else {}

    def observe(self, events: Sequence[Event]) -> None:
        pass

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        place: dict[str, str] = {}
        kv_taken: Counter[str] = Counter()  # KV blocks
        for seq in held:
            if able := candidates(seq, fleet, kv_taken) if self.prefill else fleet:
                view = able[int(self._draw.integers(len(able)))]
                place[seq.id] = view.id
                kv_taken[view.id] += view.limits.blocks(seq.cached)
        return Dispatch(place)
