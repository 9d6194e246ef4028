"""The server under test: a process whose log is read through a pipe, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

if TYPE_CHECKING:
    from tests.soak.clients import Seen

START_SECONDS = 240.0
DRAIN_SECONDS = 5.0
ADDRESS = re.compile(r"(?:serving at http://|picking endpoints at )([\d.]+):(\d+)")
KEYS = {"shop": "sk-shop", "lab": "sk-lab", "hostile": "sk-hostile"}


ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "RUBATO_LINK_TOKEN": "soak"}


class Server:
    """`rubato serve` with this configuration, in `folder`. Its log's reader can be stopped."""

    verb = "serve"

    @classmethod
    async def start(cls, config: Mapping[str, Any], folder: Path, seen: Seen) -> Self:
        return await asyncio.to_thread(cls, config, folder)

    @property
    def beside(self) -> tuple[Server, ...]:
        """Other processes under test."""
        return ()

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.memory: list[tuple[float, int]] = []  # when, MiB
        self.event_log = folder / "events.jsonl"
        path = folder / "config.yaml"
        settings = {"port": 0, "drain_seconds": DRAIN_SECONDS, "event_log": str(self.event_log), **config}
        path.write_text(yaml.safe_dump(settings))
        self._reading = threading.Event()
        self._reading.set()
        with (folder / "stdout").open("wb") as stdout:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rubato.cli", self.verb, "--config", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=ENVIRONMENT,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.host, self.port = self._address()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        with (self.folder / "log").open("wb", buffering=0) as log:
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                log.write(data)
                self._reading.wait()

    def _address(self) -> tuple[str, int]:
        until = time.monotonic() + START_SECONDS
        while not (found := ADDRESS.search((self.folder / "stdout").read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                self._reader.join(5.0)
                raise RuntimeError(f"the server did not start:\n{self.log}")
            time.sleep(0.05)
        return found[1], int(found[2])

    # ----------------------------------------------------------------- what is seen from outside

    def log_bytes(self) -> int:
        path = self.folder / "log"
        return path.stat().st_size if path.exists() else 0

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def look_at_memory(self) -> None:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        if found := re.search(r"VmRSS:\s+(\d+)", status):  # else it has ended
            self.memory.append((time.monotonic(), int(found[1]) // 1024))

    def actors(self) -> list[int]:
        """Processes of Ray's replicas below it."""
        return [pid for pid, name in self._below().items() if name.startswith("ray::LinkedHost")]

    def left(self) -> list[str]:
        """Of its session, what still runs."""
        lines = subprocess.run(
            ["ps", "-e", "-o", "sid=,stat=,args="], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 2) for line in lines.splitlines()]
        return [row[2] for row in rows if int(row[0]) == self.process.pid and not row[1].startswith("Z")]

    def _below(self) -> dict[int, str]:
        lines = subprocess.run(
            ["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 2) for line in lines.splitlines()]
        parent = {int(row[0]): int(row[1]) for row in rows}

        def is_below(pid: int) -> bool:
            return pid == self.process.pid or (pid in parent and is_below(parent[pid]))

        return {int(row[0]): row[2] for row in rows if is_below(int(row[0]))}

    # ----------------------------------------------------------------- what is done to it

    def stop_reading(self) -> None:
        self._reading.clear()

    def read_on(self) -> None:
        self._reading.set()

    def limit_files(self, size: int) -> None:
        """Bytes beyond which no file of its can be written; -1: none."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def end(self) -> tuple[int, float]:
        """SIGTERM: exit status, and the seconds that it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(DRAIN_SECONDS + 60.0)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        return status, time.monotonic() - began

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
