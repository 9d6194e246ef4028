"""Options of `sweep`, `capacity`, `bound`, `plan` and `judge`: replica, policies, requests, and how to run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from rubato.cli import answers, common_options, trace_options
from rubato.config.build import choice_of, guessed_settings, simulation_limits
from rubato.config.schema import Config, load
from rubato.core.cpu_usage import usable_cores
from rubato.core.slo import SLO_RULES
from rubato.engines.simulated import step_noise
from rubato.fleet.cluster_options import PolicyChoice
from rubato.planning.request_source import (
    FileSource,
    MixSource,
    RequestSource,
    ScenarioSource,
    TraceSource,
    count_of,
)
from rubato.simulation.configured import hardware_of, run_spec_of
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.workloads.workload import check_rate


def _noise(text: str) -> step_noise.Noise:
    """Returns a number, the spread of the noise, or the text of its kind."""
    try:
        return float(text)
    except ValueError:
        return text


def replica(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declares options that describe a replica and are not in its configuration."""
    options = parser.add_argument_group("replica")
    options.add_argument(
        "--profile",
        metavar="NAME",
        help="hardware profile, NAME, FILE.json or NAME@HOST_TERM: step times, KV capacity, GPUs",
    )
    options.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a batch")
    options.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens in a batch")
    options.add_argument("--kv-tokens", type=int, metavar="N", help="KV capacity in tokens")
    options.add_argument(
        "--host-scale", type=float, default=1.0, metavar="F",
        help="with --profile: factor on the seconds of a step outside the device",
    )  # fmt: skip
    options.add_argument(
        "--noise", type=_noise, default=0.0, metavar="KIND",
        help="of step times: iid:0.05 (or 0.05), replay:RECORDING, wander, fast:1.3, or several joined by +",
    )  # fmt: skip
    return options


def add(parser: argparse.ArgumentParser, seeds: bool = True, with_policies: bool = True) -> None:
    replica_and_configuration(parser)
    if with_policies:
        policies(parser)
    requests = parser.add_argument_group("requests")
    requests.add_argument("--scenario", metavar="NAME", help="a packaged workload (`rubato workload --list`)")
    requests.add_argument("--workload", metavar="FILE", help="workload file")
    requests.add_argument(
        "--trace", metavar="FILE", help="CSV or JSON lines of times and lengths; tiers by --kinds' shares"
    )
    requests.add_argument("--scale", type=float, default=1.0, metavar="F", help="with --trace: factor on its traffic")
    trace_options.add(requests)
    common_options.tiers(requests)
    common_options.amount(requests)
    if seeds:
        requests.add_argument(
            "--seeds", type=common_options.seeds, default=[0, 1, 2, 3], metavar="0,1,2",
            help="seeds of the random draws, a run each; 8 or more tell small differences",
        )  # fmt: skip
    running(parser)


def running(parser: argparse.ArgumentParser) -> None:
    """Declares options on where jobs run and where results go."""
    options = parser.add_argument_group("running and results")
    options.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core, less one)")
    options.add_argument(
        "--ray", metavar="ADDRESS", help="run jobs on a Ray cluster: HOST:PORT, or auto for the one of this machine"
    )
    options.add_argument("--resume", metavar="FILE", help="file of finished parts; an interrupted run resumes from it")
    options.add_argument("--no-progress", action="store_true", help="say nothing until the results")
    answers.add_to(options)


def replica_and_configuration(parser: argparse.ArgumentParser) -> None:
    options = replica(parser)
    options.add_argument(
        "--config", metavar="FILE", help="YAML file: the replica (latency, engine), policy, router, replicas"
    )
    options.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="of the configuration (`engine.block_size=16`)"
    )


def policies(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("policies")
    options.add_argument(
        "--policy", action="append", metavar="NAME[:SETTING=VALUE,...][@ROUTER[:...]]",
        help="policy with settings and router, such as sarathi:budget=256@random; repeat it for several (default: "
        "the configuration's, or rubato)",
    )  # fmt: skip
    options.add_argument(
        "--router", metavar="NAME", help="router of policies that name none (default: their own, or least_loaded)"
    )
    options.add_argument("--slo-rule", choices=SLO_RULES, help="judging rule (default deadline)")


def job_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `jobs.run`. By default one core stays free for the user."""
    workers = args.workers
    if workers is None and args.ray is None:
        workers = max(1, len(usable_cores()) - 1)
        if not args.no_progress:
            processes = f"{workers} worker process{'' if workers == 1 else 'es'}"
            print(f"rubato {args.command}: {processes} on {len(usable_cores())} cores (--workers)", file=sys.stderr)
    return {"file": args.resume, "workers": workers, "ray": args.ray, "progress": not args.no_progress}


def hardware(args: argparse.Namespace) -> Hardware:
    """Returns the replica to simulate. Raises ValueError where step times or KV capacity are not given."""
    config = load(args.config or {}, args.set)
    machine = replica_of(args, config)
    if config.latency is None and not args.profile:
        raise ValueError(
            "what is a replica? give --profile NAME, or its step times (--config FILE with what `rubato fit` prints)"
        )
    if not args.profile and args.kv_tokens is None and "kv_blocks" not in config.engine.settings:
        raise ValueError("a replica without KV capacity: give --kv-tokens, or engine.kv_blocks in the configuration")
    missing = [] if args.profile else guessed_settings(config)
    if missing:
        kind = config.latency.name if config.latency else "affine"
        raise ValueError(
            f"a replica without step times: latency {kind!r} has no {' and no '.join(missing)}; "
            "give what `rubato fit` prints (--config), or --profile NAME"
        )
    return machine


def replica_of(args: argparse.Namespace, config: Config) -> Hardware:
    """Returns the replica of the configuration; with --profile the profile's, changed by the configuration's `engine`.
    Raises ValueError (ConfigError)."""
    options = {
        name: n
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens")
        if (n := getattr(args, name)) is not None
    }
    for name, n in options.items():
        if n < 1:
            raise ValueError(f"--{name.replace('_', '-')} {n}: give 1 or more")
    kv_tokens = options.pop("kv_tokens", None)
    if args.profile:
        return hardware_of(config, args.profile, kv_tokens, args.host_scale, **options)
    if args.host_scale != 1.0:
        raise ValueError(f"--host-scale {args.host_scale:g} without --profile: change host in the configuration")
    block = simulation_limits(config)["block_size"]
    if kv_tokens is not None and kv_tokens < block:
        raise ValueError(f"--kv-tokens {kv_tokens}: give at least a block, {block} tokens")
    return hardware_of(config, kv_tokens=kv_tokens, **options)


def run_specs(args: argparse.Namespace, machine: Hardware, replicas: int | None = None) -> tuple[RunSpec, ...]:
    """Returns a run for each --policy, whose modules are not imported yet; replicas None = the configuration's."""
    config = load(args.config or {}, args.set)
    if config.autoscale is not None:
        raise ValueError("autoscale: only serve and simulate scale a fleet; leave it out here, --set autoscale=null")
    replicas = config.replicas if replicas is None else replicas
    if replicas < 1:
        raise ValueError(f"--replicas {replicas}: give 1 or more")
    if args.policy:
        chosen = [PolicyChoice.read(text, args.router or "auto") for text in args.policy]
    else:  # the configuration's, its router unless another is given
        own = choice_of(config)
        chosen = [replace(own, router=args.router, router_settings={}) if args.router else own]
    specs = (run_spec_of(config, machine, choice, args.noise, args.slo_rule) for choice in chosen)
    return tuple(replace(spec, replicas=replicas) for spec in specs)


def request_source(
    args: argparse.Namespace, machine: Hardware, rate: float | None = None, drawn: bool = True
) -> RequestSource:
    """Returns the source of requests: a trace, a workload file, a scenario or a mix.

    Args:
        rate: requests/s of a scenario or a mix.
        drawn: as in `TraceSource`.

    Raises:
        ValueError: for two sources, and for an impossible rate, count or duration.
    """
    origins = [name for name in ("scenario", "workload", "trace") if getattr(args, name)]
    if len(origins) > 1:
        raise ValueError(f"--{' and --'.join(origins)} are given: requests come from one of them")
    common_options.check_amount(args)
    if rate is not None:
        check_rate(rate)
        if args.workload or args.trace:
            raise ValueError("--rate is for a scenario or a mix: a trace has its own, times --scale")
    if args.trace:
        part = trace_options.trace_options_of(args)
        kinds = common_options.kinds(args)
        own = kinds if args.kinds else None
        return TraceSource.of(args.trace, part, own, kinds, machine.model, args.scale, drawn)
    trace_options.check_unused(args)
    if args.workload:
        return FileSource(args.workload, drawn)
    count = count_of(args.count, args.duration)
    if args.scenario:
        return ScenarioSource(args.scenario, machine, rate or 1.0, count, args.duration)
    return MixSource(tuple(common_options.kinds(args)), rate or 1.0, count, args.duration)
