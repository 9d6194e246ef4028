"""Splits a fleet into prefill and decode replicas, for routers with no other roles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rubato.core.interfaces import Dispatch, SeqView, View
from rubato.core.plan import Role
from rubato.policy_kit.greedy_router import GreedyRouter


@dataclass
class PooledRouter(GreedyRouter):
    """Places prompts on replicas that prefill, and KV on those that decode and have memory for it, else it stays held.

    Args:
        prefill, decode: the ratio of replicas that do one of them only; 0 = all do both
    """

    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode) < 0 or (self.prefill == 0) != (self.decode == 0):
            raise ValueError(
                f"prefill {self.prefill}, decode {self.decode}: give at least 1 of both, or leave both out"
            )

    def roles(self, replicas: Sequence[str]) -> Mapping[str, Role]:
        """Returns roles in the ratio of the settings; none if all do both."""
        name = type(self).__module__.rpartition(".")[2]
        return split(name, replicas, self.prefill, self.decode) if self.prefill else {}

    def place(self, held: Sequence[SeqView], fleet: Sequence[View], now: float) -> Dispatch:
        if not self.prefill:
            return super().place(held, fleet, now)
        self.begin(held, fleet)
        place: dict[str, str] = {}
        kv_taken: Counter[str] = Counter()  # blocks, by this dispatch
        for seq in held:
            able = [v for v in fleet if v.role.phase != ("prefill" if seq.cached else "decode")]
            if seq.cached:
                able = [v for v in able if v.limits.blocks(seq.cached) <= v.kv_free - kv_taken[v.id]]
            if able:
                view = able[self.choose(seq, able)]
                place[seq.id] = view.id
                kv_taken[view.id] += view.limits.blocks(seq.cached)
        return Dispatch(place)


def split(router: str, replicas: Sequence[str], prefill: int, decode: int) -> Mapping[str, Role]:
    """Returns roles in the ratio prefill : decode, to the nearest, at least one of both; the first ones prefill.

    Raises:
        ValueError: there are fewer than 2 replicas.
    """
    if len(replicas) < 2:
        raise ValueError(f"{router} needs at least 2 replicas, one to prefill and one to decode: there is 1")
    share = len(replicas) * prefill / (prefill + decode)
    first = min(max(1, round(share)), len(replicas) - 1)
    return {id: Role("prefill" if i < first else "decode") for i, id in enumerate(replicas)}
