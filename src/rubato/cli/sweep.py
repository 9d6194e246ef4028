"""`rubato sweep`."""

from __future__ import annotations

import argparse

from rubato.cli import answers, common_options, simulation_options
from rubato.planning import sweep

EXAMPLES = (
    "--profile llama-3.1-8b-h100 --kinds mix.yaml --rates 4,8,16 --policy edf --policy vllm",
    "--profile llama-3.1-8b-h100 --workload load.jsonl --rates 8 --resume jobs.jsonl",
)


def add(parser: argparse.ArgumentParser) -> None:
    simulation_options.add(parser)
    parser.add_argument(
        "--rates", type=common_options.numbers, required=True, metavar="1,2,4", help="requests/s of the fleet"
    )
    common_options.replicas(parser)


def run(args: argparse.Namespace) -> int:
    machine = simulation_options.hardware(args)
    source = simulation_options.request_source(args, machine)
    specs = simulation_options.run_specs(args, machine, args.replicas)
    asked = sweep.Sweep(source, specs, tuple(args.rates), tuple(args.seeds))
    outcome = sweep.run(asked, **simulation_options.job_options(args))
    answers.write_result(args, outcome)
    return 0
