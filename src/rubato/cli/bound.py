"""`rubato bound`."""

from __future__ import annotations

import argparse

from rubato.cli import answers, common_options, simulation_options
from rubato.config.schema import load
from rubato.engines.simulated import step_noise
from rubato.planning import bound

EXAMPLES = (
    "--profile llama-3.1-8b-h100 --kinds mix.yaml",
    "--profile llama-3.1-8b-h100 --kinds mix.yaml --rate 20",
)


def add(parser: argparse.ArgumentParser) -> None:
    simulation_options.add(parser, with_policies=False)
    common_options.replicas(parser)
    parser.add_argument(
        "--rate", "--request-rate", type=float, metavar="RATE",
        help="requests/s at which shares are asked for (default: rates are)",
    )  # fmt: skip
    parser.add_argument(
        "--target", type=float, default=0.9, metavar="SHARE", help="without --rate: share of requests to attain"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="SHARE", help="relative width of a search's last bracket"
    )
    parser.add_argument(
        "--once", action="store_true",
        help="requests come once, as in `capacity`, in place of a stream that repeats them",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    machine = simulation_options.hardware(args)
    config = load(args.config or {}, args.set)
    if config.slo_rule != "deadline":
        raise ValueError(f"slo_rule {config.slo_rule!r}: a bound is worked out for the deadline rule")
    if step_noise.factors(args.noise, 0) is not None:
        raise ValueError("--noise: a bound is of step times as they are; leave it out")
    if config.engine.settings.get("drafter") is not None:
        raise ValueError(
            "engine.drafter: a bound is of policies without drafts; leave it out (--set engine.drafter=null)"
        )
    if config.autoscale is not None:
        raise ValueError("autoscale: a bound is of a fleet as it is; leave it out here, --set autoscale=null")
    question = bound.BoundQuestion(
        simulation_options.request_source(args, machine),
        machine,
        tuple(args.seeds),
        config.replicas if args.replicas is None else args.replicas,
        args.rate,
        args.target,
        not args.once,
        args.tolerance,
        config.prefix_cache,
    )
    outcome = bound.run(question, **simulation_options.job_options(args))
    answers.write_result(args, outcome)
    return 0
