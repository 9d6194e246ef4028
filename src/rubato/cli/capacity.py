"""`rubato capacity`."""

from __future__ import annotations

import argparse

from rubato.cli import answers, common_options, simulation_options
from rubato.planning import capacity

EXAMPLES = (
    "--profile llama-3.1-8b-h100 --kinds mix.yaml --policy edf --policy vllm",
    "--profile llama-3.1-8b-h100 --scenario slos-serve-chatbot --replicas 2 --targets 0.95",
)


def add(parser: argparse.ArgumentParser) -> None:
    simulation_options.add(parser)
    common_options.replicas(parser)
    parser.add_argument(
        "--targets", type=common_options.numbers, default=list(capacity.TARGETS), metavar="0.9,0.98",
        help="shares to attain",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=0.02, metavar="SHARE", help="relative width of a search's last bracket"
    )
    parser.add_argument("--start", type=float, metavar="RATE", help="requests/s at which searches begin")


def run(args: argparse.Namespace) -> int:
    machine = simulation_options.hardware(args)
    source = simulation_options.request_source(args, machine)
    specs = simulation_options.run_specs(args, machine, args.replicas)
    question = capacity.CapacityQuestion(
        source, specs, tuple(args.seeds), tuple(args.targets), args.tolerance, args.start
    )
    outcome = capacity.run(question, **simulation_options.job_options(args))
    answers.write_result(args, outcome)
    return 0
