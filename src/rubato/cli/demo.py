"""`rubato demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLES = (
    "",
    "--policy edf --seconds 60",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", default="results/demo", help="folder for JSON, PNG and logs")
    parser.add_argument("--policy", metavar="NAME", default="rubato", help="the policy to set against the baselines")
    parser.add_argument(
        "--seconds", type=float, metavar="SECONDS", help="seconds of load per policy (default: by the machine's speed)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests (default 0)")


def run(args: argparse.Namespace) -> int:
    from rubato.demo.demo import demo

    return demo(Path(args.out), policy=args.policy, seconds=args.seconds, seed=args.seed)
