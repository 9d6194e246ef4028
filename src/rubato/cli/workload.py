"""`rubato workload`."""

from __future__ import annotations

import argparse

from rubato.cli import workload_options
from rubato.workloads import scenarios, traces, workload_file

EXAMPLES = (
    "--list",
    "--kinds mix.yaml --rate 4 --duration 120 -o load.jsonl",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", help="file to write")
    parser.add_argument("--list", action="store_true", help="list the scenarios, with their mean lengths")
    workload_options.add(parser, file=False)


def run(args: argparse.Namespace) -> int:
    """Writes the workload asked for, or lists the scenarios."""
    if args.list:
        print(_listing())
        return 0
    if args.out is None:
        raise ValueError("name the file to write: -o FILE")
    workload = workload_options.workload_of(args, args.seed)
    workload_file.write(workload, args.out)
    how = (
        f"in {workload.duration:g} s" if workload.concurrency is None else f"in a closed loop of {workload.concurrency}"
    )
    print(f"{args.out}: {len(workload.arrivals)} requests {how}")
    for name in (*traces.NOTES, "best_effort", "max_model_len"):
        if name in workload.notes:
            print(f"  {workload.notes[name]}")
    return 0


def _listing() -> str:
    """Lists scenarios with the mean prompt and output tokens of a request, all stages together."""
    rows = [(name, f"{prompt:.0f}", f"{output:.0f}", about) for name, prompt, output, about in scenarios.described()]
    rows.insert(0, ("scenario", "prompt", "output", "what it is"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows)
