"""Limits the number of connections, closes the slowest for a new one, and logs failures to accept at a bounded rate.

uvicorn's `limit_concurrency` counts a connection once its head is read, so that one which sends nothing or is still in
its TLS handshake is never refused. Here each counts from when it is accepted.
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

RESERVED_DESCRIPTORS = 128  # for all but connections: engine, Ray, logs, libraries
MAX_CONNECTIONS = 16_384  # even where there are more descriptors: the heads together take 1 GiB at worst
LOOP_TURNS_TO_CLOSE = 3  # of the event loop: the end is read, the connection is closed, that is reported
WARN_INTERVAL_S = 60.0  # between two equal warnings

PendingInput = Literal["head", "body"]  # that the server waits for

log = logging.getLogger(__name__)


class Connections:
    """Keeps the open connections. When `limit` are open, `close_slowest` closes the one whose head, or else whose body,
    has been awaited for longest; a connection between two requests counts as awaiting a head."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[int, socket.socket] = {}  # by descriptor
        self._expecting: dict[PendingInput, dict[int, socket.socket]] = {"head": {}, "body": {}}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: socket.socket) -> None:
        # A connection that failed in its TLS handshake is never removed: its descriptor's next owner replaces it.
        descriptor = connection.fileno()
        self.remove(descriptor)
        self._open[descriptor] = connection
        self.expect(descriptor, "head")

    def expect(self, descriptor: int, part: PendingInput | None) -> None:
        """Sets the input awaited from now on; None: it is the server's turn. Ignores connections not accepted here."""
        connection = self._open.get(descriptor)
        if connection is None or (part is not None and descriptor in self._expecting[part]):
            return
        for connections in self._expecting.values():
            connections.pop(descriptor, None)
        if part is not None:
            self._expecting[part][descriptor] = connection

    def remove(self, descriptor: int) -> None:
        self.expect(descriptor, None)
        self._open.pop(descriptor, None)

    def close_slowest(self) -> bool:
        """Closes the slowest connection, if any may be; its descriptor is free once the loop has seen its end."""
        for connections in self._expecting.values():
            for descriptor in list(connections):
                connection = connections[descriptor]
                if connection.fileno() < 0:  # closed long ago
                    self.remove(descriptor)
                    continue
                self.expect(descriptor, None)
                with contextlib.suppress(OSError):  # not connected any more
                    connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


class ListeningSocket(socket.socket):
    """Listens for asyncio and keeps to the limit of `connections`."""

    def __init__(self, family: socket.AddressFamily, connections: Connections) -> None:
        # asyncio sets TCP_NODELAY only if the protocol is named; without it first tokens come up to 45 ms late.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.connections = connections
        self._accept_failed = False
        self._turns = 0  # of the loop, until another connection may be closed
        self._full_warning = _RateLimitedWarning()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts a client. Raises BlockingIOError, as when no client waits, so that asyncio asks again later."""
        if self._accept_failed:
            # asyncio calls again after an error, up to `backlog` times, and logs each; its timer will try again.
            self._accept_failed = False
            raise BlockingIOError
        full = len(self.connections) >= self.connections.limit
        if full and (self._turns > 0 or not self._has_waiting_client()):  # asyncio asks until it is told so
            self._turns = max(0, self._turns - 1)
            raise BlockingIOError
        if full and self.connections.close_slowest():
            self._turns = LOOP_TURNS_TO_CLOSE - 1
            self._full_warning.warn(
                "max_connections (%d) reached: those that owe a request for longest are closed", self.connections.limit
            )
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            self._accept_failed = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
            raise
        if full:
            connection.close()
            self._full_warning.warn(
                "max_connections (%d) reached, and all are being served: refused", self.connections.limit
            )
            raise BlockingIOError
        self._turns = 0
        self.connections.add(connection)
        return connection, address

    def _has_waiting_client(self) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0))


class _RateLimitedWarning:
    """Logs a warning once in WARN_INTERVAL_S of the running loop, with a count."""

    def __init__(self) -> None:
        self._count = 0
        self._last = -inf

    def warn(self, message: str, *values: object) -> None:
        self._count += 1
        now = asyncio.get_running_loop().time()
        if now >= self._last + WARN_INTERVAL_S:
            self._last = now
            log.warning(message + " (%d times so far)", *values, self._count)


def limit_accept_error_logs(loop: asyncio.AbstractEventLoop) -> None:
    """Logs failures to accept at a bounded rate; asyncio would log a traceback for each."""
    seldom = _RateLimitedWarning()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" in context and isinstance(error, OSError):
            seldom.warn("no connection can be accepted (%s)", error.strerror)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def connection_limit(max_connections: int | None, descriptors_each: int = 1) -> int:
    """Returns the number of connections allowed, after raising the process's limit of file descriptors if need be.

    Args:
        max_connections: of the configuration; None: as many as the descriptors allow, MAX_CONNECTIONS at most.
        descriptors_each: for one connection, with those opened on its behalf.

    Raises:
        ConfigError: where there are too few descriptors.
    """
    needed = (max_connections or MAX_CONNECTIONS) * descriptors_each + RESERVED_DESCRIPTORS
    limit, hard_limit = _descriptors()
    if limit < needed:
        with contextlib.suppress(ValueError, OSError):  # macOS has a bound below its hard limit: then it stays as it is
            hard = resource.RLIM_INFINITY if hard_limit == inf else int(hard_limit)
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(needed, hard_limit)), hard))
        limit, _ = _descriptors()
    if max_connections is None:
        return int(min(MAX_CONNECTIONS, max(limit - RESERVED_DESCRIPTORS, limit // 2) // descriptors_each))
    if limit < needed:
        raise ConfigError(
            f"max_connections: {max_connections} take {needed} file descriptors and {int(limit)} are allowed: "
            f"raise that limit (ulimit -n) or set {max(1, (int(limit) - RESERVED_DESCRIPTORS) // descriptors_each)}"
        )
    return max_connections


def _descriptors() -> tuple[float, float]:
    """Returns the process's soft and hard limits of file descriptors."""
    soft, hard = (inf if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard
