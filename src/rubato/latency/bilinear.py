"""Bilinear latency (SA, equations 14 to 17), of b jobs of l tokens each:

    prefill  t_p(b, l) = α_p·b·l + β_p·b + γ_p·l + δ_p
    decode   τ_d(b, l) = α_d·b·l + β_d·b + γ_d·l + δ_d    one step;    t_d = Σ_{k=1..o} τ_d(b, l + k)

The paper's coefficients, in milliseconds, are of Qwen2.5-7B on two V100s; here all are seconds. `prefill`, `step` and
`decode` are these formulas as a scheduler asks them. `step_time` says the same of a batch of whole prompts and of a
batch of decodes, b·l being the sum L of the jobs' lengths and l their mean; a step of both kinds, which the paper does
not have, is a decode step of all its sequences, on what they have cached, and the prefill's excess over it:

    T = α_d·L + β_d·seqs + γ_d·L/seqs + δ_d  +  α_p·C + (β_p − β_d)·chunks + γ_p·C/chunks + (δ_p − δ_d)

with C the chunks' tokens and L all others. Ours too: β·b + γ·L/b falls when a short job joins few long ones, and
`step_time` takes the largest function below it that does not: 2·√(β·γ·L) where b < √(γ·L/β). With the paper's numbers
that touches a lone decode of more than 313 tokens, by 3.5 % of a step at 2000, and five or more of 1500 not at all.
Tokens of a decode beyond one, such as drafted ones, are not seen: there is no knee, as far as it goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rubato.core.plan import Sample, Shape
from rubato.latency.fitted_model import FittedModel
from rubato.latency.least_squares import nnls
from rubato.latency.roofline_fit import Array

Four = tuple[float, float, float, float]
PREFILL: Four = (0.1e-3, 5.7e-3, 0.01e-3, 43.67e-3)  # the paper's Table 2
DECODE: Four = (0.0002e-3, 0.275e-3, 0.00088e-3, 15.85e-3)


@dataclass(slots=True)
class Model(FittedModel):
    """A step takes the time of its prefill and of its decodes, each bilinear. A prompt's token, a prompt and a prefill
    cost at least what they do in decoding (α_p ≥ α_d + γ_d, β_p ≥ β_d, δ_p ≥ δ_d).

    Args:
        p, d: (α, β, γ, δ) of prefill and decode, seconds, >= 0; the paper's by default.

    Raises:
        ValueError: coefficients that cannot be.
    """

    KIND: ClassVar = "bilinear"
    TITLE: ClassVar = "a bilinear model"
    SETTINGS: ClassVar = ("p", "d")
    GUESSED: ClassVar = ("p", "d")
    MIN_SAMPLES: ClassVar = 12
    p: Four = PREFILL
    d: Four = DECODE

    def _check(self) -> None:
        self._check_numbers(self.SETTINGS, 4)
        if max(self.d[1], self.d[3]) <= 0.0:
            raise ValueError("bilinear d makes a decode step take no time: give its β or δ a positive value")
        (a_p, b_p, _, d_p), (a, b, y, d) = self.p, self.d
        if a_p < a + y or b_p < b or d_p < d:
            raise ValueError(
                "bilinear p must be at least d in β and δ, and in α at least α + γ: prefill adds to a decode step"
            )

    def prefill(self, jobs: float, length: float) -> float:
        """Seconds to prefill `jobs` prompts of `length` tokens together: t_p."""
        a, b, c, d = self.p
        return a * jobs * length + b * jobs + c * length + d

    def step(self, jobs: float, length: float) -> float:
        """Seconds of one decode step of `jobs` sequences of `length` tokens: τ_d."""
        a, b, c, d = self.d
        return a * jobs * length + b * jobs + c * length + d

    def decode(self, jobs: float, length: float, output: int) -> float:
        """Seconds in which `jobs` sequences that began with `length` tokens decode `output` more: t_d, closed form."""
        a, b, c, d = self.d
        lengths = output * length + output * (output + 1) / 2.0
        return (a * jobs + c) * lengths + (b * jobs + d) * output

    def step_time(self, shape: Shape) -> float:
        """Seconds that a batch of this shape takes."""
        seqs, chunks = shape.seqs, shape.chunks
        c = shape.tokens - (seqs - chunks) if chunks else 0
        a, b, y, d = self.d
        time = a * (shape.kv - c) + _rising(b, y, seqs, shape.kv - c) + d
        if chunks:
            a_p, b_p, y_p, d_p = self.p
            time += a_p * c + _rising(b_p - b, y_p, chunks, c) + (d_p - d)
        return self.online.factor * time

    def features(self, shape: Shape) -> tuple[float, ...]:
        """What the coefficients are multiplied by: prefill's α, excess β, γ and excess δ, then decode's four."""
        s = shape
        c = s.tokens - (s.seqs - s.chunks) if s.chunks else 0
        rest = s.kv - c
        prefill = (c, s.chunks, c / s.chunks, 1.0) if s.chunks else (0.0,) * 4
        return (*prefill, rest, s.seqs, rest / max(1, s.seqs), 1.0)

    def _solve(self, rows: Array, samples: Sequence[Sample]) -> None:
        """All eight by non-negative least squares (a δ of prefill is at least that of decode); they stay, as the
        paper's do. Raises ValueError when all samples are of one kind."""
        if not rows[:, 0].any() or not rows[:, 4].any():
            raise ValueError("a bilinear model needs steps with chunks of prefill and steps with decodes: measure both")
        # step_time cuts down a γ with little β beside it: fits without either γ are tried too, and step_time judges.
        tried = [_solved(rows, without) for without in ((), (2,), (6,), (2, 6))]
        best = min(tried, key=lambda m: float(np.mean([abs(m.step_time(s.shape) / s.seconds - 1.0) for s in samples])))
        self.p, self.d = best.p, best.d


def _rising(per_job: float, per_length: float, jobs: int, total: int) -> float:
    """The largest function of (jobs, total) that never falls in either and is at most per_job·jobs +
    per_length·total/jobs."""
    if per_job * jobs * jobs >= per_length * total:
        return per_job * jobs + (per_length * total / jobs if jobs else 0.0)
    return 2.0 * math.sqrt(per_job * per_length * total)


def _solved(rows: Array, without: tuple[int, ...]) -> Model:
    """Non-negative least squares in relative error, leaving out these features."""
    x = rows[:, :-1] / rows[:, -1:]
    x[:, 4] += x[:, 0]  # α_p = α_d + γ_d + what C costs beyond
    if 6 not in without:
        x[:, 6] += x[:, 0]
    x[:, list(without)] = 0.0
    size = np.sqrt((x * x).mean(axis=0))
    size[size == 0.0] = 1.0
    excess, jobs, y_p, base, a, b, y, d = (nnls(x / size, np.ones(len(x))) / size).tolist()
    return Model((a + y + excess, b + jobs, y_p, d + base), (a, b, y, d))
