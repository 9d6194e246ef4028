"""`rubato sweep`."""

from __future__ import annotations

import argparse
from typing import Any

from rubato.commands import experiment, options
from rubato.measure import results
from rubato.planning import sweep


def add(commands: Any) -> None:
    about = "policies at rates under seeds, simulated on all cores; one line a cell in a file, resumable"
    parser = commands.add_parser("sweep", help=about, description=about)
    parser.set_defaults(run=_run)
    experiment.add(parser)
    parser.add_argument("--rates", type=options.numbers, required=True, metavar="1,2,4", help="requests/s of the fleet")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE", help="write a PNG")


def _run(args: argparse.Namespace) -> int:
    machine = experiment.hardware(args)
    asked = sweep.Sweep(
        experiment.source(args, machine),
        experiment.settings(args, machine, args.replicas),
        tuple(args.rates),
        tuple(args.seeds),
    )
    outcome = sweep.run(asked, **experiment.how(args))
    text = "\n".join([outcome.text(), "", *outcome.notes])
    options.write(args.json, text, results.as_json(outcome.to_json()))
    if args.report:
        sweep.write(args.report, "Attainment by rate", outcome.text(), "\n".join(outcome.notes))
    if args.plot:
        from rubato.planning.plot import plot

        plot(args.plot, outcome.points())
    return 0
