"""`python -m experiments`: list experiments, run one, or write the pages that set papers beside ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import experiments
from experiments import golden, quick
from experiments.paper_headlines import HEADLINES
from experiments.paper_page import bar, pages, read
from experiments.provenance import changed
from rubato.cli import running
from rubato.measure import results
from rubato.measure.tables import markdown

RUNS = Path("docs/figures")  # the JSON of full runs
QUICK = Path("results/figures/quick.jsonl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status. 1: a check does not hold. 2: what was asked for is impossible."""
    words = list(sys.argv[1:] if argv is None else argv)
    return running.run_verb("experiments", parser().parse_args(words), _run)


def parser() -> argparse.ArgumentParser:
    about = "The papers' experiments and checks of the simulator; without a name, a list."
    parser = argparse.ArgumentParser(prog="python -m experiments", description=about)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--names", nargs="?", const="all", choices=["all", "older", "older-headline"],
                        help="print figures' names, one a line: all, those without a full run of their policies as "
                        "they are, and of these those with a claim that opens a page")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="seconds: enough for the checks, not for papers' numbers")
    parser.add_argument("--quick", action="store_true", help=f"those that are quick, small; {QUICK} is what has run")
    parser.add_argument("--trace", metavar="FILE", help="offer this recorded stream, where the figure takes one")
    parser.add_argument("--policy", metavar="POLICY",
                        help="run this policy too, beside the systems compared: mine.py:SETTING=VALUE,...")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write claims and data as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE", help="write a PNG, where the figure has a picture")
    parser.add_argument(
        "--resume", metavar="FILE", help="where a full run keeps what has finished (removed at its end)"
    )
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--no-progress", action="store_true")
    parser.add_argument("--behaviour", choices=["check", "write"],
                        help="compare what every policy does with golden.json, or write that anew")  # fmt: skip
    parser.add_argument("--docs", nargs="?", const=RUNS, type=Path, metavar="FOLDER",
                        help=f"write the pages of papers from full runs' JSON in FOLDER (default {RUNS})")  # fmt: skip
    parser.add_argument("--out", default="docs", metavar="FOLDER", help="with --docs: where to write (default docs)")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.names:
        print("\n".join(_names(args.names)))
        return 0
    if args.quick:
        return quick.run(QUICK, args.workers)
    if args.behaviour is not None:
        return golden.check() if args.behaviour == "check" else golden.write()
    if args.docs is not None:
        return _docs(args.docs, Path(args.out))
    if args.name is None:
        rows = [["figure", "full run, one core", "what", "source"]]
        for name in experiments.names():
            figure = experiments.load(name)
            rows.append([name, f"{figure.SECONDS:g} s", experiments.about(name), figure.SOURCE])
        print(markdown(rows))
        return 0
    return _figure(args)


def _names(which: str) -> list[str]:
    """Of all figures, of the `older` ones, or of those of them with a headline."""
    if which == "all":
        return experiments.names()
    runs = {name: RUNS / f"{name}.json" for name in experiments.names()}
    older = [name for name, file in runs.items() if not file.exists() or changed(read(file))]
    headline = {headline.figure for own in HEADLINES.values() for headline in own}
    return [name for name in older if which == "older" or name in headline]


def _figure(args: argparse.Namespace) -> int:
    figure = experiments.load(args.name)
    if args.small and args.resume:
        raise ValueError("--resume is what a full run goes on from: leave it out, or --small")
    file = None
    if not args.small:
        file = Path(args.resume or f"results/figures/{args.name}{'.policy' if args.policy else ''}.jobs.jsonl")
        again = f"if interrupted, the same command goes on from {file}"
        print(f"{args.name}: about {figure.SECONDS:g} s of one core; {again}", file=sys.stderr, flush=True)
    data = experiments.run(
        args.name, small=args.small, trace=args.trace, policy=args.policy, file=file, workers=args.workers,
        progress=not args.no_progress,
    )  # fmt: skip
    rows = [["claim", "kind", "paper", "ours", "low", "high", "unit", "verdict"]]
    for c in data["claims"]:
        numbers = [bar(c), *(f"{c[key]:.4g}" for key in ("ours", "low", "high"))]
        rows.append([c["name"], c["kind"], *numbers, c["unit"], c["verdict"]])
    shown = [markdown(rows), *data["notes"]]
    tables = getattr(figure, "tables", None)
    if args.policy and tables is not None:  # no claim has its numbers
        shown.append(f"\n{tables(data['data'])}")
    running.write(args.json, "\n".join(shown), results.as_json(data))
    if args.plot:
        draw = getattr(figure, "draw", None)
        if draw is None:
            raise ValueError(f"figure {args.name!r} has no picture: leave out --plot")
        from rubato.measure.pictures import on_one_axes

        on_one_axes(data["about"], lambda axes: draw(data["data"], axes)).save(args.plot)
    if file is not None:
        file.unlink()
    failed = experiments.failed(data)
    if failed:
        print(f"experiments: {args.name}: these checks do not hold: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _docs(folder: Path, out: Path) -> int:
    """Raises ValueError for a folder without runs, or with a file that is no full run."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(
            f"{folder} holds no JSON of a figure: run `python -m experiments NAME --json {folder}/NAME.json` first"
        )
    made = pages([read(file) for file in files])
    (out / "papers").mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (out / name).write_text(text, encoding="utf-8")
    print(f"{out}: {len(made)} pages of {len(files)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
