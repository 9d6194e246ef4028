"""Writes the results of a verb: a table on standard output, and the files of --json, --plot and --report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rubato.cli.running import write

if TYPE_CHECKING:
    from rubato.measure.records import BenchResult
    from rubato.measure.result import Result

SECRET_OPTIONS = ("--api-key", "--header")  # options of `bench` whose values stay out of reports


def add(parser: argparse.ArgumentParser, records: bool = False) -> None:
    """Declares the options of results; with `records` also --records, a file with one line per request."""
    options = parser.add_argument_group("results")
    add_to(options)
    if records:
        options.add_argument("--records", metavar="FILE", help="write one JSON line per request")


def add_to(options: argparse._ArgumentGroup) -> None:
    options.add_argument("--json", metavar="FILE", help="write results as JSON; - for standard output")
    options.add_argument("--plot", metavar="FILE", help="write a picture: PNG, or SVG where FILE ends so")
    options.add_argument("--report", metavar="FILE", help="write a report: one HTML file with tables and a picture")


def write_result(args: argparse.Namespace, result: Result) -> None:
    """Prints the table and writes the files. Raises OSError for a file that cannot be written."""
    from rubato.measure import report, results  # NumPy comes with them

    table_and_notes = "\n\n".join([result.table(), *(f"Note: {note}." for note in result.notes)])
    write(args.json, table_and_notes, results.as_json(result.to_json()))
    if args.plot:
        result.plot(args.plot)
    if args.report:
        report.write(args.report, result, command(args.words))


def write_runs(args: argparse.Namespace, runs: Sequence[BenchResult]) -> None:
    """Writes results of runs, and every request to the file of --records. Raises as `write_result`."""
    from rubato.measure import results
    from rubato.measure.runs import Runs

    write_result(args, Runs(tuple(runs)))
    if args.records:
        results.write_records(args.records, runs)


def command(words: list[str]) -> str:
    """Returns the command as typed, one option a line, without the values of `SECRET_OPTIONS`."""
    words_shown: list[str] = []
    hidden = False
    for word in words:
        option, equals, _ = word.partition("=")
        words_shown.append("***" if hidden else f"{option}=***" if equals and option in SECRET_OPTIONS else word)
        hidden = word in SECRET_OPTIONS
    quoted = (f"\\\n    {_quote_word(word)}" if word.startswith("--") else _quote_word(word) for word in words_shown)
    return " ".join(["rubato", *quoted])


def _quote_word(word: str) -> str:
    return word if word.endswith("***") else shlex.quote(word)
