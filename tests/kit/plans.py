"""Plans of a scheduler for a view made by hand: 40 blocks of 10 tokens, 10 ms and 1 ms a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rubato import policies
from rubato.core.interfaces import Scheduler, View
from rubato.core.plan import Limits, Plan
from rubato.core.request import Handoff, Request
from rubato.replica.plan_check import check, spelled_out
from tests.kit.replicas import Linear
from tests.kit.requests import Seq, request
from tests.kit.views import view


class SpelledOut:
    """A policy whose plans are possible, and name every decode."""

    def __init__(self, name: str, settings: dict[str, object] | None = None) -> None:
        self.inner: Scheduler = policies.load(name, settings)
        self.observe = self.inner.observe

    def plan(self, view: View) -> Plan:
        plan = self.inner.plan(view)
        check(plan, replace(view, supports=view.supports | self.inner.needs), "under test")
        return spelled_out(plan, view)


load = SpelledOut
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=500, kv_blocks=40, block_size=10)


def decode(id: str, length: int = 21, **slo: float) -> Seq:
    """A running sequence with one token pending."""
    due = slo.pop("due", float("inf"))
    return Seq(request(id, 10, **slo), length, length - 1, -(-(length - 1) // 10), 1, due=due)  # type: ignore[arg-type]


def prompt(id: str, length: int, **slo: float) -> Seq:
    """A waiting sequence; its first token is due at its TTFT."""
    refuse = bool(slo.pop("refuse", 0))
    demoted = bool(slo.pop("demoted", 0))
    due = slo.get("ttft", float("inf"))
    return Seq(request(id, length, refuse=refuse, **slo), length, due=due, demoted=demoted)  # type: ignore[arg-type]


def seen(waiting: Sequence[Seq], running: Sequence[Seq], **more: Any) -> View:
    return view(waiting, running, **{"kv_free": 40, "kv_total": 40, "limits": LIMITS, "latency": Linear(), **more})


def work(plan: Plan) -> dict[str, int]:
    return {w.seq: w.tokens for w in plan.work}


def fleet(*pending: int) -> list[View]:
    """Replicas r0, r1, ... with so many tokens that wait."""
    return [seen([prompt(f"p{i}", n)] if n else [], [], id=f"r{i}") for i, n in enumerate(pending)]


def moved(id: str, cached: int) -> Request:
    """One that a replica p0 has prefilled."""
    return replace(request(id, cached), handoff=Handoff("p0", "prefilled", 0.0, cached))
