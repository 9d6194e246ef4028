"""Real servers in processes of their own, on free ports, always ended."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rubato.core import event_log
from rubato.core.events import Event

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0  # a model may have to be fetched and converted first
STOP_SECONDS = 30.0
STEP = 0.02  # seconds of a simulated step


@dataclass
class Server:
    """`rubato serve` in a process: its url, its log, its event log."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str = ""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def events(self) -> list[Event]:
        """Its event log; whole once it has ended."""
        return list(event_log.read(self.folder / "trace.jsonl"))

    def events_so_far(self) -> list[Event]:
        """Of its event log, the lines that are whole and written by now."""
        raw = (self.folder / "trace.jsonl").read_bytes()
        return [event_log.decode(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]

    def metrics(self) -> Callable[..., float]:
        """value(name, label=..., ...) of a fresh scrape, summed over the series that have these labels."""
        text = httpx2.get(f"{self.url}/metrics", timeout=10).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

        def value(name: str, **labels: str) -> float:
            return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

        return value

    def wait_until(self, condition: Callable[[Callable[..., float]], bool], seconds: float = 15.0) -> None:
        """Until /metrics says so."""
        deadline = time.monotonic() + seconds
        while not condition(self.metrics()):
            assert time.monotonic() < deadline, f"still not so after {seconds} s; log:\n{self.log}"
            time.sleep(0.01)

    def end(self, number: int | None = signal.SIGTERM) -> int:
        """Its exit status, after a signal (None: it ends by itself)."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def _wait_for_url(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"serving at (https?://\S+)", self.log)):
            assert self.process.poll() is None, f"it did not start:\n{self.log}"
            assert time.monotonic() < deadline, f"it is not ready after {START_SECONDS} s:\n{self.log}"
            time.sleep(0.02)
        self.url = found[1]


Start = Callable[..., Server]


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Start]:
    """start(**config): a server with the simulated engine on the wall clock, unless told otherwise. descriptors: the
    most files that its process may have open. command: `gateway` has no engine."""
    with contextlib.ExitStack() as stack:

        def start(
            *,
            wait: bool = True,
            stderr: int = subprocess.STDOUT,
            descriptors: int | None = None,
            command: str = "serve",
            **config: Any,
        ) -> Server:
            here = folder / f"server{len(list(folder.iterdir()))}"
            here.mkdir()
            defaults: dict[str, Any] = {"port": 0, "event_log": str(here / "trace.jsonl")}
            if command == "serve":
                defaults |= {
                    "engine": {"kind": "simulated"},
                    "latency": {"kind": "affine", "k": [0.0, 0.0], "b": [STEP, 0.0]},
                }
            (here / "config.yaml").write_text(yaml.safe_dump({**defaults, **config}))
            log = stack.enter_context((here / "log").open("wb"))
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            process = subprocess.Popen(
                [sys.executable, "-m", "rubato.cli", command, "--config", str(here / "config.yaml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
                preexec_fn=descriptors and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors,) * 2)),
            )
            stack.callback(_kill, process)
            server = Server(process, here)
            if wait:
                server._wait_for_url()
            return server

        yield start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with servers(tmp_path) as start:
        yield start


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(STOP_SECONDS)
