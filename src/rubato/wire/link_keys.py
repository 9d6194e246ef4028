"""Access to the link between engine cores and gateways: both ends share a token, which itself is never sent.

Both ends derive their CURVE keys from the token. CURVE is ZeroMQ's own: a peer that cannot prove both keys is dropped
in the handshake, by ZeroMQ's thread, before a byte of it reaches Python, and what the others say is encrypted. Without
a token, which a core allows on loopback alone, whoever connects may speak.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import zmq
from zmq.utils import z85

TOKEN_ENV = "RUBATO_LINK_TOKEN"  # environment variable with the token of both ends; empty on loopback
MAX_COMMAND_BYTES = 1 << 20  # of one message to a core
MAX_REPORT_BYTES = 64 << 20  # of one from a core: a snapshot has all output of all requests
HANDSHAKE_S = 5.0  # a peer that has not shown the token by then is dropped
MAX_COUNTED_AT_ONCE = 100
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key may speak, one address a context
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _key_pair(side: bytes) -> tuple[bytes, bytes]:
    """Returns the public and the secret key of one side, for the token of this process's environment.

    Raises:
        OSError: ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise OSError(f"{TOKEN_ENV} is set, and ZeroMQ is installed without CURVE here: install pyzmq from its wheel")
    token = os.fsencode(os.environ.get(TOKEN_ENV, ""))
    secret = z85.encode(blake2b(token, digest_size=32, person=side).digest())
    return zmq.curve_public(secret), secret


class Gatekeeper:
    """A core's answers to ZeroMQ, which asks on `socket` whether a peer's key may speak."""

    def __init__(self, context: Any) -> None:
        self._gateways_key = z85.decode(_key_pair(b"gateway")[0])
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answers one question of ZeroMQ."""
        version, request, *about = self.socket.recv_multipart()
        is_allowed = about[3:] == [b"CURVE", self._gateways_key]  # behind the domain, the address and the peer's name
        self.socket.send_multipart([version, request, b"200" if is_allowed else b"400", b"", b"", b""])


def protect_core(socket: Any) -> Gatekeeper | None:
    """Restricts a core's socket to peers with the token, if there is one, and to messages of limited size."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1e3))
    if not os.environ.get(TOKEN_ENV):
        return None
    socket.setsockopt(zmq.CURVE_SECRETKEY, _key_pair(b"core")[1])
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"rubato")
    return Gatekeeper(socket.context)


def protect_gateway(socket: Any) -> None:
    """Lets a gateway's socket speak only to a core with the same token, and limits the size of the messages it
    takes."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
    if os.environ.get(TOKEN_ENV):
        public, secret = _key_pair(b"gateway")
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, _key_pair(b"core")[0])


def failed_handshakes(monitor: Any) -> int:
    """Counts failed handshakes since the last call, at most MAX_COUNTED_AT_ONCE, so that a storm of strangers blocks
    nobody.

    Args:
        monitor: of a socket, for the events FAILED_HANDSHAKES.
    """
    for failed in range(MAX_COUNTED_AT_ONCE):
        try:
            monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return failed
    return MAX_COUNTED_AT_ONCE
