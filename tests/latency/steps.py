"""Batches and noisy step times of a planted model, for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Sample, Shape


def decodes(rng: random.Random, most: int = 24) -> Shape:
    shape = Shape()
    for _ in range(rng.randint(1, most)):
        shape = shape.plus(1, rng.randint(10, 1500))
    return shape


def with_chunk(rng: random.Random) -> Shape:
    return decodes(rng).plus(rng.randint(2, 512), rng.choice([0, rng.randint(1, 1000)]))


def mixed(rng: random.Random) -> Shape:
    return with_chunk(rng) if rng.random() < 0.3 else decodes(rng)


def drafted(rng: random.Random) -> Shape:
    return Shape(tokens=rng.randint(1, 600), seqs=1, spec_steps=rng.randint(0, 6))


def run(
    truth: LatencyModel,
    kind: Callable[[random.Random], Shape],
    count: int,
    rng: random.Random,
    noise: float = 0.0,
    odd: float = 0.0,
    slow: float = 1.0,
) -> list[Sample]:
    """`count` steps at `slow` times the planted time, with log-normal noise and a part of `odd` three times as long."""
    out = []
    for _ in range(count):
        shape = kind(rng)
        longer = 3.0 if rng.random() < odd else 1.0
        out.append(Sample(shape, truth.step_time(shape) * slow * longer * rng.lognormvariate(0.0, noise)))
    return out
