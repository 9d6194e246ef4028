"""What peers without the token, or with messages that are none, make of an engine core's end of the link: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rubato.core.clock import WallClock
from rubato.core.plan import Limits
from rubato.engines.vllm import core_link
from rubato.engines.vllm.core_link import CoreLink
from rubato.engines.vllm.settings import LinkSettings
from rubato.fleet.remote_host import LinkSession
from rubato.fleet.server_link import ZmqLink
from rubato.latency.affine import Model
from rubato.wire.link_keys import MAX_COMMAND_BYTES, TOKEN_ENV, protect_gateway
from rubato.wire.messages import (
    PROTOCOL,
    CoreAbout,
    Greeting,
    Hello,
    Refused,
    Report,
    Snapshot,
    ToCore,
    decode_from_core,
    decode_to_core,
    encode,
)

LISTS = b"[" + b"[]," * 300_000 + b"[]]"  # 0.9 MB, a million objects
HELLO = encode(Hello(PROTOCOL, "g"))
ABOUT = CoreAbout("edf", (), Limits(8, 512, 1024, 100, 16), Model().to_dict(), None, "m", "0", "0")


class Parsed:
    """Counts the bytes that a core parses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        monkeypatch.setattr(core_link, "decode_to_core", self)

    def __call__(self, raw: bytes) -> ToCore:
        self.bytes += len(raw)
        return decode_to_core(raw)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


@pytest.fixture
def peers() -> Iterator[Callable[..., Any]]:
    """Makes sockets of peers, with the token of the environment or without one."""
    context = zmq.Context()

    def peer(link: CoreLink, *, token: bool = True) -> Any:
        made = context.socket(zmq.DEALER)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.LINGER, 0)
        if token:
            protect_gateway(made)
        made.connect(f"tcp://127.0.0.1:{link.port}")
        return made

    yield peer
    context.destroy(linger=0)


def started() -> CoreLink:
    link = CoreLink(LinkSettings())
    link.snapshot(Snapshot(0, 0.0, 100), idle=True)
    link.start(lambda: ABOUT, time.monotonic)
    return link


def heard(peer: Any, kind: type) -> Any:
    while peer.poll(5000):
        if isinstance(message := decode_from_core(peer.recv()), kind):
            return message
    raise AssertionError(f"nothing came of kind {kind!r}")


def wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(500):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def test_link_strangers_cost_no_parsing_no_log_and_no_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parsed: Parsed, peers: Callable[..., Any]
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    link = started()
    caplog.set_level(logging.DEBUG)
    gateway = peers(link)
    gateway.send(HELLO)
    heard(gateway, Snapshot)
    link.end_idle()
    own = parsed.bytes
    stranger = peers(link, token=False)
    monkeypatch.setenv(TOKEN_ENV, "guess")
    guesser = peers(link)
    with socket.create_connection(("127.0.0.1", link.port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100_000)
        for peer in (stranger, guesser):
            with contextlib.suppress(zmq.Again):  # a peer that was refused already has nowhere to send to
                peer.send(LISTS, zmq.NOBLOCK)
                for _ in range(1000):
                    peer.send_multipart([b"a", b"b"], zmq.NOBLOCK)
                    peer.send(HELLO, zmq.NOBLOCK)
                peer.send(b"x" * (2 * MAX_COMMAND_BYTES), zmq.NOBLOCK)
        for number in range(1, 501):  # a step has to hand over, and finds room
            link.report(Report(number, 0.0, 100))
            assert heard(gateway, Report).n == number
        wait_for(lambda: link.refusals >= 3)
    assert (parsed.bytes - own, caplog.records, link.commands()) == (0, [], [])
    link.close()


def test_link_gateway_without_the_cores_token_learns_that_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    link = started()

    async def greet() -> None:
        gateway = ZmqLink(f"tcp://127.0.0.1:{link.port}")
        session = LinkSession("r0", gateway, WallClock(), is_idle=bool, apply=print, lose=print)
        try:
            await session.greet("http://server")
        finally:
            gateway.close()

    for token in ("guess", ""):
        monkeypatch.setenv(TOKEN_ENV, token)
        with pytest.raises(ValueError, match=f"http://server does not let this gateway in: set {TOKEN_ENV}"):
            asyncio.run(greet())
    link.close()


def test_link_without_a_token_is_bounded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parsed: Parsed, peers: Callable[..., Any]
) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    monkeypatch.setattr(core_link, "MAX_PEERS", 2)
    link = started()
    peers(link).send(b"x" * (MAX_COMMAND_BYTES + 1))
    local = peers(link)
    local.send_multipart([b"a", b"b", b"c"])
    local.send(encode(Hello(PROTOCOL + 1)))
    wait_for(lambda: link.refusals >= 2)
    assert parsed.bytes < 100
    gateways = [peers(link) for _ in range(3)]
    for gateway in gateways[:2]:
        gateway.send(HELLO)
        heard(gateway, Greeting)
    gateways[2].send(HELLO)
    assert "2 gateways listen" in heard(gateways[2], Refused).why
    assert link.listeners == 2
    assert caplog.records == []
    link.close()


KINDS = st.sampled_from(["hello", "ping", "resync", "do", "report", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=5), some, max_size=3),
)
FIELDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("protocol", "gateway", "asked", "commands"), VALUES) | {"kind": KINDS | VALUES}
)
OURS = st.fixed_dictionaries(
    {"kind": KINDS, "protocol": st.just(PROTOCOL)}, optional={"commands": VALUES, "asked": VALUES}
)
RAW = st.binary(max_size=50) | st.one_of(FIELDS, OURS, VALUES).map(lambda value: json.dumps(value).encode())


@given(
    st.lists(st.lists(RAW, max_size=4).map(lambda frames: [b"known", *frames]) | st.lists(RAW, max_size=4), max_size=5)
)
def test_link_hears_any_frames_without_an_error(messages: list[list[bytes]]) -> None:
    link = CoreLink(LinkSettings())
    link._about, link._clock = lambda: ABOUT, time.monotonic
    try:
        for frames in messages:
            link._peers[b"known"] = core_link._Peer("g", 0.0)
            before = link.refusals, len(link._commands)
            link._hear(frames)
            assert link.refusals >= before[0]
            assert len(frames) == 2 or (link.refusals, len(link._commands)) == (before[0] + 1, before[1])
    finally:
        link.close()
