"""A step of a model that has a drafter beside it: its own latency model, and the drafter's for the draft steps.

The first draft step runs what the batch has brought, prompts included (SLOs-Serve, Algorithm 3: prefill on the
drafter), each further one the last layer of every sequence's tree: a token of a chain, `width` of a beam search
(AdaServe, section 4.3). A `Shape` says how many these are in all (`draft_tokens`), not whose: they are spread evenly
over steps and sequences, at least one of each sequence in the batch. This is never too little, except for prompts with
only their last part in the batch; where all in it have trees of one depth and width, the steps are those of the
simulated engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.roofline_fit import largest

LEAST = 1e-6  # seconds: what a step without its drafts took at least


def without_drafts(shape: Shape) -> Shape:
    """The batch as the target runs it."""
    return shape._replace(spec_steps=0, draft_tokens=0)


def later_step(seqs: int, tokens: int, kv: int) -> Shape:
    """A draft step after the first: `tokens` nodes, as many of each of `seqs` sequences, on top of `kv` tokens that
    these have in all. More than one of a sequence are as costly as a chunk of its prompt."""
    if tokens <= seqs:
        return Shape(tokens, tokens, kv + tokens)
    return Shape(tokens, seqs, kv + tokens, tokens * kv // seqs, tokens * tokens // seqs, 0, seqs, kv + tokens)


@dataclass(frozen=True)
class Drafted(ModelWrapper):
    """model: of the target alone; drafter: of one of its steps, which never learns. Without draft steps the target's
    model answers."""

    drafter: LatencyModel

    def step_time(self, shape: Shape) -> float:
        if not shape.spec_steps:
            return self.model.step_time(shape)
        return self.model.step_time(without_drafts(shape)) + self._drafting(shape)

    def knee(self, base: Shape) -> int:
        """Of the target: drafts are over when it verifies."""
        return self.model.knee(without_drafts(base))

    def largest_chunk(self, seconds: float, base: Shape, cached: int, most: int) -> int:
        """The largest c in [0, most] such that `base.plus(c, cached)` takes at most `seconds`; 0 if none does."""
        chunk = self.model.largest_chunk(seconds, without_drafts(base), cached, most)
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
        return Sample(without_drafts(shape), max(LEAST, sample.seconds - self._drafting(shape)))

    def _drafting(self, shape: Shape) -> float:
        seconds = self.drafter.step_time(without_drafts(shape))
        later = shape.spec_steps - 1
        if later > 0:
            tokens, larger = divmod(max(shape.draft_tokens, later * shape.seqs), later)
            seconds += (later - larger) * self.drafter.step_time(later_step(shape.seqs, tokens, shape.kv))
            if larger:
                seconds += larger * self.drafter.step_time(later_step(shape.seqs, tokens + 1, shape.kv))
        return seconds
