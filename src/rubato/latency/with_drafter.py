"""A step of a model that has a drafter beside it: its own latency model, and the drafter's for the draft steps.

The first draft step runs what the batch has brought, prompts included (SLOs-Serve, Algorithm 3: prefill on the
drafter), each further one the last layer of every sequence's tree: a token of a chain, `width` of a beam search
(AdaServe, section 4.3). A `Shape` says how many these are in all (`draft_tokens`), not whose: they are spread evenly
over steps and sequences, at least one of each sequence in the batch. This is never too little, except for prompts with
only their last part in the batch; where all in it have trees of one depth and width, the steps are those of the
simulated engine.

Of a live engine with a drafter both parts are learnt, each from its own measured seconds (`Sample.drafting`):
`WithLearntDrafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel
from rubato.latency.model_wrapper import ModelWrapper
from rubato.latency.roofline_fit import Array, Coefficients, fit_planes, largest

MIN_STEP_S = 1e-6  # seconds: what a step without its drafts took at least


def without_drafts(shape: Shape) -> Shape:
    """The batch as the target runs it."""
    return shape._replace(spec_steps=0, draft_tokens=0)


@dataclass(frozen=True)
class _WithDrafts(ModelWrapper):
    """model: of the target alone. Without draft steps it answers."""

    def step_time(self, shape: Shape) -> float:
        tokens, seqs, kv, context, square, steps, chunks, chunk_kv, _ = shape
        if not steps:
            return self.model.step_time(shape)
        return self.model.seconds_of(tokens, seqs, kv, context, square, chunks, chunk_kv) + self._drafting(shape)

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
        """The target's part of a step."""
        shape = sample.shape
        if not shape.spec_steps:
            return sample
        drafting = sample.drafting or self._drafting(shape)
        return Sample(without_drafts(shape), max(MIN_STEP_S, sample.seconds - drafting))

    def _drafting(self, shape: Shape) -> float:
        """Seconds of the draft steps."""
        raise NotImplementedError(f"{type(self).__name__} does not say what drafting takes")


@dataclass(frozen=True)
class WithDrafter(_WithDrafts):
    """A model of the target's steps with the drafter's time added.

    Args:
        drafter: the model of one of the drafter's steps; it never learns.
    """

    drafter: LatencyModel

    def _drafting(self, shape: Shape) -> float:
        tokens, seqs, kv, context, square, steps, chunks, chunk_kv, drafts = shape
        seconds = self.drafter.seconds_of(tokens, seqs, kv, context, square, chunks, chunk_kv)
        later = steps - 1
        if later > 0:
            tokens, larger = divmod(max(drafts, later * seqs), later)
            seconds += (later - larger) * self._later_step(seqs, tokens, kv)
            if larger:
                seconds += larger * self._later_step(seqs, tokens + 1, kv)
        return seconds

    def _later_step(self, seqs: int, tokens: int, kv: int) -> float:
        """Seconds of a draft step after the first: `tokens` nodes, as many of each of `seqs` sequences, on top of `kv`
        tokens that these have in all. More than one of a sequence are as costly as a chunk of its prompt."""
        all_kv = kv + tokens
        if tokens <= seqs:
            return self.drafter.seconds_of(tokens, tokens, all_kv, 0, 0, 0, 0)
        context, square = tokens * kv // seqs, tokens * tokens // seqs
        return self.drafter.seconds_of(tokens, seqs, all_kv, context, square, seqs, all_kv)


@dataclass(slots=True)
class DraftTime(FittedModel):
    """What all draft steps of a batch take together, `T = max_2(k·(tokens + draft_tokens) + b·spec_steps) +
    a·kv·spec_steps`: seconds per token (k) and step (b) of each plane, and per KV token and step (a). It learns online
    as the models of whole steps do. The defaults are a low guess to begin with: drafts that are not tried teach
    nothing."""

    KIND: ClassVar = "draft_time"
    TITLE: ClassVar = "a model of draft steps"
    SETTINGS: ClassVar = ("k", "b", "a")
    GUESSED: ClassVar = ("k", "b")
    MIN_SAMPLES: ClassVar = 6
    COLUMNS: ClassVar = 2
    k: tuple[float, float] = (0.0, 1e-6)
    b: tuple[float, float] = (1e-4, 0.0)
    a: float = 0.0

    def _check(self) -> None:
        self._check_numbers(("k", "b"), 2)
        self._check_numbers(("a",))
        if max(*self.k, *self.b) <= 0.0:
            raise ValueError("draft_time k and b are all 0: give one a positive value")

    def features(self, shape: Shape) -> tuple[float, ...]:
        return (shape.tokens + shape.draft_tokens, shape.spec_steps, shape.kv * shape.spec_steps)

    def step_time(self, shape: Shape) -> float:
        """Seconds of the draft steps of a batch; 0 where there are none."""
        steps = shape.spec_steps
        if not steps:
            return 0.0
        tokens = shape.tokens + shape.draft_tokens
        (k, k_), (b, b_) = self.k, self.b
        return self.online.factor * (max(k * tokens + b * steps, k_ * tokens + b_ * steps) + self.a * shape.kv * steps)

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        self._take(fit_planes(rows[:, :2], rows[:, 2:-1], rows[:, -1]))

    def _refit(self) -> Coefficients | None:
        return self.online.refit(Coefficients(np.array([self.k, self.b]).T.copy(), np.array([self.a])), 0.0)

    def _take(self, fitted: Coefficients) -> None:
        (k, b), (k_, b_) = fitted.planes.tolist()
        self.k, self.b, self.a = (k, k_), (b, b_), float(fitted.shared[0])


@dataclass(frozen=True)
class WithLearntDrafter(_WithDrafts):
    """Of an engine that measures what drafting takes in each step: both parts learn."""

    drafter: DraftTime = field(default_factory=DraftTime)

    def fit(self, samples: Sequence[Sample]) -> None:
        """Both, the drafter where enough of the samples say what drafting took. Raises as they do."""
        drafts = [Sample(s.shape, s.drafting) for s in samples if s.shape.spec_steps and s.drafting > 0.0]
        if len(drafts) >= self.drafter.MIN_SAMPLES:
            self.drafter.fit(drafts)
        super().fit(samples)

    def update(self, sample: Sample) -> None:
        """Both learn."""
        if sample.shape.spec_steps and sample.drafting > 0.0:
            self.drafter.update(Sample(sample.shape, sample.drafting))
        super().update(sample)

    def _drafting(self, shape: Shape) -> float:
        return self.drafter.step_time(shape)
