"""Splits a fleet into prefill and decode replicas, for routers with no other roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rubato.core.interfaces import SeqView, View
from rubato.core.plan import Role


def split(router: str, replicas: Sequence[str], prefill: int, decode: int) -> Mapping[str, Role]:
    """Roles in the ratio prefill : decode, to the nearest, at least one of both; the first ones prefill. Raises
    ValueError for fewer than 2 replicas."""
    if len(replicas) < 2:
        raise ValueError(f"{router} needs at least 2 replicas, one to prefill and one to decode: there is 1")
    share = len(replicas) * prefill / (prefill + decode)
    first = min(max(1, round(share)), len(replicas) - 1)
    return {id: Role("prefill" if i < first else "decode") for i, id in enumerate(replicas)}


def check_ratio(prefill: int, decode: int) -> None:
    """Raises ValueError unless both are 0 (replicas that do both) or both at least 1."""
    if min(prefill, decode) < 0 or (prefill == 0) != (decode == 0):
        raise ValueError(f"prefill {prefill}, decode {decode}: give at least 1 of both, or leave both out")


def candidates(seq: SeqView, fleet: Sequence[View], kv_taken: Mapping[str, int]) -> Sequence[View]:
    """Returns the replicas that may take it: those that prefill, or, if it brings KV, those that decode and have memory
    for that. `kv_taken`: KV blocks taken in this dispatch, by replica."""
    if not seq.cached:
        return [view for view in fleet if view.role.phase != "decode"]
    decodes = [view for view in fleet if view.role.phase != "prefill"]
    return [v for v in decodes if v.limits.blocks(seq.cached) <= v.kv_free - kv_taken.get(v.id, 0)]
