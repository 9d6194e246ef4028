"""`rubato compare`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rubato.cli import running
from rubato.measure import compare, results

EXAMPLES = (
    "edf.json vllm.json",
    "runs.json:edf runs.json:vllm --json difference.json",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="what `bench --json` wrote; FILE:POLICY where a file holds several")
    parser.add_argument("b", metavar="B", help="what to compare it with")
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    report = compare.compare(compare.read(args.a), compare.read(args.b))
    if report.a == report.b:  # both have the label `run`, or the same policy's
        report = replace(report, a=Path(args.a).name, b=Path(args.b).name)
    running.write(args.json, report.text(), results.as_json(report.to_json()))
    return 0
