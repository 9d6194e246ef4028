"""Views of a replica, as a policy is shown them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rubato.core.interfaces import View
from rubato.core.plan import Limits
from tests.kit.replicas import Linear
from tests.kit.requests import Seq


def view(
    waiting: Sequence[Seq] = (), running: Sequence[Seq] = (), *, id: str = "r0", now: float = 0.0, kv_free: int = 1000,
    kv_total: int = 1000, limits: Limits | None = None, latency: Linear | None = None, **more: Any,
) -> View:  # fmt: skip
    """A replica with these requests. more: other fields of the view."""
    limits = limits or Limits(
        max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=kv_total, block_size=16
    )
    one = View(id, now, waiting, running, kv_free, kv_total, limits, latency or Linear())
    return replace(one, **more) if more else one


def idle_fleet(count: int, **more: Any) -> list[View]:
    """Replicas r0, r1, ... with nothing to do."""
    return [view(id=f"r{i}", **more) for i in range(count)]
