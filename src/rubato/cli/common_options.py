"""Options that several verbs share, and how results are written."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rubato.config import kinds_file
from rubato.core.request import SLO
from rubato.workloads.request_kinds import Kind, chat, code, summary

TIERS = (("chat", 2000, 150), ("code", 3000, 200), ("summary", 6000, 300))  # default TTFT and TPOT, ms

UNLIKE = {"arrivals_from": "--trace ", "log": "", "a": "", "b": "", "output": "", "model": ""}  # what is no `--NAME`


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
    """Who asks for what: a file of kinds, or three tiers."""
    parser.add_argument("--kinds", metavar="FILE", help="YAML: tiers, their SLOs and the kinds of request in each")
    for tier, ttft, tpot in TIERS:
        parser.add_argument(
            f"--{tier}", type=slo, default=SLO(ttft / 1e3, tpot / 1e3), metavar="TTFT_MS,TPOT_MS",
            help=f"SLO of tier {tier} (default {ttft},{tpot}), without --kinds",
        )  # fmt: skip


def kinds(args: argparse.Namespace) -> list[Kind]:
    """What `tiers` was told. Raises ValueError or OSError for a file of kinds that cannot be used."""
    if args.kinds:
        return kinds_file.read(args.kinds)
    return [chat(args.chat, share=0.4), code(args.code, share=0.3), summary(args.summary, share=0.3)]


def slo(text: str) -> SLO:
    try:
        ttft, tpot = (float(part) / 1e3 if part.strip() else None for part in text.split(","))
        return SLO(ttft, tpot)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give TTFT and TPOT in ms, such as 1000,80 ({error})") from error


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


def check_results(args: argparse.Namespace) -> None:
    """Before hours of work: can the files that results are asked for be written? Raises ValueError."""
    own = (
        ("out", "steps") if getattr(args, "command", "") == "profile" else ()
    )  # elsewhere those are read, or made with their folder
    for name in ("json", "report", "plot", "records", *own):
        to = getattr(args, name, None)
        if to in (None, "-"):
            continue
        path = Path(to)
        if path.is_dir() or not path.parent.is_dir():
            what = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise ValueError(f"--{name} {to} cannot be written: {what}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{name} {to} cannot be written: you may not")


def check_seeds(args: argparse.Namespace) -> None:
    """Raises ValueError for a seed that a random stream cannot begin with."""
    for name in ("seed", "seeds"):
        given = getattr(args, name, None)
        for seed in given if isinstance(given, list) else [] if given is None else [given]:
            if seed < 0:
                raise ValueError(f"--{name} {seed}: give 0 or more")


def sentence(error: Exception, args: argparse.Namespace) -> str:
    """What went wrong; of a file that cannot be opened, with the option that names it."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    file = str(error.filename)
    options = [UNLIKE.get(name, f"--{name} ") for name, value in vars(args).items() if str(value) == file]
    return f"{options[0] if options else ''}{file} cannot be opened: {error.strerror.lower()}"


def write(to: str | None, text: str, data: bytes) -> None:
    """The text for a reader, and the JSON where it was asked for (`-`: on standard output, the text then beside it)."""
    print(text, file=sys.stderr if to == "-" else sys.stdout)
    if to == "-":
        sys.stdout.buffer.write(data)
    elif to:
        Path(to).write_bytes(data)


def carried_out(name: str, args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Run a command; its exit status. 2: what was asked for is impossible, and one sentence after `name` says why."""
    _end_on_sigterm()
    try:
        check_results(args)
        check_seeds(args)
        return run(args)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"{name}: {sentence(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _end_on_sigterm() -> None:
    """Leave by an exception, so that child processes are stopped on the way out (`serve` has a way of its own)."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():  # others may not
        signal.signal(signal.SIGTERM, leave)
