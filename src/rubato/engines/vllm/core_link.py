"""A core's end of the link to gateways and to vLLM's API servers (`wire.messages`): a socket with a thread of its own.

A step passes bytes to the thread and never waits; without listeners nothing is encoded. A gateway that is too slow
misses reports, notices the gap in their numbers and asks for a snapshot; an API server counts missed messages. The
thread also answers greetings and pings while the engine runs a long step or is idle. Peers without the token
(`wire.link_keys`) and foreign messages are counted and not logged: they could fill the log."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

import msgspec
import zmq

from rubato.core.clock import unix_time
from rubato.core.server_url import host_in_url
from rubato.engines.vllm.settings import LinkSettings
from rubato.wire.link_keys import FAILED_HANDSHAKES, MAX_REPORT_BYTES, failed_handshakes, protect_core
from rubato.wire.messages import (
    PROTOCOL,
    Beat,
    CoreAbout,
    Do,
    EngineState,
    FromCore,
    Greeting,
    Hello,
    Ping,
    Refused,
    Report,
    RequestEvents,
    Snapshot,
    Subscribe,
    Unknown,
    decode_to_core,
    encode,
)

log = logging.getLogger("vllm.rubato")

MAX_QUEUED_MESSAGES = 1000  # to one peer
MAX_THREAD_MESSAGES = 10_000  # from steps to the thread
MAX_COMMANDS = 10_000  # that wait for the next step
POLL_MS = 200  # the thread checks at this interval whether it should end
GATEWAY_TIMEOUT_S = 30.0  # after this silence a gateway gets no more reports
MAX_PEERS = 64  # gateways and API servers that one core reports to
MAX_UNREAD = 64  # messages of one peer that wait for the thread


@dataclass(slots=True)
class _Peer:
    """Holds a peer that has introduced itself.

    Args:
        heard_at: when its last message came (s).
        is_synced: the gateway has received a snapshot and every report since.
        client: number of an API server; None: the peer is a gateway.
    """

    name: str
    heard_at: float
    is_synced: bool = False
    client: int | None = None


class CoreLink:
    """Listens at once, and answers after `start`.

    Args:
        settings: address for gateways; None: no gateway can connect.
        endpoint: ZeroMQ address for API servers.
        key: that API servers must show.

    Raises:
        OSError: an address is not available.
    """

    def __init__(self, settings: LinkSettings | None, endpoint: str = "", key: str = "") -> None:
        self._context: zmq.Context[Any] = zmq.Context()  # its own: ZeroMQ has one gatekeeper a context
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._gatekeeper = protect_core(self._socket)
        self._monitor = self._socket.get_monitor_socket(FAILED_HANDSHAKES)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what cannot be sent is said, not dropped in silence
        self.port, self.endpoint, self._key = 0, endpoint, key
        if endpoint:
            self._bind(endpoint)
        if settings is not None:
            self._socket.setsockopt(zmq.IPV6, int(":" in settings.host))
            self._bind(f"tcp://{host_in_url(settings.host)}:{settings.port or '*'}")
            self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        inside = f"inproc://rubato-link-{id(self)}"
        self._from_steps = self._context.socket(zmq.PULL)
        self._from_steps.setsockopt(zmq.RCVHWM, MAX_THREAD_MESSAGES)
        self._from_steps.bind(inside)
        self._to_thread = self._context.socket(zmq.PUSH)
        self._to_thread.setsockopt(zmq.SNDHWM, MAX_THREAD_MESSAGES)
        self._to_thread.setsockopt(zmq.LINGER, 0)
        self._to_thread.connect(inside)
        self._peers: dict[bytes, _Peer] = {}
        self._commands: deque[tuple[str, msgspec.Raw]] = deque(maxlen=MAX_COMMANDS)
        self._idle_snapshot: bytes | None = None  # the snapshot of an idle engine
        self._is_ending = False
        self.listeners = 0  # gateways that get reports
        self.clients: frozenset[int] = frozenset()  # numbers of the API servers that get reports
        self.wants_snapshot = False  # some gateway waits for one
        self.refusals = 0  # connections and messages of strangers
        self._thread = threading.Thread(target=self._run, name="rubato-link", daemon=True)

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(f"rubato.link: cannot listen on {endpoint.replace('*', '0')} ({error})") from error

    def start(self, about: Callable[[], CoreAbout], clock: Callable[[], float]) -> None:
        """Starts the thread.

        Args:
            about: describes the core, for greetings.
            clock: the core's.
        """
        self._about, self._clock = about, clock
        self._thread.start()

    # ----------------------------------------------------------------- called by steps

    def commands(self) -> list[tuple[str, msgspec.Raw]]:
        """Returns the gateways' commands since the last call, each with the gateway's name, in order."""
        commands = []
        while self._commands:
            commands.append(self._commands.popleft())
        return commands

    def report(self, message: Report) -> None:
        """Sends a report to all listeners; if the thread's queue is full they miss it."""
        self._hand_over(b"report", encode(message))

    def snapshot(self, message: Snapshot, *, idle: bool) -> None:
        """Sends a snapshot to gateways that missed a report.

        Args:
            idle: nothing will happen before the next report.
        """
        raw = encode(message)
        self._idle_snapshot = raw if idle else None
        if self.wants_snapshot:
            self.wants_snapshot = False
            self._hand_over(b"snapshot", raw)

    def tell_clients(self, message: EngineState) -> None:
        """Sends to all API servers; if the thread's queue is full they miss it."""
        self._hand_over(b"state", encode(message))

    def tell_client(self, client: int, message: RequestEvents) -> None:
        """Sends to the API server of this number; if the thread's queue is full the server misses it."""
        self._hand_over(b"%d" % client, encode(message))

    def request_resync(self) -> None:
        """Asks for a new snapshot for all gateways: a report of some request was wrong."""
        self._idle_snapshot = None
        self.wants_snapshot = True
        self._hand_over(b"afresh", b"")

    def end_idle(self) -> None:
        """Drops the snapshot of the idle engine: something happens again."""
        self._idle_snapshot = None

    def _hand_over(self, kind: bytes, raw: bytes) -> None:
        if len(raw) > MAX_REPORT_BYTES:
            return  # no gateway would take it; gateways then count instead
        with contextlib.suppress(zmq.Again):  # the numbers will show it
            self._to_thread.send_multipart([kind, raw], zmq.NOBLOCK)

    def close(self) -> None:
        self._is_ending = True
        if self._thread.ident is not None:
            self._thread.join(2.0)
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    # ----------------------------------------------------------------- the thread

    def _run(self) -> None:
        poller: Any = zmq.Poller()
        key_socket = None if self._gatekeeper is None else self._gatekeeper.socket
        for socket in filter(None, (self._socket, self._from_steps, self._monitor, key_socket)):
            poller.register(socket, zmq.POLLIN)
        while not self._is_ending:
            try:
                ready = dict(poller.poll(POLL_MS))
                if self._from_steps in ready:
                    self._forward()
                if self._socket in ready:
                    self._hear(self._socket.recv_multipart())
                if self._gatekeeper is not None and key_socket in ready:
                    self._gatekeeper.answer()
                if self._monitor in ready:
                    self.refusals += failed_handshakes(self._monitor)
                self._settle()
            except Exception:  # the engine goes on, and so do other gateways
                log.exception("the link to gateways failed at one message")

    def _forward(self) -> None:
        kind, raw = self._from_steps.recv_multipart()
        for who, peer in list(self._peers.items()):
            if peer.client is not None:
                if kind == b"state" or kind == b"%d" % peer.client:
                    self._send(who, raw)
            elif kind == b"afresh":
                peer.is_synced = False
            elif kind == (b"report" if peer.is_synced else b"snapshot"):  # reports to those that miss none
                peer.is_synced = self._send(who, raw)
                self.wants_snapshot |= not peer.is_synced

    def _hear(self, frames: list[bytes]) -> None:
        """Handles one message.

        Args:
            frames: the peer's name and the message, of any content.
        """
        try:
            who, raw = frames
            message = decode_to_core(raw)
        except ValueError:
            self.refusals += 1  # no gateway of ours
            return
        if isinstance(message, Hello | Subscribe):
            self._greet(who, message)
            return
        peer = self._peers.get(who)
        if peer is None:  # it has not said hello, or was forgotten: it is to say it again
            self._tell(who, Unknown())
            return
        peer.heard_at = self._clock()
        if peer.client is not None:
            self.refusals += 1  # an API server says who it is, and nothing else
        elif isinstance(message, Ping):
            self._tell(who, Beat(message.asked, peer.heard_at, unix_time()))
        elif isinstance(message, Do):
            self._commands.extend((peer.name, command) for command in message.commands)
        else:
            peer.is_synced = False
            self._refresh(who, peer)

    def _greet(self, who: bytes, message: Hello | Subscribe) -> None:
        if message.protocol != PROTOCOL:
            why = f"this engine speaks version {PROTOCOL} of the link, the gateway {message.protocol}"
        elif isinstance(message, Subscribe) and not compare_digest(message.key.encode(), self._key.encode()):
            why = "no API server of this vLLM has that key"
        elif who not in self._peers and len(self._peers) >= MAX_PEERS:
            why = f"{MAX_PEERS} gateways listen to this engine already"
        elif isinstance(message, Subscribe):
            self._peers[who] = _Peer("", self._clock(), client=message.client)
            self._count_peers()
            return
        else:
            peer = self._peers[who] = _Peer(message.gateway[:64], self._clock())
            self._count_peers()
            self._tell(who, Greeting(message.asked, peer.heard_at, unix_time(), self._about()))
            self._refresh(who, peer)
            return
        self.refusals += 1
        self._tell(who, Refused(why))

    def _forget(self, who: bytes) -> None:
        self._peers.pop(who, None)
        self._count_peers()

    def _count_peers(self) -> None:
        self.clients = frozenset(peer.client for peer in self._peers.values() if peer.client is not None)
        self.listeners = sum(peer.client is None for peer in self._peers.values())

    def _refresh(self, who: bytes, peer: _Peer) -> None:
        """Sends the idle engine's snapshot, or the next one."""
        if (raw := self._idle_snapshot) is not None:
            peer.is_synced = self._send(who, raw)
        self.wants_snapshot |= not peer.is_synced

    def _tell(self, who: bytes, message: FromCore) -> None:
        self._send(who, encode(message))

    def _send(self, who: bytes, raw: bytes) -> bool:
        try:
            self._socket.send_multipart([who, raw], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(who)
            return False
        return True

    def _settle(self) -> None:
        """Sends the snapshot of an idle engine to gateways that wait for one, and forgets silent gateways."""
        gateways = [(who, peer) for who, peer in self._peers.items() if peer.client is None]
        if self.wants_snapshot and (raw := self._idle_snapshot) is not None:
            self.wants_snapshot = False
            for who, peer in gateways:
                if not peer.is_synced:
                    peer.is_synced = self._send(who, raw)
                    self.wants_snapshot |= not peer.is_synced
        before = self._clock() - GATEWAY_TIMEOUT_S
        for who in [who for who, peer in gateways if peer.heard_at < before]:
            self._forget(who)
