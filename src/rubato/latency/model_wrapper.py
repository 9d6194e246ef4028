"""A latency model that wraps another one; a subclass overrides some of its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import LatencyModel, Line
from rubato.core.plan import Sample, Shape


@dataclass(frozen=True)
class ModelWrapper:
    """Passes every call of `interfaces.LatencyModel` on to `model`."""

    model: LatencyModel

    @property
    def spread(self) -> float:
        return self.model.spread

    def step_time(self, shape: Shape) -> float:
        return self.model.step_time(shape)

    def seconds_of(
        self, tokens: int, seqs: int, kv: int, chunk_context: int, chunk_sq: int, chunks: int, chunk_kv: int
    ) -> float:
        return self.model.seconds_of(tokens, seqs, kv, chunk_context, chunk_sq, chunks, chunk_kv)

    def line(self, seqs: int, kv: int) -> Line | None:
        return self.model.line(seqs, kv)

    def knee(self, base: Shape) -> int:
        return self.model.knee(base)

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        return self.model.largest_chunk(seconds, base, cached, most)

    def fit(self, samples: Sequence[Sample]) -> None:
        self.model.fit(samples)

    def update(self, sample: Sample) -> None:
        self.model.update(sample)

    def idle(self, seconds: float) -> None:
        self.model.idle(seconds)
