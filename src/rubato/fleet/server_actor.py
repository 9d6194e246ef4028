"""The Ray actor of one server: it starts the server's process, watches it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rubato.core.server_url import host_in_url
from rubato.fleet import server_guard
from rubato.fleet.http_client import HttpServer
from rubato.fleet.upstream import UpstreamError, ask_health

HEALTH_RETRY_S = 0.2  # between two checks whether the server is ready
HEALTH_ANSWER_S = 5.0  # for /health
LOG_TAIL_LINES = 40  # that errors show
RAY_VARIABLES = ("OMP_NUM_THREADS",)  # Ray sets them for its own processes; a server decides for itself


@dataclass(frozen=True)
class ServerCommand:
    """Says how a server is started.

    Args:
        words: its command; {host} and {port} in it are where it is to listen.
        environment: variables beside those of the actor; {host} in them is the same, {free_port} a port that nobody
            listens at.
        start_seconds: in which it must serve.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 900.0

    def words_at(self, host: str, port: int) -> list[str]:
        return [word.replace("{host}", host).replace("{port}", str(port)) for word in self.words]

    def environment_at(self, host: str) -> dict[str, str]:
        return {
            name: value.replace("{host}", host).replace("{free_port}", str(_free_port(host)))
            for name, value in self.environment.items()
        }


@dataclass(frozen=True)
class ServerStart:
    """Tells where a server serves, or why it does not.

    Args:
        url: of the server; empty if it does not serve.
        why: it does not serve.
        pid: of the server.
        actor: process id of its actor.
        node: host name of both.
    """

    url: str = ""
    why: str = ""
    pid: int = 0
    actor: int = 0
    node: str = ""


class ServerActor:
    """Runs one server. Every method runs on the actor's one event loop.

    Args:
        name: in Ray's log lines.
        host: the address at which the server listens.
    """

    def __init__(self, name: str, command: ServerCommand, host: str) -> None:
        self._name = name
        self._command = command
        self._host = host
        self._guard: asyncio.subprocess.Process | None = None
        self._pid = 0
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._end: asyncio.Task[str] | None = None
        self._log: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"server {self._name}"

    async def start(self) -> ServerStart:
        """Starts the server, and waits until it serves, has ended, or `start_seconds` are over."""
        port = _free_port(self._host)
        environment = {k: v for k, v in os.environ.items() if k not in RAY_VARIABLES}
        environment |= self._command.environment_at(self._host)
        pipe = asyncio.subprocess.PIPE
        self._guard = guard = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", server_guard.__file__, *self._command.words_at(self._host, port),
            stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True,
        )  # fmt: skip
        assert guard.stdout is not None
        assert guard.stderr is not None
        self._log = asyncio.create_task(self._read_log(guard.stderr))
        self._end = asyncio.create_task(self._wait_until_ended(guard.stdout))
        url = f"http://{host_in_url(self._host)}:{port}"
        serves = asyncio.create_task(self._wait_until_ready(url))
        finished_tasks, _ = await asyncio.wait(
            {serves, self._end}, timeout=self._command.start_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        serves.cancel()
        if self._end in finished_tasks:
            return ServerStart(why=self._end.result())
        if not finished_tasks:
            return ServerStart(why=self._with_log_tail(f"it does not serve after {self._command.start_seconds:g} s"))
        return ServerStart(url, "", self._pid, os.getpid(), socket.gethostname())

    async def wait(self) -> str:
        """Waits until the server has ended by itself, and returns how."""
        assert self._end is not None, "it was started"
        return await asyncio.shield(self._end)

    async def tail(self) -> str:
        """Returns the last lines of the server's log."""
        return "\n".join(self._tail)

    async def close(self) -> None:
        """Ends the server and all its descendants; returns when they have ended."""
        if self._guard is None or self._end is None:
            return
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        await asyncio.shield(self._end)

    # ----------------------------------------------------------------- parts

    async def _wait_until_ready(self, url: str) -> None:
        async with HttpServer(url) as server:
            while True:
                with contextlib.suppress(UpstreamError):
                    if await ask_health(server, HEALTH_ANSWER_S) == 200:
                        return
                await asyncio.sleep(HEALTH_RETRY_S)

    async def _wait_until_ended(self, guard_output: asyncio.StreamReader) -> str:
        """Reads the guard's output until the server ends, and returns how it ended."""
        while line := (await guard_output.readline()).decode(errors="replace").strip():
            what, _, rest = line.partition(" ")
            if what == "started":
                self._pid = int(rest)
            elif what == "ended":
                await self._read_rest_of_log()
                return self._with_log_tail("it ended" + ("" if rest == "None" else f" with status {rest}"))
            else:
                return f"its command cannot be run: {rest}"
        if self._pid:  # the guard was killed: the server died with it, and its own children are in its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        return self._with_log_tail("its guard was killed")

    async def _read_log(self, log_output: asyncio.StreamReader) -> None:
        """Keeps the last lines, and passes all on to Ray's log of this actor."""
        while True:
            try:
                raw = await log_output.readline()
            except ValueError:  # a line too long for the reader, which drops it
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            print(line, flush=True)

    async def _read_rest_of_log(self) -> None:
        if self._log is not None:
            await asyncio.wait({self._log}, timeout=1.0)

    def _with_log_tail(self, what: str) -> str:
        lines = "\n".join(f"    {line}" for line in self._tail)
        return f"{what}; the end of its log:\n{lines}" if lines else what


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
        return port
