"""The link to one server's engine core, over ZeroMQ (`wire.messages`)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import zmq
import zmq.asyncio

from rubato.wire.link_keys import FAILED_HANDSHAKES, MAX_COMMAND_BYTES, failed_handshakes, protect_gateway
from rubato.wire.messages import FromCore, ToCore, decode_from_core, encode
from rubato.wire.replica_report import ReplicaReport

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 10_000  # on either side


class Link(Protocol):
    """Carries messages to an engine core and from it. `is_refused` says that the core and this gateway do not have the
    same token."""

    @property
    def is_refused(self) -> bool: ...

    def send(self, message: ToCore) -> None:
        """Sends without waiting; messages beyond the queue are lost."""
        ...

    async def receive(self) -> FromCore | ReplicaReport:
        """Returns the next message. Raises ReplicaLostError if the other end is gone for good."""
        ...

    def close(self) -> None: ...


class ZmqLink:
    """A `Link` to an address such as `tcp://127.0.0.1:5557`; it connects, again and again, by itself."""

    def __init__(self, address: str) -> None:
        self._socket: Any = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        protect_gateway(self._socket)
        self._own_monitor: Any = self._socket.get_monitor_socket(FAILED_HANDSHAKES)
        self._monitor: Any = zmq.Socket.shadow(self._own_monitor)  # the same, for which no loop waits
        self._failed_handshakes = 0
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))  # of a name it would take an IPv6 address first
        self._socket.connect(address)

    @property
    def is_refused(self) -> bool:
        self._failed_handshakes += failed_handshakes(self._monitor)
        return self._failed_handshakes > 0

    def send(self, message: ToCore) -> None:
        raw = encode(message)
        if len(raw) > MAX_COMMAND_BYTES:
            log.error("a message of %d bytes to an engine is left out: it takes %d", len(raw), MAX_COMMAND_BYTES)
            return
        # Not past the asynchronous socket: it would not learn that something has come meanwhile.
        send_result: asyncio.Future[Any] = self._socket.send(raw, zmq.NOBLOCK)
        if send_result.done() and (error := send_result.exception()) is not None and not isinstance(error, zmq.Again):
            raise error  # (Again: there is no core, or it hears nothing: it is greeted anew, or lost)

    async def receive(self) -> FromCore:
        while True:
            try:
                return decode_from_core(await self._socket.recv())
            except ValueError:
                continue  # no core of ours

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._own_monitor.close(linger=0)
            self._socket.close(linger=0)
