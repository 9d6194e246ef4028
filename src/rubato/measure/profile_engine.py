"""`rubato profile`: a hardware profile for a model of your own, measured on our engine or made of kernel tables."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from rubato.core.clock import Clock, WallClock
from rubato.core.interfaces import Engine
from rubato.core.plan import Batch, Entry, Limits, Sample
from rubato.core.request import Request, Sampling, Stage
from rubato.latency import affine, profiles, step_table
from rubato.latency.fit_error import error_report
from rubato.latency.profiles import aiconfigurator, packaged
from rubato.latency.profiles.profile import Profile

ORDER = 41  # random stream: the order in which points are measured
DECODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (32, 512, 1500)
CHUNKS = (16, 64, 256, 512, 1024)
BESIDE = (4, 16)  # decodes next to a chunk


@dataclass(frozen=True, slots=True)
class Point:
    """A batch to measure: `decodes` sequences with `context` tokens cached; a chunk (0: none) on top of `cached`."""

    decodes: int
    context: int
    chunk: int = 0
    cached: int = 0


def points(limits: Limits) -> list[Point]:
    """Batch, context and chunk varied separately, as far as the engine goes."""
    found = [Point(n, k) for n in DECODES for k in CONTEXTS]
    found += [Point(0, 0, c, k) for c in CHUNKS for k in (0, *CONTEXTS[1:])]
    found += [Point(n, CONTEXTS[1], c, k) for n in BESIDE for c in CHUNKS for k in (0, CONTEXTS[1])]
    return [point for point in found if _fits(point, limits)]


async def measure(engine: Engine, repeats: int, seed: int, clock: Clock, said: Callable[[str], None]) -> list[Sample]:
    """Each point the median of `repeats` steps, points in random order each time, after a first round that warms up.
    The time is from giving the batch to having its tokens, as a replica books it.

    What the KV cache holds makes no difference to time, so contexts are not computed: blocks are read as they lie.
    """
    await engine.start()
    todo = points(engine.limits)
    rng = np.random.default_rng([seed, ORDER])
    taken: dict[Point, list[float]] = {point: [] for point in todo}
    for round_ in range(repeats + 1):
        for i in rng.permutation(len(todo)).tolist():
            seconds = await _step(engine, _batch(todo[i], engine.limits), clock)
            if round_:
                taken[todo[i]].append(seconds)
        said(f"round {round_} of {repeats}: {len(todo)} steps")
    return [Sample(_batch(point, engine.limits).shape, median(seconds)) for point, seconds in taken.items()]


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
    tokens = limits.kv_blocks * limits.block
    made = Profile(name, about, device, 1, tokens, token, limits.max_length, model.to_dict(), None, {}, provenance)
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


def _batch(point: Point, limits: Limits) -> Batch:
    blocks = iter(range(limits.kv_blocks))
    work = [(point.context, 1)] * point.decodes + ([(point.cached, point.chunk)] if point.chunk else [])
    entries = [Entry(str(i), k, c, _held(blocks, k + c, limits.block), True) for i, (k, c) in enumerate(work)]
    return Batch(tuple(entries))


def _held(blocks: Iterator[int], tokens: int, block: int) -> tuple[int, ...]:
    return tuple(next(blocks) for _ in range(-(-tokens // block)))


def _fits(point: Point, limits: Limits) -> bool:
    need = point.decodes * -(-(point.context + 1) // limits.block) + -(-(point.cached + point.chunk) // limits.block)
    return (
        need <= limits.kv_blocks
        and point.decodes + (point.chunk > 0) <= limits.max_seqs
        and point.decodes + point.chunk <= limits.max_tokens
        and max(point.context, point.cached + point.chunk) < limits.max_length
    )


# --------------------------------------------------------------------------- the command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="*",
        help="to measure: a Hugging Face folder, a GGUF file or `bundled`; with --aiconfigurator: MODEL GPU, a model "
        f"known by name or its config.json, and {', '.join(aiconfigurator.GPUS)} (2xa100: two of them)",
    )  # fmt: skip
    parser.add_argument("--aiconfigurator", action="store_true", help="make it from kernel tables instead of measuring")
    parser.add_argument("--list", action="store_true", help="the packaged profiles")
    parser.add_argument(
        "--packaged", metavar="FOLDER", help="make the packaged profiles again (all but the measured one)"
    )
    parser.add_argument("--out", metavar="FILE", help="the profile to write (default NAME.json)")
    parser.add_argument("--steps", metavar="FILE", help="also write the measured steps, a CSV table for `rubato fit`")
    parser.add_argument("--name", help="of the profile (default: from model and GPU)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument("--kv-gib", type=float, default=1.0, help="KV memory of the measured engine")
    parser.add_argument("--repeats", type=int, default=5, help="steps measured of each kind (default 5)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for what cannot be profiled, ImportError where an extra is missing."""
    if args.list:
        for name in profiles.names():
            profile = profiles.load(name)
            print(f"{name}  {profile.about}; KV {profile.kv_tokens} tokens")
        return 0
    if args.packaged:
        for name, data in packaged.everything().items():
            Path(args.packaged, f"{name}.json").write_bytes(orjson.dumps(data))
        return 0
    if args.aiconfigurator:
        return _write(args, _composed(args))
    if len(args.model) != 1:
        raise ValueError("name one model to measure (`bundled`), or ask for --aiconfigurator MODEL GPU, or --list")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give 1 or more")
    profile, samples = asyncio.run(_measured(args))
    if args.steps:
        step_table.write(args.steps, {profile.name: samples})
    return _write(args, profile)


def _write(args: argparse.Namespace, profile: Profile) -> int:
    path = Path(args.out or f"{profile.name}.json")
    path.write_bytes(orjson.dumps(profile.to_json()))
    print(f"{path}: {profile.about}; KV {profile.kv_tokens} tokens; {profile.provenance}")
    return 0


def _composed(args: argparse.Namespace) -> Profile:
    if len(args.model) != 2:
        raise ValueError("--aiconfigurator takes MODEL GPU, such as llama-3.1-8b h200")
    model, gpu = args.model
    count, times, kind = gpu.partition("x")
    gpus = int(count) if times and count.isdigit() else 1
    kind = kind if times and count.isdigit() else gpu
    if not model.endswith(".json"):
        made = packaged.made(model, kind, gpus)
        return made if args.name is None else packaged.composed(args.name, packaged.MODELS[model], kind, gpus)
    config = json.loads(Path(model).read_text(encoding="utf-8"))
    title = args.name or Path(model).resolve().parent.name
    known = packaged.Known(title, packaged.dims_of(config), config.get("max_position_embeddings", packaged.CONTEXT))
    return packaged.composed(args.name or packaged.name_of(title.lower(), kind, gpus), known, kind, gpus)


async def _measured(args: argparse.Namespace) -> tuple[Profile, list[Sample]]:
    from rubato.engines import torch as embedded  # needs the torch extra

    engine = embedded.Engine(args.model[0], device=args.device, kv_gib=args.kv_gib)
    device = args.device if args.device != "auto" else "this machine"
    name = args.name or f"{engine.model_name.lower()}-{args.device}"
    about = f"{engine.model_name} on the embedded engine, {platform.machine()}, {os.cpu_count()} cores"
    return await profile_of(engine, name, about, device, args.repeats, args.seed, WallClock(), print)
