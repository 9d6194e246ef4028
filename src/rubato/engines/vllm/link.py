"""The link from engine cores to vLLM's API servers: events of requests, steps, and the state of each engine.

vLLM's own messages to its API servers have no place for that. Each core listens (`core_link`) also on a socket in a
folder that is open to this user alone; all API servers of this machine connect to it. The folder's name, and the key
with which an API server seals what it says of a request, are in the environment of all processes of one vLLM:
`announce` runs before any is started.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from math import inf
from typing import Any
from uuid import uuid4

import orjson
from msgspec.structs import replace

from rubato.core.clock import WallClock
from rubato.wire.link_keys import protect_gateway
from rubato.wire.messages import (
    HEARTBEAT_S,
    PROTOCOL,
    EngineState,
    Refused,
    RequestEvents,
    Subscribe,
    decode_for_api_server,
    encode,
)

FOLDER, KEY = "RUBATO_LINK", "RUBATO_KEY"  # environment variables
MAX_QUEUED_MESSAGES = 20_000  # for a reader
# Where an engine core counts faults. An API server shows each from its start on.
FAULT_PLACES = (
    "aborted", "command", "compare", "completed", "cut_drafts", "end", "hand_off", "kv_missed", "observe", "offer",
    "plan", "preempted", "refuse", "report", "scheduled", "shift", "slow", "starting", "unknown batch", "view",
)  # fmt: skip
MAX_PATH_CHARACTERS = 100  # a socket file's path may have 107 bytes


def announce() -> None:
    """Names the folder and the key for this process and those it starts (a general plug-in of vLLM)."""
    if FOLDER in os.environ:
        return
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PATH_CHARACTERS - 50 else "/tmp"
    os.environ[FOLDER] = os.path.join(base, f"rubato-{uuid4().hex}")
    os.environ[KEY] = uuid4().hex
    atexit.register(_remove, os.environ[FOLDER], os.getpid())


def _remove(folder: str, pid: int) -> None:
    """Removes the folder at the end of the process of this id; vLLM may kill its cores before they have removed
    anything."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def seal(fields: Mapping[str, str]) -> str:
    """Returns a seal on `fields`, by which cores know that an API server of this vLLM wrote them; empty if no key was
    announced."""
    key = os.environ.get(KEY, "")
    text = json.dumps(sorted(fields.items())).encode()  # of any text, also what is no valid UTF-8
    return blake2b(text, key=key.encode(), digest_size=16).hexdigest() if key else ""


def endpoint(folder: str, engine: int) -> str:
    """Returns the address of an engine core for API servers. Raises OSError if the folder cannot be made or is open to
    others."""
    _open(folder)
    return f"ipc://{_file(folder, engine)}"


def _open(folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    about = os.stat(folder)
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise OSError(f"{folder} is not a folder of this user's alone")


class Reader:
    """Reads an API server's end of the link.

    Args:
        folder: in which the cores listen.
        engines: numbers of the cores that may run on this machine.
        client: number of this API server.
    """

    def __init__(self, folder: str, engines: Iterable[int], client: int) -> None:
        import zmq

        self._again, self._sockets = zmq.Again, []
        for engine in engines:
            socket: Any = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
            socket.setsockopt(zmq.SNDHWM, 1)
            socket.setsockopt(zmq.LINGER, 0)
            protect_gateway(socket)
            socket.connect(f"ipc://{_file(folder, engine)}")
            self._sockets.append(socket)
        self._numbers: dict[tuple[type, int], int] = {}
        self._subscribe = encode(Subscribe(PROTOCOL, client, os.environ.get(KEY, "")))
        self._clock, self._subscribed = WallClock(), -inf
        self._ask()

    def _ask(self) -> None:
        """Subscribes again: a core may have restarted."""
        if (now := self._clock.now()) < self._subscribed + HEARTBEAT_S:
            return
        self._subscribed = now
        for socket in self._sockets:
            with suppress(self._again):
                socket.send(self._subscribe, 1)  # NOBLOCK

    def messages(self) -> Iterator[RequestEvents | EngineState]:
        """Returns the messages that have come, without waiting. Raises OSError if an engine core rejects this API
        server."""
        self._ask()
        for socket in self._sockets:
            with suppress(self._again):
                while True:
                    message = decode_for_api_server(socket.recv(1))
                    if isinstance(message, Refused):
                        raise OSError(message.why)
                    kind, number = (type(message), message.engine), message.n
                    # Numbers go up by one; those of a restarted core begin at 1 again, which is no loss.
                    lost = max(0, number - self._numbers.get(kind, number - 1) - 1)
                    self._numbers[kind] = number
                    yield replace(message, lost=lost) if lost else message

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)


def leave_address(folder: str, host: str, port: int) -> None:
    """Stores the core's address for gateways, which the API server serves. Raises OSError as `endpoint`."""
    _open(folder)
    with open(os.path.join(folder, "gateways"), "wb") as file:
        file.write(orjson.dumps({"host": host, "port": port}))


def address_for_gateways() -> dict[str, Any] | None:
    """Returns the address that `leave_address` stored in this process's folder; None if there is none."""
    if FOLDER not in os.environ:
        return None
    try:
        with open(os.path.join(os.environ[FOLDER], "gateways"), "rb") as file:
            found: dict[str, Any] = orjson.loads(file.read())
            return found
    except OSError:
        return None


def _file(folder: str, engine: int) -> str:
    return os.path.join(folder, str(engine))
