"""Where what a verb found goes: the table on standard output, and the files of --json, --plot and --report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rubato.cli.running import write

if TYPE_CHECKING:
    from rubato.measure.records import BenchResult
    from rubato.measure.result import Result

SECRET = ("--api-key", "--header")  # options of `bench` whose values stay out of reports


def add(parser: argparse.ArgumentParser, records: bool = False) -> None:
    """records: whether each request's record can be asked for."""
    options = parser.add_argument_group("results")
    add_to(options)
    if records:
        options.add_argument("--records", metavar="FILE", help="write one JSON line per request")


def add_to(options: argparse._ArgumentGroup) -> None:
    options.add_argument("--json", metavar="FILE", help="write results as JSON; - for standard output")
    options.add_argument("--plot", metavar="FILE", help="write a picture: PNG, or SVG where FILE ends so")
    options.add_argument("--report", metavar="FILE", help="write a report: one HTML file with tables and a picture")


def give(args: argparse.Namespace, result: Result) -> None:
    """Raises OSError for a file that cannot be written."""
    from rubato.measure import report, results  # NumPy comes with them

    shown = "\n\n".join([result.table(), *(f"Note: {note}." for note in result.notes)])
    write(args.json, shown, results.as_json(result.to_json()))
    if args.plot:
        result.plot(args.plot)
    if args.report:
        report.write(args.report, result, command(args.words))


def give_runs(args: argparse.Namespace, runs: Sequence[BenchResult]) -> None:
    """Also, in the file of --records, every request. Raises as `give`."""
    from rubato.measure import results
    from rubato.measure.runs import Runs

    give(args, Runs(tuple(runs)))
    if args.records:
        results.write_records(args.records, runs)


def command(words: list[str]) -> str:
    """As it was typed, an option a line, values of `SECRET` left out."""
    shown: list[str] = []
    hidden = False
    for word in words:
        option, given, _ = word.partition("=")
        shown.append("***" if hidden else f"{option}=***" if given and option in SECRET else word)
        hidden = word in SECRET
    quoted = (f"\\\n    {_quoted(word)}" if word.startswith("--") else _quoted(word) for word in shown)
    return " ".join(["rubato", *quoted])


def _quoted(word: str) -> str:
    return word if word.endswith("***") else shlex.quote(word)
