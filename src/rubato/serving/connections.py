"""How many connections there may be, which of them gives way to a new one, and what is said when none can be accepted.

uvicorn's `limit_concurrency` looks at a connection when its head is read: one that sends none is never refused, nor is
one in its TLS handshake counted. Here each counts from when it is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import select
import socket
from math import inf
from typing import Any, Literal

from rubato.config.schema import ConfigError

RESERVE = 128  # descriptors for all but connections: engine, Ray, logs, and what the libraries open
MOST = 16_384  # connections, where the descriptors would do for more: their heads together are 1 GiB at worst
TURNS = 3  # of the loop, until a connection that gave way is closed: its end is read, it is closed, that is reported
QUIET = 60.0  # seconds in which what happens to connections again and again is reported once

Owed = Literal["head", "body"]  # what the client is to send next

log = logging.getLogger(__name__)


class Connections:
    """The open ones. When `most` are open, the one that has owed a head for longest is closed, a kept one between
    requests too; if none owes a head, the one that has owed the rest of a body for longest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[int, socket.socket] = {}  # by descriptor
        self._owing: dict[Owed, dict[int, socket.socket]] = {"head": {}, "body": {}}

    def __len__(self) -> int:
        return len(self._open)

    def came(self, connection: socket.socket) -> None:
        # One that failed in its TLS handshake is not reported gone: its descriptor's next owner takes its place.
        descriptor = connection.fileno()
        self.gone(descriptor)
        self._open[descriptor] = connection
        self.owes(descriptor, "head")

    def owes(self, descriptor: int, what: Owed | None) -> None:
        """From now on; None: it is the server's turn. Does nothing for one that was not accepted here."""
        connection = self._open.get(descriptor)
        if connection is None or (what is not None and descriptor in self._owing[what]):
            return
        for owing in self._owing.values():
            owing.pop(descriptor, None)
        if what is not None:
            self._owing[what][descriptor] = connection

    def gone(self, descriptor: int) -> None:
        self.owes(descriptor, None)
        self._open.pop(descriptor, None)

    def evict(self) -> bool:
        """Whether one gives way; its descriptor is free when the loop has seen its end."""
        for owing in self._owing.values():
            for descriptor in list(owing):
                connection = owing[descriptor]
                if connection.fileno() < 0:  # closed long ago
                    self.gone(descriptor)
                    continue
                self.owes(descriptor, None)
                with contextlib.suppress(OSError):  # not connected any more
                    connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


class ListeningSocket(socket.socket):
    """A listening socket for asyncio, with room for so many connections."""

    def __init__(self, family: socket.AddressFamily, connections: Connections) -> None:
        # If the protocol is named, asyncio sets TCP_NODELAY; without, the first token comes about 45 ms late at times.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = connections
        self._failed = False
        self._turns = 0  # of the loop, until another one gives way
        self._full = _Seldom()

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError, as when no client waits, to be asked again at the loop's next turn."""
        if self._failed:
            # asyncio goes on after an error, up to `backlog` times, and logs each; it has set a timer to try again.
            self._failed = False
            raise BlockingIOError
        full = len(self.connections) >= self.connections.most
        if full and (self._turns > 0 or not self._anyone_waits()):  # asyncio asks until it is told so
            self._turns = max(0, self._turns - 1)
            raise BlockingIOError
        if full and self.connections.evict():
            self._turns = TURNS - 1
            self._full.warn(
                "max_connections (%d) reached: those that owe a request for longest are closed", self.connections.most
            )
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            self._failed = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
            raise
        if full:
            connection.close()
            self._full.warn("max_connections (%d) reached, and all are being served: refused", self.connections.most)
            raise BlockingIOError
        self._turns = 0
        self.connections.came(connection)
        return connection, address

    def _anyone_waits(self) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0))


class _Seldom:
    """A warning that is given once in QUIET seconds of the running loop, with a count."""

    def __init__(self) -> None:
        self._count = 0
        self._last = -inf

    def warn(self, message: str, *values: object) -> None:
        self._count += 1
        now = asyncio.get_running_loop().time()
        if now >= self._last + QUIET:
            self._last = now
            log.warning(message + " (%d times so far)", *values, self._count)


def report_accept_errors_seldom(loop: asyncio.AbstractEventLoop) -> None:
    """asyncio would log a traceback for each."""
    seldom = _Seldom()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError):
            seldom.warn("no connection can be accepted (%s)", error.strerror)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def most_connections(asked: int | None, each: int = 1) -> int:
    """`max_connections`; None: as many as there are file descriptors for, MOST at most. The process's limit of them is
    raised as far as that takes and the system lets it. each: descriptors that one takes, its own and those of what is
    opened for it. Raises ConfigError where there are too few."""
    wanted = (asked or MOST) * each + RESERVE
    limit, most = _descriptors()
    if limit < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a bound below its hard limit: then it stays as it is
            hard = resource.RLIM_INFINITY if most == inf else int(most)
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(wanted, most)), hard))
        limit, _ = _descriptors()
    if asked is None:
        return int(min(MOST, max(limit - RESERVE, limit // 2) // each))
    if limit < wanted:
        raise ConfigError(
            f"max_connections: {asked} take {wanted} file descriptors and {int(limit)} are allowed: "
            f"raise that limit (ulimit -n) or set {max(1, (int(limit) - RESERVE) // each)}"
        )
    return asked


def _descriptors() -> tuple[float, float]:
    """How many this process may have, and to how many it may raise that."""
    limit, most = (inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return limit, most
