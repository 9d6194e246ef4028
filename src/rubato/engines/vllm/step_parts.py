"""The parts of a step inside vLLM: what can be scheduled, the view, the plan in vLLM's terms, the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.core.interfaces import View
from rubato.core.plan import NO_BATCH, Plan, Shape
from rubato.engines.vllm.due_columns import DueColumns
from rubato.engines.vllm.sequence import VllmSeq


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Holds a batch between its plan and its completion.

    Args:
        decodes: the part of its shape that decodes.
        since: when it began (s).
        sampling: requests that get at least one token.
        first_due: of requests that had missed nothing, no token after the first is due earlier (s); -inf: unknown.
    """

    output: Any  # vLLM's SchedulerOutput
    shape: Shape
    decodes: Shape
    since: float
    sampling: Sequence[VllmSeq]
    first_due: float


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Holds a checked plan in vLLM's terms.

    Args:
        chunks: tokens to run of each request, including drafted ones to verify.
        depths: tokens to draft of each request.
    """

    view: VllmView
    plan: Plan
    chunks: Mapping[str, int]
    depths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class VllmView(View):
    """Is a View whose derived values are computed when it is made."""

    running_ids: Collection[str] = ()
    prefilling: Sequence[VllmSeq] = ()
    decodes: Shape = NO_BATCH
    decode_blocks: int = 0
    due_columns: DueColumns = field(default_factory=lambda: DueColumns(()))

    @property
    def dues(self) -> NDArray[np.float64]:
        return self.due_columns.compute()


class Schedulable(NamedTuple):
    """vLLM's requests before a step.

    Args:
        waiting: can be scheduled and hold no KV.
        running: can be scheduled and hold KV, in order of start.
        moving: hold KV and cannot be scheduled, or their KV has not come.
        places: running places that these take.
        kv_taken: KV blocks that arrive in this step.
    """

    waiting: Sequence[Any]
    running: Sequence[Any]
    moving: Sequence[Any]
    places: int
    kv_taken: int


def runs_all_decodes(step: PlannedStep) -> bool:
    """Returns whether a step runs every decode of the view, and nothing else."""
    return step.plan.decode_all and not step.plan.work and len(step.chunks) == step.view.decodes.seqs


def chunks_of(plan: Plan, view: View) -> dict[str, int]:
    """Returns the tokens to run of each request: `spelled_out` without making a `Work` of each decode, in every
    step."""
    chunks = {}
    if plan.decode_all:
        prefilling = {s.id for s in view.prefilling}
        chunks = {s.id: 1 for s in view.running if s.id not in prefilling}
        for id in (*plan.preempt, *plan.drop, *plan.handoff):
            chunks.pop(id, None)
    for work in plan.work:
        chunks[work.seq] = work.tokens
    return chunks
