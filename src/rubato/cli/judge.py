"""`rubato judge`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from rubato import policies
from rubato.cli import answers, common_options, simulation_options, trace_options
from rubato.config.schema import load as configured
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.tables import listed
from rubato.planning import judge
from rubato.planning.judge.loads import LoadOptions, read
from rubato.simulation.run_spec import Hardware, RunSpec

EXAMPLES = (
    "loads --profile llama-3.1-8b-h100 --policy vllm --policy my_policy.py",
    "loads --profile llama-3.1-8b-h100 --replicas 2 --seeds 0 --json judged.json",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="workload files and traces; NAME.yaml beside one has its tiers and SLOs (as --kinds)",
    )  # fmt: skip
    simulation_options.replica_and_configuration(parser)
    simulation_options.policies(parser)
    common_options.replicas(parser)
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--seeds", type=common_options.seeds, default=[1, 2, 3], metavar="1,2,3",
        help="a load is drawn anew for each, from blocks of a minute; 0: as it was recorded",
    )  # fmt: skip
    requests.add_argument(
        "--ttft", type=float, metavar="SECONDS",
        help="of requests that state a TPOT alone (default: the loosest TTFT of the load)",
    )  # fmt: skip
    common_options.amount(requests)
    trace_options.add(requests)
    simulation_options.running(parser)


def run(args: argparse.Namespace) -> int:
    config = configured(args.config or {}, args.set)

    @cache
    def machine(profile: str) -> Hardware:
        return simulation_options.replica_of(argparse.Namespace(**{**vars(args), "profile": profile}), config)

    how = LoadOptions(args.profile or "", machine, args.seeds, args.ttft, trace_options.trace_options_of(args))
    question = judge.JudgeQuestion(read(args.folder, how), lambda hardware: _specs(args, hardware), args.seeds)
    how_to_run = simulation_options.job_options(args)
    if not args.no_progress:
        print(f"rubato judge: {_outline(question)}", file=sys.stderr)
    answers.write_result(args, judge.run(question, **how_to_run))
    return 0


def _outline(question: judge.JudgeQuestion) -> str:
    """Returns a sentence on what is about to run."""
    policies = [spec.choice.label for spec in question.specs(question.loads[0].machine)]
    requests = sum(len(load.own.arrivals) for load in question.loads)
    loads = f"{len(question.loads)} load{'' if len(question.loads) == 1 else 's'}"
    seeds = ",".join(map(str, question.seeds))
    return (
        f"{loads} with {requests} requests, policies {listed(policies)}, seeds {seeds}; a job finds the rates of one "
        "policy on one load under one seed, in some 10 to 30 simulations"
    )


def _specs(args: argparse.Namespace, machine: Hardware) -> Sequence[RunSpec]:
    """Returns a run of each --policy, or of every scheduler, and of the reference policy."""
    if args.policy:
        specs = simulation_options.run_specs(args, machine, args.replicas)
    else:
        names = [name for name, kind, *_ in policies.describe() if kind == "scheduler"]
        every = argparse.Namespace(**{**vars(args), "policy": names})
        specs = simulation_options.run_specs(every, machine, args.replicas)
    if judge.REFERENCE in [spec.choice.label for spec in specs]:
        return specs
    return (*specs, replace(specs[0], choice=PolicyChoice(judge.REFERENCE)))
