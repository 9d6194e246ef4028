"""HTTP that is legal and that our own clients never send: raw bytes to a server, and to a gateway before it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.processes.conftest import Server, servers

TIMEOUT_S = 30.0
OFFERS = {
    "h2c": "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\nUpgrade: h2c\r\n",
    "websocket": "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
}
EXPECT = "Expect: 100-continue\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    with servers(tmp_path_factory.mktemp("http")) as start:
        server = start(latency={"kind": "affine", "k": [0.0, 0.0], "b": [0.001, 0.0]})
        gateway = start(command="gateway", servers=[server.url])
        yield {"serve": server, "gateway": gateway}
        for one in (gateway, server):
            assert one.end() == 0
            assert "uvicorn" not in one.log


@pytest.fixture(params=["serve", "gateway"])
def client(request: pytest.FixtureRequest, both: dict[str, Server]) -> Iterator[socket.socket]:
    host, port = both[request.param].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def request(headers: str = "", *, stream: bool = False, framing: str = "length", version: str = "1.1") -> list[bytes]:
    """A request's head, and its body in parts."""
    message = {"role": "user", "content": "hi"}
    body = json.dumps({"model": "simulated", "messages": [message], "max_tokens": 3, "stream": stream}).encode()
    length = "Transfer-Encoding: chunked" if framing == "chunked" else f"Content-Length: {len(body)}"
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\n{headers}{length}\r\n\r\n"
    parts = [body[:20], body[20:]]
    if framing == "chunked":
        parts = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]
    return [head.encode(), *parts]


def send(client: socket.socket, parts: list[bytes], *, together: bool = False) -> None:
    if together:
        parts = [b"".join(parts)]
    client.sendall(parts[0])
    for part in parts[1:]:
        time.sleep(0.01)  # else the kernel may make one segment of two
        client.sendall(part)


def check_answer(client: socket.socket, stream: bool) -> None:
    """One answer of a connection that is kept."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert (answer.status, answer.getheader("upgrade"), answer.getheader("connection")) == (200, None, None)
    unbuffered = (answer.getheader("cache-control"), answer.getheader("x-accel-buffering"))
    assert unbuffered == (("no-cache", "no") if stream else (None, None))
    check_body(answer.read(), stream)


def check_body(body: bytes, stream: bool) -> None:
    if stream:
        events = body.split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""]
        bodies = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    else:
        bodies = [json.loads(body)]
    assert [body["choices"][0]["finish_reason"] for body in bodies][-1] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("together", [True, False], ids=["one segment", "segments"])
def test_an_offer_to_upgrade_is_ignored_and_its_request_answered(
    client: socket.socket, together: bool, framing: str, offer: str, stream: bool
) -> None:
    for headers in (OFFERS[offer], OFFERS[offer], ""):
        send(client, request(headers, stream=stream, framing=framing), together=together)
        check_answer(client, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n", OFFERS["h2c"], EXPECT])
def test_a_client_of_http_1_0_gets_no_chunks_and_an_answer_that_ends_with_the_connection(
    client: socket.socket, headers: str, stream: bool
) -> None:
    send(client, request(headers, stream=stream, version="1.0"))
    with client.makefile("rb") as file:
        head, _, body = file.read().partition(b"\r\n\r\n")
    status, *lines = head.lower().split(b"\r\n")
    assert status == b"http/1.1 200 ok"
    assert b"connection: close" in lines
    assert not any(line.startswith(b"transfer-encoding") for line in lines)
    assert any(line == b"content-length: %d" % len(body) for line in lines) is not stream
    check_body(body, stream)


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("offer", ["", OFFERS["h2c"]], ids=["alone", "with an offer"])
def test_a_client_that_expects_100_continue_is_told_to_send_its_body(
    client: socket.socket, offer: str, framing: str
) -> None:
    for stream in (False, True):
        head, *parts = request(EXPECT + offer, stream=stream, framing=framing)
        client.sendall(head)
        assert client.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        send(client, parts)
        check_answer(client, stream)


def test_a_client_that_expects_100_continue_for_too_large_a_body_is_refused_at_once(client: socket.socket) -> None:
    head = request(EXPECT)[0].replace(b"Content-Length: ", b"Content-Length: 9999999")
    client.sendall(head)
    assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 413"
