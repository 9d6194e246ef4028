"""Requests, and what a view shows of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from rubato.core.plan import Tree
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.replica import sequence


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
