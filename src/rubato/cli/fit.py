"""`rubato fit`."""

from __future__ import annotations

import argparse
import asyncio
import os
from math import inf
from pathlib import Path

from rubato.cli import running
from rubato.core.extras import extra
from rubato.core.server_url import server_base_url
from rubato.engines.simulated import step_noise
from rubato.latency import fit
from rubato.latency.model_kinds import MODELS
from rubato.measure import results

EXAMPLES = (
    "--server http://gpu-1:8000 --duration 300",
    "events.jsonl",
    "steps.csv --model operation_count --of llama-3.1-8b-h100 --json fit.json",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", nargs="?", metavar="LOG",
        help="event log (JSON lines) of `serve --event-log`, stopped after a bench; or a CSV table",
    )  # fmt: skip
    parser.add_argument("--server", metavar="URL", help="in place of a log: a vLLM server that is under load meanwhile")
    parser.add_argument(
        "--duration", type=float, default=300.0, metavar="SECONDS", help="with --server: how long (default 300)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
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
    if (args.log is None) == (args.server is None):
        raise ValueError("give the file of an event log or a table, or --server URL")
    if args.residuals is not None:
        _check_residuals(Path(args.residuals), None if args.log is None else Path(args.log))
    fitted = _of_server(args) if args.server else fit.fit_file(args.log, args.model, args.train, args.test, args.of)
    if args.residuals is not None:
        if not fitted.residuals:
            raise ValueError("--residuals: /metrics alone does not tell single steps; use Rubato's plug-in")
        source = args.server or Path(args.log).name
        Path(args.residuals).write_text(fit.residuals_text(fitted, source), "utf-8")
    running.write(args.json, fitted.text(), results.as_json(fitted.to_json()))
    return 0


def _of_server(args: argparse.Namespace) -> fit.Fitted:
    if args.train or args.test or args.of:
        raise ValueError("--train, --test and --of are for a .csv table: leave them out with --server")
    if not 0.0 < args.duration < inf:
        raise ValueError(f"--duration {args.duration:g}: give seconds above 0")
    url = server_base_url(args.server, "give --api-key")
    with extra("serve", "fit --server"):
        from rubato.fleet.server_steps import fit_server
    return asyncio.run(fit_server(url, args.model, args.duration, args.api_key or ""))


def _check_residuals(residuals: Path, log: Path | None) -> None:
    """Raises ValueError where `--noise replay:` would not find this file, or the log would be lost."""
    if not step_noise.is_path(str(residuals)) or "+" in str(residuals):
        raise ValueError(f"--residuals {residuals}: give a file with a suffix and no +, such as residuals.txt")
    if log is not None and residuals.exists() and log.exists() and residuals.samefile(log):
        raise ValueError(f"--residuals {residuals} is the log itself: give another file")
