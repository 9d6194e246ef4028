"""`rubato simulate`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from rubato.cli import answers, server_options, simulation_options, workload_options
from rubato.cli.parsing import Parser
from rubato.config.build import (
    autoscaler_of,
    choice_of,
    fair_share_of,
    guessed_settings,
    most_in_flight,
    simulation_limits,
)
from rubato.config.schema import Config
from rubato.core import event_log
from rubato.core.timeline import steps
from rubato.measure import goodput
from rubato.measure.records import BenchResult
from rubato.simulation.configured import run_spec_of
from rubato.simulation.simulate import simulate

# Without options two policies run under more load than either sustains, so that they differ.
DEFAULT_LOAD = "--profile opt-13b-2xa100-40g@vllm-2024 --scenario slos-serve-mixed --rate 6 --duration 60"
COMPARED_POLICIES = ("rubato", "vllm")
NOT_OF_THE_RUN = {"seed", "json", "plot", "records", "report"}  # with these alone, still the default load

EXAMPLES = (
    "",
    "--profile llama-3.1-8b-h100 --kinds mix.yaml --rate 20 --policy edf",
)


def add(parser: argparse.ArgumentParser) -> None:
    workload_options.add(parser)
    server_options.add(parser)
    simulation_options.replica(parser)
    parser.add_argument("--steps", metavar="LOG", help="event log of a live run: fit the latency model on its steps")
    parser.add_argument("--label", metavar="NAME", help="what the table calls this run (default: the policy)")
    answers.add(parser, records=True)


def run(args: argparse.Namespace) -> int:
    parser = Parser(prog="rubato simulate")
    add(parser)
    defaults = vars(parser.parse_args([]))
    if any(getattr(args, name) != value for name, value in defaults.items() if name not in NOT_OF_THE_RUN):
        runs = _simulate_policy(args)
    else:
        cases = [f"{DEFAULT_LOAD} --policy {policy}" for policy in COMPARED_POLICIES]
        note = f"two policies under one load: rubato simulate {cases[0]}, then --policy {COMPARED_POLICIES[1]}"
        print(f"rubato simulate: without options, {note}", file=sys.stderr)
        runs = [
            run for case in cases for run in _simulate_policy(parser.parse_args([*case.split(), f"--seed={args.seed}"]))
        ]
    answers.write_runs(args, runs)
    return 0


def _simulate_policy(args: argparse.Namespace) -> list[BenchResult]:
    """Simulates one policy, a run for each workload."""
    if args.steps and args.profile:
        raise ValueError("--steps and --profile both say how long a step takes: leave out one of them")
    config = server_options.config(args)
    machine = simulation_options.replica_of(args, config)
    if args.profile and args.prefill_ms is None:
        args.prefill_ms = machine.prefill  # what TTFTs that are slowdowns are multiples of
    loads = workload_options.workloads_of(args)
    model = machine.model
    if args.steps:
        model.fit(steps(event_log.read(args.steps)))
    bounds = goodput.parse(args.goodput) if args.goodput else None
    note = _guesses(args, config, {load.profile for load in loads} - {""})
    if note:
        print(f"rubato simulate: {note}", file=sys.stderr)
    if config.tenants:
        said = "tenants share by weight; their keys, tiers and limits are not simulated"
        print(f"rubato simulate: {said}", file=sys.stderr)

    spec = replace(
        run_spec_of(config, machine, choice_of(config), args.noise, args.slo_rule),
        learns=True,
        prefix_cache=config.prefix_cache,
        max_in_flight=most_in_flight(config, machine.limits),
        fair=partial(fair_share_of, config) if config.tenants else None,
        autoscaler=partial(autoscaler_of, config) if config.autoscale else None,
    )
    runs = [simulate(load, spec, args.seed + number) for number, load in enumerate(loads)]
    label = args.label or config.policy.name
    return [replace(run, label=label, goodput=bounds) for run in runs]


def _guesses(args: argparse.Namespace, config: Config, profiles: Collection[str]) -> str:
    """Returns a note on what is guessed about the replica, "" if nothing is; the workload is for `profiles`."""
    if args.profile:
        return ""
    parts, missing = [], [] if args.steps else guessed_settings(config)
    if missing:
        kind = config.latency.name if config.latency else "affine"
        how = "give --profile NAME, --steps LOG, or --config with what `rubato fit` prints"
        parts.append(f"step times ({kind} without {', '.join(missing)}: {how})")
    if args.kv_tokens is None and "kv_blocks" not in config.engine.settings:
        limits = simulation_limits(config)
        parts.append(f"KV capacity ({limits['kv_blocks'] * limits['block_size']} tokens: give --kv-tokens N)")
    if not parts:
        return ""
    then = f"; the workload is made for --profile {', '.join(sorted(profiles))}" if profiles else ""
    return f"a guess, not your machine's: {' and '.join(parts)}{then}"
