"""Defaults of latency models, derived from their `step_time`, and a wrapper that adds them to any other model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rubato.core.interfaces import LatencyModel, Line
from rubato.core.plan import Sample, Shape
from rubato.latency.roofline_fit import largest

KNEE_SLOWDOWN = 0.5  # relative: a step this much longer than its memory-bound time is at the knee
MAX_KNEE_TOKENS = 16384  # the search for a knee ends here, above any batch


class ModelBase:
    """A base for latency models (`LatencyModel` of `core.interfaces`), which define `step_time`, `largest_chunk`, `fit`
    and `update`."""

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
        """Returns `step_time` of the shape with these features."""
        return self.step_time(Shape(tokens, seqs, kv, chunk_context, chunk_sq, 0, chunks, chunk_kv))

    def line(self, seqs: int, kv: int) -> Line | None:
        """Returns None: the model has no lines."""
        return None

    def knee(self, base: Shape) -> int:
        """Returns `knee_of` the model, found by bisection."""
        return knee_of(self, base)

    def idle(self, seconds: float) -> None:
        """Does nothing: a model that does not learn has nothing to forget."""


def knee_of(model: ModelBase, base: Shape, most: int = MAX_KNEE_TOKENS) -> int:
    """Returns the largest n in [0, most] such that `base` with n more tokens takes at most 1 + `KNEE_SLOWDOWN` times as
    long as with one token a sequence, when it only reads weights and KV.

    A memory-bound step takes a little longer with each token, and kernels have a round corner, so the share is a
    choice. With this one the packaged Llama-3.1-70B (four A100) has its knee at 133 tokens beyond a lone decode; the
    line of its compute-bound steps reaches the time of that decode at 146.
    """
    drafts = Shape(spec_steps=base.spec_steps, draft_tokens=base.draft_tokens)
    floor = model.step_time(drafts._replace(tokens=base.seqs, seqs=base.seqs, kv=base.kv))
    limit = (1.0 + KNEE_SLOWDOWN) * floor
    return largest(lambda n: model.step_time(base._replace(tokens=base.tokens + n)) <= limit, most, 128.0)


MEMBERS = ("spread", "step_time", "seconds_of", "line", "knee", "largest_chunk", "fit", "update", "idle")


def with_defaults(model: Any) -> LatencyModel:
    """Returns a model, with defaults for the optional members that it lacks."""
    return model if all(hasattr(model, name) for name in MEMBERS) else ModelWithDefaults(model)


@dataclass(frozen=True)
class ModelWithDefaults(ModelBase):
    """A model with the four required members, and perhaps `spread`, completed by defaults."""

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
