"""Options that say which part of a trace is read, and how."""

from __future__ import annotations

import argparse

from rubato.core.did_you_mean import nearest
from rubato.workloads.trace_layouts import Columns
from rubato.workloads.traces import TraceOptions


def add(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--skip-malformed", action="store_true", help="leave out a trace's bad rows, and count them")
    parser.add_argument(
        "--from", type=float, default=0.0, dest="trace_from", metavar="SECONDS",
        help="of a trace: leave out its first seconds; the first request after them is at 0",
    )  # fmt: skip
    parser.add_argument(
        "--columns", type=columns, metavar="arrival=NAME,prompt=NAME,output=NAME[,tier=NAME]",
        help="of a trace in no known layout: columns of arrival (seconds, or date and time) and tokens",
    )  # fmt: skip
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="FACTOR", help="of a trace: factor on its times (default 1)"
    )


def columns(text: str) -> Columns:
    """Raises argparse.ArgumentTypeError unless arrival, prompt and output are named."""
    named: dict[str, str] = {}
    for part in text.split(","):
        key, _, name = part.partition("=")
        if key not in ("arrival", "prompt", "output", "tier"):
            says = nearest(key, ("arrival", "prompt", "output", "tier"))
            raise argparse.ArgumentTypeError(f"{text!r}: unknown {key!r}{says}")
        named[key] = name
    if missing := [key for key in ("arrival", "prompt", "output") if not named.get(key)]:
        raise argparse.ArgumentTypeError(
            f"{text!r} lacks {' and '.join(missing)}: write arrival=NAME,prompt=NAME,output=NAME"
        )
    return Columns(**named)


def check_unused(args: argparse.Namespace) -> None:
    """Raises ValueError for an option of traces where no trace is given."""
    for name, given in (("from", args.trace_from), ("columns", args.columns), ("time-scale", args.time_scale != 1.0)):
        if given:
            raise ValueError(f"--{name} is of a trace: give --trace FILE too")


def trace_options_of(args: argparse.Namespace) -> TraceOptions:
    """Returns how the trace is read. Raises ValueError for an impossible number."""
    return TraceOptions(args.trace_from, args.duration, args.count, args.columns, args.time_scale, args.skip_malformed)
