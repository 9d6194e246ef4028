"""A replica that is driven by hand, and the latency model of one line that tests use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rubato.core.events import Event
from rubato.core.plan import Emitted, Plan, Sample, Shape, StepResult, Work
from rubato.latency.model_base import ModelBase
from rubato.replica.replica import Replica
from tests.kit import integrity


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


def run_step(
    replica: Replica, plan: Plan | Mapping[str, int], start: float = 0.0, end: float | None = None, token: int = 7,
    **out: Emitted,
) -> list[Event]:  # fmt: skip
    """Apply and commit one step, 0.1 s long if nothing else is said, and check the books. A sequence that samples emits
    one token unless `out` says otherwise.

    Args:
        plan: or the tokens of each sequence.
    """
    end = start + 0.1 if end is None else end
    if not isinstance(plan, Plan):
        plan = Plan(tuple(Work(id, tokens) for id, tokens in plan.items()))
    replica.view(start)  # as a policy would
    batch, events = replica.apply(plan, start, "test")
    if batch.entries:
        emitted = {e.seq: out.get(e.seq, Emitted(1, "x", (token,))) for e in batch.entries if e.sample}
        events = [*events, *replica.commit(batch, StepResult(emitted, end - start), end)]
    integrity.check(replica)
    return events
