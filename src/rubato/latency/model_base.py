"""A latency model's defaults, all worked out from its `step_time`; and any other model, completed by these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rubato.core.interfaces import LatencyModel, Line
from rubato.core.plan import Sample, Shape
from rubato.latency.roofline_fit import largest

CORNER = 0.5  # a step this much longer than its memory-bound time is at the knee
MOST = 16384  # tokens that a knee is looked for up to: more than any batch holds


class ModelBase:
    """To be inherited by latency models (`LatencyModel` of `core.interfaces`), which define `step_time`,
    `largest_chunk`, `fit` and `update` themselves."""

    __slots__ = ()

    @property
    def spread(self) -> float:
        """Unknown: 0."""
        return 0.0

    def step_time(self, shape: Shape) -> float:
        raise NotImplementedError(f"{type(self).__module__}.{type(self).__name__} has no step_time: define it")

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        """By way of the shape."""
        return self.step_time(Shape(tokens, seqs, kv, chunk_context, chunk_sq, 0, chunks, chunk_kv))

    def line(self, seqs: int, kv: int) -> Line | None:
        """There is none."""
        return None

    def knee(self, base: Shape) -> int:
        """By bisection: the most tokens with which the step takes at most 1 + `CORNER` of its memory-bound time."""
        return knee_of(self, base)

    def idle(self, seconds: float) -> None:
        """What does not learn has nothing to forget."""


def knee_of(model: ModelBase, base: Shape, most: int = MOST) -> int:
    """The largest n in [0, most] such that `base` with n tokens more takes at most 1 + `CORNER` of what it takes with
    one token a sequence, when its time is that of reading weights and KV.

    A memory-bound step does take a little longer with each token, and kernels have a round corner, so some share must
    be chosen. With a share half as large again the packaged Llama-3.1-70B (four A100) has its knee at 133 tokens beyond
    a lone decode; the line of its compute-bound steps reaches the time of that decode at 146.
    """
    drafts = Shape(spec_steps=base.spec_steps, draft_tokens=base.draft_tokens)
    floor = model.step_time(drafts._replace(tokens=base.seqs, seqs=base.seqs, kv=base.kv))
    limit = (1.0 + CORNER) * floor
    return largest(lambda n: model.step_time(base._replace(tokens=base.tokens + n)) <= limit, most, 128.0)


MEMBERS = ("spread", "step_time", "seconds_of", "line", "knee", "largest_chunk", "fit", "update", "idle")


def completed(model: Any) -> LatencyModel:
    """Any model as it is, or with defaults for what it lacks. Raises TypeError, naming what is missing, for one without
    step_time, largest_chunk, fit or update."""
    lacking = [name for name in MEMBERS if not hasattr(model, name)]
    if needed := [name for name in lacking if not hasattr(ModelBase, name) or name == "step_time"]:
        raise TypeError(
            f"{type(model).__module__}.{type(model).__name__} has no {' and no '.join(needed)}: a latency model has "
            "step_time(shape), largest_chunk(seconds, base, cached, most), fit(samples) and update(sample)"
        )
    return Completed(model) if lacking else model


@dataclass(frozen=True)
class Completed(ModelBase):
    """A model that has the four members without which there is none, and perhaps `spread`; the rest by default."""

    model: Any

    @property
    def spread(self) -> float:
        return float(getattr(self.model, "spread", 0.0))

    def step_time(self, shape: Shape) -> float:
        return float(self.model.step_time(shape))

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return int(self.model.largest_chunk(seconds, base, cached, most))

    def fit(self, samples: Sequence[Sample]) -> None:
        self.model.fit(samples)

    def update(self, sample: Sample) -> None:
        self.model.update(sample)
