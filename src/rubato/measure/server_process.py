"""A Rubato server as a child process: started on a free port, awaited, stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

START_SECONDS = 120.0
STOP_SECONDS = 20.0


class ServerError(RuntimeError):
    """The server did not start, or did not end well; the message holds the end of its log."""


class ServerProcess:
    """`with ServerProcess(config, log) as server: server.url`. config: as in the server's YAML; port 0 = a free one.

    Leaving drains it by SIGTERM; what does not end within STOP_SECONDS is killed.
    """

    def __init__(self, config: Mapping[str, Any], log: Path) -> None:
        self._config = {"port": 0, "drain_seconds": 0, **config}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        """Of the running server. Raises RuntimeError when there is none."""
        if self._process is None:
            raise RuntimeError("the server is not running: use `with`")
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        settings = self._log.with_suffix(".yaml")
        settings.write_text(yaml.safe_dump(self._config, sort_keys=False))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rubato.cli", "serve", "--config", str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        try:
            self.url = self._wait_for_url()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        status = self._stop()
        if status != 0 and kind is None:
            raise ServerError(f"the server ended with status {status}:\n{self._tail()}")

    def _wait_for_url(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            found = re.search(r"serving at (http://\S+)", self._log.read_text(errors="replace"))
            if found:
                return found[1]
            if self._process.poll() is not None:
                raise ServerError(f"the server did not start (status {self._process.returncode}):\n{self._tail()}")
            time.sleep(0.05)
        raise ServerError(f"the server was not ready after {START_SECONDS:.0f} s:\n{self._tail()}")

    def _stop(self) -> int:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
