"""`rubato fit`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rubato.cli import running
from rubato.engines.simulated import step_noise
from rubato.latency import fit
from rubato.latency.model_kinds import MODELS
from rubato.measure import results

EXAMPLES = (
    "events.jsonl",
    "steps.csv --model operation_count --of llama-3.1-8b-h100 --json fit.json",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log",
        metavar="LOG",
        help="event log (JSON lines) of `serve --event-log`, stopped after a bench; or a CSV table",
    )
    parser.add_argument("--model", choices=MODELS, default="affine", help="latency model to fit")
    parser.add_argument("--of", metavar="PROFILE", help="operation_count: the profile that names the model and the GPU")
    parser.add_argument("--train", action="append", default=[], metavar="PART", help="fit on tags that contain this")
    parser.add_argument("--test", action="append", default=[], metavar="PART", help="test on others that contain this")
    parser.add_argument("--json", metavar="FILE", help="write coefficients and errors as JSON; - for standard output")
    parser.add_argument(
        "--residuals", metavar="FILE", help="write by how much each step was off, for `--noise replay:FILE`"
    )


def run(args: argparse.Namespace) -> int:
    if args.residuals is not None:
        _check_residuals(Path(args.residuals), Path(args.log))
    fitted = fit.fit_file(args.log, args.model, args.train, args.test, args.of)
    if args.residuals is not None:
        Path(args.residuals).write_text(fit.residuals_text(fitted, Path(args.log).name), "utf-8")
    running.write(args.json, fitted.text(), results.as_json(fitted.to_json()))
    return 0


def _check_residuals(residuals: Path, log: Path) -> None:
    """Raises ValueError where `--noise replay:` would not find this file, or the log would be lost."""
    if not step_noise.is_path(str(residuals)) or "+" in str(residuals):
        raise ValueError(f"--residuals {residuals}: give a file with a suffix and no +, such as residuals.txt")
    if residuals.exists() and log.exists() and residuals.samefile(log):
        raise ValueError(f"--residuals {residuals} is the log itself: give another file")
