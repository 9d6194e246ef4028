"""`rubato profile`: a hardware profile for a model of your own, measured on our engine or made of kernel tables."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import orjson

from rubato.cli import common_options
from rubato.core.clock import WallClock
from rubato.core.plan import Sample
from rubato.latency import profiles, step_samples
from rubato.latency.profiles import aiconfigurator
from rubato.latency.profiles.kernel_profiles import (
    MAX_CONTEXT_TOKENS,
    Known,
    compose,
    compose_by_name,
    dims_of,
    name_of,
)
from rubato.latency.profiles.profile import Profile
from rubato.measure.profile_engine import profile_of

EXAMPLES = (
    "--list",
    "bundled --out smollm.json --steps steps.csv",
    "--aiconfigurator llama-3.1-8b h200",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="*", metavar="MODEL",
        help="to measure: a Hugging Face folder, a GGUF file or `bundled`; with --aiconfigurator: MODEL GPU, a model "
        f"known by name or its config.json, and {', '.join(aiconfigurator.GPUS)} (2xa100: two of them)",
    )  # fmt: skip
    parser.add_argument("--aiconfigurator", action="store_true", help="make it from kernel tables instead of measuring")
    parser.add_argument("--list", action="store_true", help="list the packaged profiles")
    parser.add_argument("--out", metavar="FILE", help="the profile to write (default NAME.json)")
    parser.add_argument("--steps", metavar="FILE", help="also write the measured steps, a CSV table for `rubato fit`")
    parser.add_argument("--name", metavar="NAME", help="of the profile (default: from model and GPU)")
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto", help="cpu, cuda, ... (default: CUDA where there is one)"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes", dest="kv_gib", type=common_options.gib, default=1.0, metavar="BYTES",
        help="KV memory of the measured engine, such as 4G (default 1G)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="steps measured of each kind (default 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the steps that are measured (default 0)")


def run(args: argparse.Namespace) -> int:
    """Makes or lists profiles. Raises ValueError for a wrong model or option, ImportError where an extra is missing."""
    if args.list:
        for name in profiles.names():
            profile = profiles.load(name)
            print(f"{name}  {profile.about}; KV {profile.kv_tokens} tokens")
        return 0
    if args.aiconfigurator:
        return _write(args, _compose_profile(args))
    if len(args.model) != 1:
        raise ValueError("name one model to measure (`bundled`), or ask for --aiconfigurator MODEL GPU, or --list")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats}: give 1 or more")
    profile, samples = asyncio.run(_measure_profile(args))
    if args.steps:
        step_samples.write(args.steps, {profile.name: samples})
    return _write(args, profile)


def _write(args: argparse.Namespace, profile: Profile) -> int:
    path = Path(args.out or f"{profile.name}.json")
    path.write_bytes(orjson.dumps(profile.to_json()))
    print(f"{path}: {profile.about}; KV {profile.kv_tokens} tokens; {profile.provenance}")
    return 0


def _compose_profile(args: argparse.Namespace) -> Profile:
    if len(args.model) != 2:
        raise ValueError("--aiconfigurator takes MODEL GPU, such as llama-3.1-8b h200")
    model, gpu = args.model
    count, _, several = gpu.partition("x")
    gpus, kind = (int(count), several) if several and count.isdigit() else (1, gpu)
    if not model.endswith(".json"):
        profile = compose_by_name(model, kind, gpus)
        return replace(profile, name=args.name or profile.name)
    config = json.loads(Path(model).read_text(encoding="utf-8"))
    title = args.name or Path(model).resolve().parent.name
    known = Known(title, dims_of(config), config.get("max_position_embeddings", MAX_CONTEXT_TOKENS))
    return compose(args.name or name_of(title.lower(), kind, gpus), known, kind, gpus)


async def _measure_profile(args: argparse.Namespace) -> tuple[Profile, list[Sample]]:
    from rubato.engines.torch import Engine  # needs the torch extra

    engine = Engine(args.model[0], device=args.device, kv_gib=args.kv_gib)
    device = args.device if args.device != "auto" else "this machine"
    name = args.name or f"{engine.model_name.lower()}-{args.device}"
    about = f"{engine.model_name} on the embedded engine, {platform.machine()}, {os.cpu_count()} cores"
    return await profile_of(engine, name, about, device, args.repeats, args.seed, WallClock(), print)
