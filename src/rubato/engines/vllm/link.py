"""From engine cores to API servers: what became of requests, how steps went, how each engine stands.

vLLM's own messages to its API servers have no place for that. Each core publishes on a socket in a folder that is open
to this user alone; all API servers of this machine read. The folder's name, and the key with which an API server seals
what it says of a request, are in the environment of all processes of one vLLM: `announce` runs before any is started.
A step never waits for a reader: what one is too slow for is lost to it, and it is told how many messages that were.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any
from uuid import uuid4

import orjson
from msgspec.structs import replace

from rubato.core.events import Event
from rubato.wire.messages import EngineState, RequestEvents, ToApiServer, decode_for_api_server, encode, full_row

FOLDER, KEY = "RUBATO_LINK", "RUBATO_KEY"  # environment variables
MOST = 20_000  # messages that wait for a reader
# Where an engine core counts faults. An API server shows each from its start on.
PLACES = (
    "aborted", "command", "compare", "completed", "cut_drafts", "end", "hand_off", "kv_missed", "observe", "offer",
    "plan", "preempted", "refuse", "report", "scheduled", "shift", "slow", "starting", "unknown batch", "view",
)  # fmt: skip
LONGEST_PATH = 100  # characters; a socket file's path may have 107 bytes


def announce() -> None:
    """Name the folder and the key for this process and those it starts (a general plug-in of vLLM)."""
    if FOLDER in os.environ:
        return
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) < LONGEST_PATH - 50 else "/tmp"
    os.environ[FOLDER] = os.path.join(base, f"rubato-{uuid4().hex}")
    os.environ[KEY] = uuid4().hex
    atexit.register(_remove, os.environ[FOLDER], os.getpid())


def _remove(folder: str, pid: int) -> None:
    """At the end of the process of this id; vLLM may kill its cores before they have removed anything."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def seal(fields: Mapping[str, str]) -> str:
    """What shows that `fields` were written by an API server of this vLLM; empty where no key was announced."""
    key = os.environ.get(KEY, "")
    text = json.dumps(sorted(fields.items())).encode()  # of any text, also what is no valid UTF-8
    return blake2b(text, key=key.encode(), digest_size=16).hexdigest() if key else ""


def _open(folder: str) -> None:
    os.makedirs(folder, mode=0o700, exist_ok=True)
    about = os.stat(folder)
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise OSError(f"{folder} is not a folder of this user's alone")


class Publisher:
    """A core's end. Raises OSError for a folder that cannot be made or is open to others."""

    def __init__(self, folder: str, engine: int) -> None:
        import zmq

        _open(folder)
        self._engine = engine
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MOST)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{_file(folder, engine)}")
        self._sent: dict[bytes, int] = {}

    def events(self, client: int, events: Iterable[Event], tickets: Mapping[str, str]) -> None:
        """client: the API server whose requests these are."""
        topic, rows = _of_client(client), [full_row(event) for event in events]
        self._send(topic, RequestEvents(self._engine, self._number(topic), rows, tickets))

    def state(self, fields: Mapping[str, Any]) -> None:
        """How the engine stands, as its `Reports` have it."""
        self._send(ENGINE, EngineState(self._engine, self._number(ENGINE), fields))

    def _number(self, topic: bytes) -> int:
        self._sent[topic] = self._sent.get(topic, 0) + 1
        return self._sent[topic]

    def _send(self, topic: bytes, message: ToApiServer) -> None:
        self._socket.send_multipart([topic, encode(message)])

    def close(self) -> None:
        self._socket.close(linger=0)


class Reader:
    """An API server's end. engines: numbers of those that may run on this machine; client: this API server's number."""

    def __init__(self, folder: str, engines: Iterable[int], client: int) -> None:
        import zmq

        self._again = zmq.Again
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, MOST)
        for topic in (_of_client(client), ENGINE):
            self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        for engine in engines:
            self._socket.connect(f"ipc://{_file(folder, engine)}")
        self._numbers: dict[tuple[bytes, int], int] = {}

    def messages(self) -> Iterator[ToApiServer]:
        """What has come, without waiting."""
        while True:
            try:
                topic, raw = self._socket.recv_multipart(1)  # NOBLOCK
            except self._again:
                return
            message = decode_for_api_server(raw)
            of, number = (topic, message.engine), message.n
            lost = max(0, number - self._numbers.get(of, number - 1) - 1)  # a new core begins at 1
            self._numbers[of] = number
            yield replace(message, lost=lost) if lost else message

    def close(self) -> None:
        self._socket.close(linger=0)


def leave_address(folder: str, host: str, port: int) -> None:
    """Where gateways reach the core, for the API server to tell. Raises OSError as `Publisher`."""
    _open(folder)
    with open(os.path.join(folder, "gateways"), "wb") as file:
        file.write(orjson.dumps({"host": host, "port": port}))


def address_for_gateways() -> dict[str, Any] | None:
    """What `leave_address` left in this process's folder; None where there is nothing."""
    if FOLDER not in os.environ:
        return None
    try:
        with open(os.path.join(os.environ[FOLDER], "gateways"), "rb") as file:
            found: dict[str, Any] = orjson.loads(file.read())
            return found
    except OSError:
        return None


ENGINE = b"engine"


def _of_client(client: int) -> bytes:
    return b"client-%d." % client  # ended, since subscriptions are to what begins so


def _file(folder: str, engine: int) -> str:
    return os.path.join(folder, str(engine))
