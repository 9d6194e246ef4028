"""Options that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rubato.cli.running import write
from rubato.core.request import SLO
from rubato.workloads.request_kinds import USUAL_SLOS, Kind, usual_kinds

if TYPE_CHECKING:
    from rubato.measure.records import BenchResult


class Once(argparse.Action):
    """An option that says something else the second time is an error: argparse keeps the last, and says nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} is given twice: this command takes one (`rubato sweep` takes several)")
        setattr(namespace, self.dest, values)


def tiers(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Kinds of requests: a file of them, or three tiers."""
    parser.add_argument("--kinds", metavar="FILE", help="YAML: tiers, their SLOs and the kinds of request in each")
    for tier, usual in USUAL_SLOS.items():
        milliseconds = ",".join(f"{1e3 * (bound or 0.0):g}" for bound in (usual.ttft, usual.tpot))
        parser.add_argument(
            f"--{tier}", type=slo, default=usual, metavar="TTFT_MS,TPOT_MS",
            help=f"SLO of tier {tier} (default {milliseconds}), without --kinds",
        )  # fmt: skip


def kinds(args: argparse.Namespace) -> list[Kind]:
    """What `tiers` was told. Raises ValueError or OSError for a file of kinds that cannot be used."""
    if args.kinds:
        from rubato.config import kinds_file  # the other commands need no pydantic

        return kinds_file.read(args.kinds)
    return list(usual_kinds({tier: getattr(args, tier) for tier in USUAL_SLOS}))


def slo(text: str) -> SLO:
    parts = text.split(",")
    expected = f"{text!r}: give TTFT and TPOT in ms, such as 1000,80"
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(expected)
    try:
        return SLO(*(float(part) / 1e3 if part.strip() else None for part in parts))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{expected} ({error})") from error


def seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers, such as 0,1,2") from error


def numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers, such as 1,2.5,4") from error


def result_options(parser: argparse.ArgumentParser) -> None:
    """Where the results of runs are written (see `report`)."""
    options = parser.add_argument_group("results")
    options.add_argument("--json", metavar="FILE", help="write results as JSON; - for standard output")
    options.add_argument("--plot", metavar="FILE", help="write a PNG")
    options.add_argument("--records", metavar="FILE", help="write one JSON line per request")


def report(args: argparse.Namespace, runs: Sequence[BenchResult]) -> None:
    """The table of runs, and the files that `result_options` was told."""
    from rubato.measure import plot, results  # NumPy and the drawing come with them

    write(args.json, results.table(runs), results.dumps(runs))
    if args.records:
        results.write_records(args.records, runs)
    if args.plot:
        plot.plot(args.plot, runs)
