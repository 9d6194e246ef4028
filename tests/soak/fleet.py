"""A gateway over stub servers (`tests.stubs`), each in a process of its own behind a `Front`; what is done to these."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Self

import aiohttp

from tests.soak.clients import Seen
from tests.soak.faults import Fault
from tests.soak.front import Front
from tests.soak.server import ENVIRONMENT, Server

START_SECONDS = 30.0
PORTS = SystemRandom().sample(range(20_000, 32_000), 1000)
HUNG_SECONDS = 15.0  # that a server hangs which a request has hung, and then is started again
LOST = (
    "cannot be continued", "broke off", "does not answer", "tried 3 times", "hangs in a step", "only its end had not",
    "no replica has come back", "cannot be reached", "its deadline has passed", "replicas were lost while they ran it",
    "which is not passed on",
    "too many others are being tried again",  # where one server has swallowed what it was sent
)  # fmt: skip


class Stub:
    """One stub server, at the same ports whenever it is started. link: -1 for none. busy: something is done to it."""

    def __init__(self, folder: Path, number: int, policy: str, seen: Seen, *, linked: bool) -> None:
        self.port, self.inner, self.link = _free_port(), _free_port(), _free_port() if linked else -1
        self.front = Front(self.port, self.inner, Random(number), self._fall)
        self.may_fall = number > 0  # one server is to serve, whatever happens to the others
        self.busy = asyncio.Lock()
        self.log = folder / f"stub{number}"
        self.process: subprocess.Popen[bytes] | None = None
        self._seen = seen
        self._tasks: set[asyncio.Task[None]] = set()
        self._words = [
            sys.executable, "-m", "tests.stubs", "--port", str(self.inner), "--link", str(self.link),
            "--policy", policy, "--model", "soak", "--step", "0.02", "--token", "5e-4", "--seqs", "16",
        ]  # fmt: skip

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        await asyncio.to_thread(self._start)
        await self.front.open()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT
            )
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.inner), 1.0).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("a stub server did not start") from None
                time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.front.close()
        self.end()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    async def tell(self, **what: Any) -> None:
        """What it is to do from now on."""
        url = f"http://127.0.0.1:{self.inner}/stub"
        async with aiohttp.ClientSession() as http, http.post(url, data=json.dumps(what)) as answer:
            await answer.read()

    def _fall(self, kind: str) -> bool:
        """A request kills it or hangs it, unless something else is done to it; it is started again."""
        falls = self.may_fall and not self.busy.locked()
        if falls:
            task = asyncio.create_task(self._fall_and_rise(kind))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return falls

    async def _fall_and_rise(self, kind: str) -> None:
        async with self.busy:
            if kind == "hangs":
                self.send(signal.SIGSTOP)
                await _excused(self._seen, HUNG_SECONDS)
            self.kill()
            await _excused(self._seen, 5.0)
            await self.start()


class Fleet(Server):
    """`rubato gateway` over so many stubs, of which the first so many have the link and the last one lies when told to,
    and `rubato epp` over the same."""

    verb = "gateway"
    stubs: list[Stub]
    picker: Picker

    @classmethod
    async def start(cls, config: Mapping[str, Any], folder: Path, seen: Seen) -> Self:
        settings = dict(config)
        count, linked, policy = settings.pop("stubs"), settings.pop("linked"), settings["policy"]
        folder.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
        stubs = [Stub(folder, number, policy, seen, linked=number < linked) for number in range(count)]
        try:
            await asyncio.gather(*(stub.start() for stub in stubs))
            servers = [{"url": stub.url} for stub in stubs]
            for server, stub in zip(servers, stubs[:linked], strict=False):
                server["link"] = f"tcp://127.0.0.1:{stub.link}"
            made = await super().start({**settings, "servers": servers}, folder / "gateway", seen)
            made.stubs = stubs
            picked = {"policy": "edf", "router": "least_loaded", "tiers": settings["tiers"], "servers": servers}
            made.picker = await Picker.start(picked, folder / "picker", seen)
        except BaseException:
            for stub in stubs:
                stub.end()
            raise
        return made

    @property
    def beside(self) -> tuple[Server, ...]:
        return (self.picker,)

    def end(self) -> tuple[int, float]:
        ended = super().end()
        for stub in self.stubs:
            stub.end()
        return ended

    def kill(self) -> None:
        super().kill()
        self.picker.kill()
        for stub in self.stubs:
            stub.end()

    def one(self, rng: Random) -> Stub:
        """Some stub to which nothing else is done, but never the first: one is to serve."""
        return rng.choice([stub for stub in self.stubs[1:] if not stub.busy.locked()] or self.stubs[1:])

    @property
    def told(self) -> Counter[str]:
        """Lies, and poison, by kind."""
        return sum((stub.front.told for stub in self.stubs), Counter())

    def lies(self, share: float) -> None:
        """The last server answers with so many lies from now on."""
        self.stubs[-1].front.lies = share


class Picker(Server):
    verb = "epp"


def _free_port() -> int:
    """Below those that the system gives to connections, which could take it while its server is down."""
    while True:
        port = PORTS.pop()
        with contextlib.suppress(OSError), socket.socket() as bound:
            bound.bind(("127.0.0.1", port))
            return port


async def _excused(seen: Seen, seconds: float) -> None:
    began = time.monotonic()
    await asyncio.sleep(seconds)
    seen.excused.append((began, time.monotonic() + 10.0))


def _fault(name: str, do: Callable[[Stub, Seen], Awaitable[None]]) -> Fault:
    """A fault by this name, of some stub to which nothing else is done meanwhile."""

    async def fault(server: Server, rng: Random, seen: Seen) -> None:
        assert isinstance(server, Fleet)
        stub = server.one(rng)
        async with stub.busy:
            await do(stub, seen)

    fault.__name__ = name
    return fault


async def _kill(stub: Stub, seen: Seen) -> None:
    stub.kill()
    await _excused(seen, 6.0)
    await stub.start()


def _stopped(name: str, seconds: float) -> Fault:
    async def stop(stub: Stub, seen: Seen) -> None:
        stub.send(signal.SIGSTOP)
        await _excused(seen, seconds)
        stub.send(signal.SIGCONT)

    return _fault(name, stop)


def _told(name: str, seconds: float, on: Mapping[str, Any], off: Mapping[str, Any]) -> Fault:
    async def tell(stub: Stub, seen: Seen) -> None:
        await stub.tell(**on)
        await _excused(seen, seconds)
        await stub.tell(**off)

    return _fault(name, tell)


killed_server = _fault("killed_server", _kill)
frozen_server = _stopped("frozen_server", 25.0)  # longer than it takes to be lost
napping_server = _stopped("napping_server", 3.0)
silent_link = _told("silent_link", 10.0, {"silent": True}, {"silent": False})
never_answers = _told("never_answers", 8.0, {"hang": True}, {"hang": False})
# connections that stay, and bring nothing for a while
half_open = _told("half_open", 6.0, {"mute": True}, {"mute": False})
slow_link = _told("slow_link", 8.0, {"delay": 0.2}, {"delay": 0.0})
clock_off = _told("clock_off", 6.0, {"unix_off": 2.0}, {"unix_off": 0.0})  # a machine whose Unix time is 2 s off

FAULTS = (killed_server, frozen_server, napping_server, silent_link, never_answers, half_open, slow_link, clock_off)
