"""A step of a model that has a drafter beside it: its own latency model, and the drafter's for the draft steps.

The first draft step runs what the batch has brought, prompts included (SLOs-Serve, Algorithm 3: prefill on the
drafter), each further one a token of every sequence. That every sequence of the batch drafts, as deep as the deepest,
is what a `Shape` can say: no less than it takes, but for prompts whose last part alone is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.roofline_fit import largest

LEAST = 1e-6  # seconds: what a step without its drafts took at least


@dataclass(frozen=True)
class Drafted(ModelWrapper):
    """model: of the target alone; drafter: of one of its steps, which never learns. What is asked without draft steps
    is the target's."""

    drafter: LatencyModel

    def step_time(self, shape: Shape) -> float:
        if not shape.spec_steps:
            return self.model.step_time(shape)
        plain = shape._replace(spec_steps=0)
        return self.model.step_time(plain) + self._drafting(plain, shape.spec_steps)

    def knee(self, base: Shape) -> int:
        """Of the target: drafts are over when it verifies."""
        return self.model.knee(base._replace(spec_steps=0))

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        chunk = self.model.largest_chunk(seconds, base._replace(spec_steps=0), cached, most)
        if not base.spec_steps:
            return chunk
        return largest(lambda c: self.step_time(base.plus(c, cached)) <= seconds, chunk, float(chunk))

    def fit(self, samples: Sequence[Sample]) -> None:
        """Fit the target, to what steps took without their drafts. Raises as it does."""
        self.model.fit([self._without(sample) for sample in samples])

    def update(self, sample: Sample) -> None:
        """The target learns."""
        self.model.update(self._without(sample))

    def _without(self, sample: Sample) -> Sample:
        shape = sample.shape
        if not shape.spec_steps:
            return sample
        plain = shape._replace(spec_steps=0)
        return Sample(plain, max(LEAST, sample.seconds - self._drafting(plain, shape.spec_steps)))

    def _drafting(self, shape: Shape, steps: int) -> float:
        seconds = self.drafter.step_time(shape)
        if steps > 1:
            seconds += (steps - 1) * self.drafter.step_time(Shape(shape.seqs, shape.seqs, shape.kv + shape.seqs))
        return seconds
