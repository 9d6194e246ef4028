"""A process between whoever starts a server and the server: nothing of it outlives its starter.

Run as a file, with the server's command as its arguments. It outlives the signals that end its starter, and ends the
server with all its descendants when the starter closes this process's stdin, which its death does as well. On stdout it
says `started PID` and `ended STATUS`; what the server writes goes to stderr. Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys

POLL_S = 0.05  # between two checks of the server
SIGTERM_GRACE_S = 2.5  # for a server to end by itself after SIGTERM
MAX_KILL_ROUNDS = 100  # processes may start while others are killed
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # prctl's


def main(command: list[str]) -> None:
    """Guards one server from its start to its end."""
    if os.fork():
        os._exit(0)  # Ray kills the children of its processes when they end: this one is none
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which the server would inherit
    ctypes.CDLL(None).prctl(SET_SUBREAPER, 1)  # orphans below come here, where they are found
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL),
        )  # fmt: skip
    except OSError as error:
        _report(f"failed {error}")
        return
    _report(f"started {server.pid}")
    status = None
    while status is None and not select.select([0], [], [], POLL_S)[0]:
        status = _reap(server.pid)
    if status is None:
        status = _ask_to_end(server.pid)
    _kill_all()
    _report(f"ended {status}")
    os._exit(0)  # `server` would wait for a process that is reaped


def _ask_to_end(server: int) -> int | None:
    """Sends SIGTERM to the server, and waits for a while. Returns its exit status; None if it goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGTERM)
    status = None
    for _ in range(int(SIGTERM_GRACE_S / POLL_S)):
        select.select([], [], [], POLL_S)
        if (status := _reap(server)) is not None:
            break  # its orphans are killed below
    return status


def _kill_all() -> None:
    for _ in range(MAX_KILL_ROUNDS):
        alive = descendants(os.getpid())
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        if not alive:
            return
        select.select([], [], [], POLL_S)


def _reap(server: int) -> int | None:
    """Reaps ended processes. Returns the server's exit status if it is among them, negative for a signal."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == server:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def descendants(pid: int) -> list[int]:
    """Returns the pids of all processes below one, zombies too."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(name))
    pids: list[int] = []
    level = [pid]
    while level:
        level = [child for each in level for child in below.get(each, ())]
        pids += level
    return pids


def _report(words: str) -> None:
    with contextlib.suppress(OSError):  # nobody may listen any more
        os.write(1, words.encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
