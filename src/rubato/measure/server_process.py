"""A Rubato server as a child process: started on a free port, awaited, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


class ServerError(RuntimeError):
    """The server did not start, or did not end well; the message holds the end of its log."""


@contextlib.contextmanager
def served(config: Mapping[str, Any], log: Path) -> Iterator[tuple[str, int]]:
    """Runs a server of its own: `with served(config, log) as (url, pid)`. Leaving drains it by SIGTERM; a server that
    does not end within STOP_SECONDS is killed.

    Args:
        config: as in the server's YAML; port 0: a free one.

    Raises:
        ServerError: the server does not start.
    """
    settings = log.with_suffix(".yaml")
    settings.write_text(yaml.safe_dump({"port": 0, "drain_seconds": 0, **config}, sort_keys=False))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "rubato.cli", "serve", "--config", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield _awaited_url(process, log), process.pid
    except BaseException:
        _stop(process)
        raise
    if status := _stop(process):
        raise ServerError(f"the server ended with status {status}:\n{_tail(log)}")


def _awaited_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        found = re.search(r"serving at (http://\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        if process.poll() is not None:
            raise ServerError(f"the server did not start (status {process.returncode}):\n{_tail(log)}")
        time.sleep(0.05)
    raise ServerError(f"the server was not ready after {START_TIMEOUT_S:.0f} s:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
