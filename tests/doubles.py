"""Plain stand-ins that tests share: a latency model of one line, a request, a sequence, a view."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from rubato.core.interfaces import LatencyModel, View
from rubato.core.plan import Limits, Sample, Shape, Tree
from rubato.core.request import NOTHING, SLO, Request, Sampling, Stage
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.model_base import ModelBase
from rubato.replica import sequence
from rubato.simulation.run_spec import Hardware, RunSpec


@dataclass
class Linear(ModelBase):
    """fixed + per_token * tokens + per_kv * kv seconds."""

    fixed: float = 0.01
    per_token: float = 0.001
    per_kv: float = 0.0

    def step_time(self, shape: Shape) -> float:
        return self.fixed + self.per_token * shape.tokens + self.per_kv * shape.kv

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        chunks = range(1, most + 1)
        return bisect_right(chunks, seconds, key=lambda c: self.step_time(base.plus(c, cached)))

    def fit(self, samples: Sequence[Sample]) -> None:
        raise ValueError("this model is what it is")

    def update(self, sample: Sample) -> None:
        pass


def request(
    id: str = "a", prompt: int = 10, *, ttft: float | None = None, tpot: float | None = None, e2e: float | None = None,
    arrival: float = 0.0, tier: str = "default", refuse: bool = False, most: int = 16,
) -> Request:  # fmt: skip
    return Request(
        id,
        (Stage(prompt, SLO(ttft, tpot, e2e)),),
        arrival,
        tier=tier,
        sampling=Sampling(max_tokens=most),
        on_decline="refuse" if refuse else "best_effort",
    )


def run_spec(
    model: LatencyModel, limits: Limits, policy: str, settings: Mapping[str, object] = NOTHING, router: str = "auto",
    router_settings: Mapping[str, object] = NOTHING, *, learns: bool = True, **changes: Any,
) -> RunSpec:  # fmt: skip
    """A simulation of replicas with these step times; schedulers learn them, as live, unless told otherwise."""
    choice = PolicyChoice(policy, settings, router, router_settings)
    return RunSpec(Hardware("test", model, limits), choice, learns=learns, **changes)


def changed(spec: RunSpec, **changes: Any) -> RunSpec:
    """With other fields: its own, or those of its policy and router."""
    of_choice = {name: changes.pop(name) for name in set(changes) & {"policy", "settings", "router", "router_settings"}}
    return replace(spec, choice=replace(spec.choice, **of_choice), **changes)


@dataclass(eq=False)
class Seq:
    """A hand-made SeqView."""

    request: Request
    length: int = 10
    cached: int = 0
    blocks: int = 0
    in_flight: int = 0
    output: int = 0
    due: float = inf
    stage: int = 0
    stage_start: float = 0.0
    first_token_at: float | None = None
    demoted: bool = False
    missed: bool = False
    predicted: float | None = None
    draft: Tree | None = None
    tried: int = 0
    acceptance: float | None = None
    tool_seconds: float = 0.0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def slo(self) -> SLO:
        return self.request.stages[self.stage].slo

    @property
    def own_blocks(self) -> int:
        return self.blocks

    @property
    def pending(self) -> int:
        return self.length - self.cached

    @property
    def best_effort(self) -> bool:
        return self.demoted or self.request.best_effort


def shown(*requests: Request) -> list[sequence.Seq]:
    """Requests that are held, as a cluster shows them to a router."""
    seqs = [sequence.Seq(r, i, r.arrival) for i, r in enumerate(requests)]
    for one in seqs:
        if one.request.handoff is not None:
            one.cached = one.request.handoff.cached
    return seqs


def view(
    waiting: Sequence[Seq] = (), running: Sequence[Seq] = (), *, now: float = 0.0, kv_free: int = 1000,
    kv_total: int = 1000, limits: Limits | None = None, latency: Linear | None = None,
) -> View:  # fmt: skip
    limits = limits or Limits(
        max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=kv_total, block_size=16
    )
    return View("r0", now, waiting, running, kv_free, kv_total, limits, latency or Linear())
