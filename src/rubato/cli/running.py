"""Runs a verb: checks that results can be written, prints errors as one sentence, ends quietly on SIGTERM."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rubato.core.extras import extra

# Option of an argument whose name is not `--NAME`; positional arguments have none.
OPTION_WORDS = {"log": "", "a": "", "b": "", "model": "", "folder": ""}


def run_verb(name: str, args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Runs a command and returns its exit status.

    2: the request is impossible; one sentence after `name` says why. 141: the reader of standard output has left, as in
    `rubato policies | head`; nothing is printed.
    """
    _end_on_sigterm()
    try:
        check_results(args)
        check_seeds(args)
        status = run(args)
        print(end="", flush=True)  # at the interpreter's end it would be too late to handle what comes of it
        return status
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
            return 128 + signal.SIGPIPE
        print(f"{name}: {sentence(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _reader_has_left() -> bool:
    """Returns whether the broken pipe is standard output, and not one that the command opened."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # poll always reports errors
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))


def _end_on_sigterm() -> None:
    """Turns SIGTERM into SystemExit, so that child processes are stopped on the way out; `serve` handles it itself."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():  # others may not
        signal.signal(signal.SIGTERM, leave)


def check_results(args: argparse.Namespace) -> None:
    """Raises ValueError if a result file cannot be written, ImportError without matplotlib: before hours of work."""
    if getattr(args, "plot", None) or getattr(args, "report", None):
        with extra("plot", "a picture"):
            import matplotlib  # noqa: F401
    # for other commands than `profile`, these two are read, or made with their folder
    own = ("out", "steps") if getattr(args, "command", "") == "profile" else ()
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
    """Raises ValueError for a negative seed."""
    for name in ("seed", "seeds"):
        value = getattr(args, name, None)
        for seed in value if isinstance(value, list) else [] if value is None else [value]:
            if seed < 0:
                raise ValueError(f"--{name} {seed}: give 0 or more")


def sentence(error: Exception, args: argparse.Namespace) -> str:
    """Returns the error's message; for a file that cannot be opened, with the option that names it."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    file = str(error.filename)
    options = [OPTION_WORDS.get(name, f"--{name} ") for name, value in vars(args).items() if str(value) == file]
    return f"{options[0] if options else ''}{file} cannot be opened: {error.strerror.lower()}"


def write(to: str | None, text: str, data: bytes) -> None:
    """Prints the text, and writes the JSON to the file `to`; with `-` JSON goes to stdout and the text to stderr."""
    print(text, file=sys.stderr if to == "-" else sys.stdout)
    if to == "-":
        sys.stdout.buffer.write(data)
    elif to:
        Path(to).write_bytes(data)
