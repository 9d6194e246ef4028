"""`rubato profile`: a hardware profile for a model of your own, measured on our engine or made of kernel tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from statistics import median

import numpy as np

from rubato.core.clock import Clock
from rubato.core.interfaces import Engine
from rubato.core.plan import Batch, Entry, Limits, Sample
from rubato.core.request import Request, Sampling, Stage
from rubato.latency import affine
from rubato.latency.fit import error_report
from rubato.latency.profiles.profile import Profile

ORDER = 41  # random stream: the order in which points are measured
DECODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 512, 1500)
CHUNKS = (16, 64, 256, 512, 1024)
BESIDE = (4, 16)  # decodes next to a chunk


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """A batch to measure: `decodes` sequences with `context` tokens cached; a chunk (0: none) on top of `cached`."""

    decodes: int
    context: int
    chunk: int = 0
    cached: int = 0


def points(limits: Limits) -> list[ProfilePoint]:
    """Batch, context and chunk varied separately, as far as the engine goes."""
    found = [ProfilePoint(n, k) for n in DECODES for k in CONTEXTS]
    found += [ProfilePoint(0, 0, c, k) for c in CHUNKS for k in (0, *CONTEXTS[1:])]
    found += [ProfilePoint(n, CONTEXTS[1], c, k) for n in BESIDE for c in CHUNKS for k in (0, CONTEXTS[1])]
    return [point for point in found if _fits(point, limits)]


async def measure(engine: Engine, repeats: int, seed: int, clock: Clock, said: Callable[[str], None]) -> list[Sample]:
    """Each point the median of `repeats` steps, points in random order each time, after a first round that warms up.
    The time is from giving the batch to having its tokens, as a replica books it.

    What the KV cache holds makes no difference to time, so contexts are not computed: blocks are read as they lie.
    """
    await engine.start()
    todo = points(engine.limits)
    rng = np.random.default_rng([seed, ORDER])
    seconds_of: dict[ProfilePoint, list[float]] = {point: [] for point in todo}
    for round_ in range(repeats + 1):
        for i in rng.permutation(len(todo)).tolist():
            seconds = await _step(engine, _batch(todo[i], engine.limits), clock)
            if round_:
                seconds_of[todo[i]].append(seconds)
        said(f"round {round_} of {repeats}: {len(todo)} steps")
    return [Sample(_batch(point, engine.limits).shape, median(seconds)) for point, seconds in seconds_of.items()]


async def profile_of(
    engine: Engine,
    name: str,
    about: str,
    device: str,
    repeats: int,
    seed: int,
    clock: Clock,
    said: Callable[[str], None],
) -> tuple[Profile, list[Sample]]:
    """The affine model of what `measure` finds, and the steps themselves. Raises ValueError when the engine takes too
    small batches to tell the coefficients apart."""
    try:
        samples = await measure(engine, repeats, seed, clock, said)
        token = (await engine.export_kv([0], 1)).size
    finally:
        await engine.close()
    model = affine.Model()
    model.fit(samples)
    limits = engine.limits
    fits = error_report(model, samples).format()
    provenance = f"measured: {len(samples)} kinds of step, {repeats} times each, on {device}; {fits}"
    tokens = limits.kv_blocks * limits.block_size
    made = Profile(name, about, device, 1, tokens, token, limits.max_model_len, model.to_dict(), None, {}, provenance)
    return made, samples


async def _step(engine: Engine, batch: Batch, clock: Clock) -> float:
    for entry in batch.entries:
        length = entry.start + entry.count
        stage = Stage(length, token_ids=tuple(1 + i % 64 for i in range(length)))
        engine.add(Request(entry.seq, (stage,), 0.0, sampling=Sampling(max_tokens=1, ignore_eos=True)))
    began = clock.now()
    await engine.execute(batch)
    seconds = clock.now() - began
    engine.forget([entry.seq for entry in batch.entries])
    return seconds


def _batch(point: ProfilePoint, limits: Limits) -> Batch:
    free = iter(range(limits.kv_blocks))
    work = [(point.context, 1)] * point.decodes + ([(point.cached, point.chunk)] if point.chunk else [])
    held = [tuple(islice(free, limits.blocks(k + c))) for k, c in work]
    return Batch(tuple(Entry(str(i), k, c, held[i], True) for i, (k, c) in enumerate(work)))


def _fits(point: ProfilePoint, limits: Limits) -> bool:
    need = point.decodes * limits.blocks(point.context + 1) + limits.blocks(point.cached + point.chunk)
    return (
        need <= limits.kv_blocks
        and point.decodes + (point.chunk > 0) <= limits.max_num_seqs
        and point.decodes + point.chunk <= limits.max_num_batched_tokens
        and max(point.context, point.cached + point.chunk) < limits.max_model_len
    )
