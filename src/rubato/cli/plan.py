"""`rubato plan`."""

from __future__ import annotations

import argparse

from rubato.cli import answers, simulation_options
from rubato.planning import fleet_size, optimum
from rubato.planning.fleet_size_model import FleetQuestion

EXAMPLES = (
    "--profile llama-3.1-8b-h100 --kinds mix.yaml --rate 40 --price 3",
    "--profile llama-3.1-8b-h100 --trace trace.csv --scale 2 --target 0.98",
)


def add(parser: argparse.ArgumentParser) -> None:
    simulation_options.add(parser, seeds=False)
    parser.add_argument(
        "--rate", "--request-rate", type=float, metavar="RATE", help="requests/s of a scenario or a mix (default 1)"
    )
    parser.add_argument("--target", type=float, default=0.9, metavar="SHARE", help="share of requests to attain")
    parser.add_argument(
        "--window", type=float, default=600.0, metavar="SECONDS", help="seconds of the busiest stretch, sized on"
    )
    parser.add_argument("--least-seeds", type=int, default=4, metavar="N", help="seeds to begin with")
    parser.add_argument(
        "--most-seeds", type=int, default=16, metavar="N", help="seeds are added up to so many, until they tell"
    )
    parser.add_argument(
        "--exclude-infeasible", action="store_true", help="leave out, and count, what no idle replica can attain"
    )
    parser.add_argument("--price", type=float, metavar="PRICE", help="of a GPU for an hour, in any currency")
    parser.add_argument(
        "--optimum", action="store_true",
        help="instead: PolyServe's optimum, the most that a replica could serve with each request in its largest batch",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    machine = simulation_options.hardware(args)
    if args.optimum:
        load = simulation_options.request_source(args, machine, args.rate, drawn=False).make(0)
        best = tuple(optimum.optimum(load, machine.model, machine.limits, mode) for mode in optimum.COSTS)
        answers.write_result(args, optimum.Optima(machine, best))
        return 0
    specs = simulation_options.run_specs(args, machine, replicas=1)
    if len(specs) != 1:
        raise ValueError("a plan is for one --policy: run it once for each")
    specs[0].choice.checked()
    question = FleetQuestion(
        simulation_options.request_source(args, machine, args.rate, drawn=False),
        specs[0],
        args.target,
        args.window,
        (args.least_seeds, args.most_seeds),
        args.exclude_infeasible,
        args.price,
    )
    answers.write_result(args, fleet_size.plan(question, **simulation_options.job_options(args)))
    return 0
