"""A gateway over stub servers in processes of their own (`tests.stubs`), and what is done to these."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from tests.soak.clients import Seen
from tests.soak.faults import Fault
from tests.soak.server import Server

START_SECONDS = 30.0
LOST = (
    "cannot be continued", "broke off", "does not answer", "tried 3 times", "hangs in a step", "only its end had not",
    "no replica has come back", "cannot be reached", "its deadline has passed",
)  # fmt: skip


class Stub:
    """One stub server, at the same ports whenever it is started."""

    def __init__(self, folder: Path, number: int, policy: str) -> None:
        self.port, self.link = _free_port(), _free_port()
        self._log = (folder / f"stub{number}").open("ab")
        self._words = [
            sys.executable, "-m", "tests.stubs", "--port", str(self.port), "--link", str(self.link), "--policy", policy,
            "--model", "soak", "--step", "0.02", "--token", "5e-4", "--seqs", "32",
        ]  # fmt: skip
        self.process = self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(self._words, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return self.process
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("a stub server did not start") from None
                time.sleep(0.05)

    async def tell(self, **what: Any) -> None:
        """What it is to do from now on."""
        async with aiohttp.ClientSession() as http, http.post(f"{self.url}/stub", data=json.dumps(what)) as answer:
            await answer.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


class Fleet(Server):
    """`rubato gateway` over so many stubs."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        settings = dict(config)
        count, policy = settings.pop("stubs"), settings["policy"]
        folder.mkdir(parents=True)
        self.stubs = [Stub(folder, number, policy) for number in range(count)]
        servers = [{"url": stub.url, "link": f"tcp://127.0.0.1:{stub.link}"} for stub in self.stubs]
        try:
            super().__init__({**settings, "servers": servers}, folder / "gateway")
        except BaseException:
            self.end_stubs()
            raise

    def end_stubs(self) -> None:
        for stub in self.stubs:
            stub.end()

    def end(self) -> tuple[int, float]:
        ended = super().end()
        self.end_stubs()
        return ended

    def kill(self) -> None:
        super().kill()
        self.end_stubs()

    def one(self, rng: Random) -> Stub:
        """Some stub, but never the first: faults may overlap, and one is to serve."""
        return rng.choice(self.stubs[1:])


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def _excused(seen: Seen, seconds: float) -> None:
    began = time.monotonic()
    seen.may_fail = tuple({*seen.may_fail, *LOST})
    await asyncio.sleep(seconds)
    seen.excused.append((began, time.monotonic() + 10.0))


async def killed_server(server: Server, rng: Random, seen: Seen) -> None:
    """kill -9, and started again."""
    assert isinstance(server, Fleet)
    stub = server.one(rng)
    stub.process.kill()
    stub.process.wait()
    await _excused(seen, 6.0)
    await asyncio.to_thread(stub.start)


async def frozen_server(server: Server, rng: Random, seen: Seen) -> None:
    """SIGSTOP for longer than it takes to be lost."""
    assert isinstance(server, Fleet)
    stub = server.one(rng)
    stub.process.send_signal(signal.SIGSTOP)
    await _excused(seen, 25.0)
    stub.process.send_signal(signal.SIGCONT)


async def napping_server(server: Server, rng: Random, seen: Seen) -> None:
    assert isinstance(server, Fleet)
    stub = server.one(rng)
    stub.process.send_signal(signal.SIGSTOP)
    await _excused(seen, 3.0)
    stub.process.send_signal(signal.SIGCONT)


def _told(name: str, seconds: float, on: Mapping[str, Any], off: Mapping[str, Any]) -> Fault:
    """A fault by this name: some server is told `on`, and after so many seconds `off`."""

    async def fault(server: Server, rng: Random, seen: Seen) -> None:
        assert isinstance(server, Fleet)
        stub = server.one(rng)
        await stub.tell(**on)
        await _excused(seen, seconds)
        await stub.tell(**off)

    fault.__name__ = name
    return fault


silent_link = _told("silent_link", 10.0, {"silent": True}, {"silent": False})
never_answers = _told("never_answers", 8.0, {"hang": True}, {"hang": False})
# connections that stay, and bring nothing for a while
half_open = _told("half_open", 6.0, {"mute": True}, {"mute": False})
slow_link = _told("slow_link", 8.0, {"delay": 0.2}, {"delay": 0.0})
clock_off = _told("clock_off", 6.0, {"unix_off": 2.0}, {"unix_off": 0.0})  # a machine whose Unix time is 2 s off


async def says_503(server: Server, rng: Random, seen: Seen) -> None:
    assert isinstance(server, Fleet)
    await server.one(rng).tell(fail=20)
    await _excused(seen, 3.0)


FAULTS = (
    killed_server, frozen_server, napping_server, silent_link, never_answers, half_open, slow_link, says_503, clock_off,
)  # fmt: skip
