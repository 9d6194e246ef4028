"""`python -m experiments held-out`: policies on loads of anybody's, each policy in the one setting given.

One table for each load of a folder: the largest rate at which 90 % of all, 95 % of all, and 90 % of each tier attain,
and what is attained at the load's own rate. Loads are drawn anew for each seed (blocks of a minute, bootstrapped), and
all policies serve the same requests; ratios of policies are paired by seed. Nothing is tuned here.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments._held_out_loads import Cut, Load, read
from experiments._held_out_search import TOLERANCE, search
from experiments._held_out_table import result, text
from rubato import policies
from rubato.cli import common_options, running, simulation_options, trace_options
from rubato.config.build import lengths_of
from rubato.config.schema import Config
from rubato.config.schema import load as configured
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure import results
from rubato.measure.records import versions
from rubato.planning import jobs
from rubato.planning.jobs import Job
from rubato.planning.request_source import digest
from rubato.planning.sweep import able, left_out
from rubato.simulation.run_spec import Hardware, RunSpec

FORMAT = "rubato-held-out/1"
NAME, REFERENCE = "held-out", "edf"  # this command; the policy that is always there


def parser() -> argparse.ArgumentParser:
    about = (
        "Policies on loads of yours: the largest rate at which 90 % of all requests, 95 % of all, and 90 % of each "
        "tier attain, a table for each load. Every policy runs in the setting given; nothing is tuned."
    )
    parser = argparse.ArgumentParser(prog=f"python -m experiments {NAME}", description=about)
    add = parser.add_argument
    add("--workloads", metavar="FOLDER", required=True,
        help="workload files and traces; NAME.yaml beside one has its tiers and SLOs (as --kinds)")  # fmt: skip
    add("--policies", type=choices, metavar="A,B:SETTING=VALUE,mine.py@ROUTER",
        help=f"in one setting each, {REFERENCE} always among them (default: every scheduler that can run)")  # fmt: skip
    add("--replicas", type=int, default=1, metavar="N", help="default: 1")
    simulation_options.replica(parser)
    add("--lengths", metavar="NAME", help="what predicts output lengths: oracle, running_mean, ...")
    add("--set", action="append", default=[], metavar="NAME=VALUE",
        help="of the configuration, such as a drafter for all (engine.drafter.alpha=0.7)")  # fmt: skip
    add("--seeds", type=common_options.seeds, default=[1, 2, 3], metavar="1,2,3",
        help="a load is drawn anew for each, from blocks of a minute; 0: as it was recorded")  # fmt: skip
    add("--ttft", type=float, metavar="SECONDS",
        help="of requests that state a TPOT alone (default: the loosest TTFT of the load)")  # fmt: skip
    add("--count", type=int, help="of a trace, its first requests")
    add("--duration", type=float, help="of a trace, its first seconds")
    trace_options.add(parser)
    add("--json", metavar="FILE", help="write everything as JSON; - for standard output")
    add("--resume", metavar="FILE", help="file of finished parts; an interrupted run resumes from it")
    add("--workers", type=int, help="processes (default: one a core)")
    add("--no-progress", action="store_true")
    parser.set_defaults(slo_rule=None)  # the configuration's (--set slo_rule=mean)
    return parser


def choices(text: str) -> list[PolicyChoice]:
    """Policies from `a,b:x=1,y=2,mine.py@router`: a part `y=2` is one more setting of the policy before it. Raises
    ValueError (PolicyError) for one that is not there or is there twice."""
    words: list[str] = []
    for part in text.split(","):
        if words and "=" in part and ":" not in part.partition("=")[0]:
            words[-1] += f",{part}"
        else:
            words.append(part)
    try:
        found = [PolicyChoice.parse(word) for word in words]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    labels = [choice.label for choice in found]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise argparse.ArgumentTypeError(f"policy {twice[0]} is given twice")
    return found


def run(args: argparse.Namespace) -> int:
    """The command. Raises ValueError for what is impossible, OSError for what cannot be opened."""
    if args.replicas < 1:
        raise ValueError(f"--replicas {args.replicas}: give 1 or more")
    if len(set(args.seeds)) != len(args.seeds):
        raise ValueError(f"--seeds {','.join(map(str, args.seeds))}: give each once")
    config = configured({}, [*args.set, *([f"lengths={args.lengths}"] if args.lengths else [])])
    lengths_of(config, {})  # raises for a name that is none
    machine = cache(lambda profile: simulation_options.replica_of(_with(args, profile=profile), config))
    loads = read(args.workloads, Cut(args.profile or "", machine, args.seeds, args.ttft, trace_options.asked(args)))
    chosen = args.policies or [PolicyChoice(name) for name, kind, *_ in policies.describe() if kind == "scheduler"]
    if REFERENCE not in [choice.label for choice in chosen]:
        chosen = [*chosen, PolicyChoice(REFERENCE)]

    judged = [(load, *_able(args, config, load.machine, chosen)) for load in loads]
    head = {NAME: [_described(load, ran) for load, ran, _ in judged]}
    work = [
        Job(f"{load.file.name} {spec.choice.label} seed={seed}", search, (load.file.name, load.source, spec, seed))
        for load, ran, _ in judged
        for spec in ran
        for seed in args.seeds
    ]
    done = jobs.run(work, head=head, about=NAME, **simulation_options.how(args))
    found = [
        _described(load, ran)
        | result(load, ran, [value for value in done.costed() if value["load"] == load.file.name], left_out(skipped))
        for load, ran, skipped in judged
    ]
    data = {
        "format": FORMAT,
        **provenance.origin(args.command),
        "seeds": args.seeds,
        "tolerance": TOLERANCE,
        "interval": "95 %, Student's t over seeds; each seed's capacity is within the tolerance",
        "loads": found,
        "wall": done.wall,
        "cpu": done.cpu,
        "notes": done.notes,
        "versions": versions("numpy"),
    }
    shown = [text(load) for load in found] + [f"Note: {note}." for note in done.notes]
    running.write(args.json, "\n\n".join(shown), results.as_json(data))
    return 0


def _able(
    args: argparse.Namespace, config: Config, machine: Hardware, chosen: Sequence[PolicyChoice]
) -> tuple[tuple[RunSpec, ...], dict[str, str]]:
    """The policies that can run there, and why the others cannot."""
    specs = [simulation_options.run_spec(args, config, machine, choice) for choice in chosen]
    return able([replace(spec, replicas=args.replicas) for spec in specs])


def main(argv: Sequence[str]) -> int:
    """Run the command; its exit status. 2: what was asked for is impossible."""
    args = parser().parse_args(argv)
    args.command = [NAME, *map(shlex.quote, argv)]
    return running.carried_out(f"experiments {NAME}", args, run)


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), **changes})


def _described(load: Load, specs: Sequence[RunSpec]) -> dict[str, Any]:
    """What decides the numbers of a load; files by their content."""
    own = [(spec.choice.policy, Path(spec.choice.policy)) for spec in specs]
    return {
        "load": load.file.name,
        "content": digest(load.file),
        "kinds": None if load.kinds is None else {"file": load.kinds.name, "content": digest(load.kinds)},
        "source": load.source.describe(),
        "settings": [spec.describe() for spec in specs],
        "policy_files": {name: digest(file) for name, file in own if file.suffix == ".py" and file.is_file()},
    }
