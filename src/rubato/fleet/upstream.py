"""HTTP to one server of a fleet: bodies and streams as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from rubato.core.server_url import PROBE

Headers = Sequence[tuple[str, str]]
PROBE_HEADERS = ((PROBE, "1"),)  # of the gateway's own questions
MAX_ANSWER_BYTES = 64 << 20  # of an answer that does not stream
# Without a byte of a response: a request may wait in a server's queue, and an answer that does not stream is as silent
# as its generation is long.
MAX_SILENCE_S = 300.0
IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class UpstreamError(Exception):
    """Says that the server cannot be reached, or that the connection broke. Clients see the message: it holds no
    address, and nothing that the server has sent."""


class UnreachableError(UpstreamError):
    """No connection can be made: the request has not been sent."""


class BrokenError(UpstreamError):
    """The connection broke before the end of the response: the server may be gone."""


class Reply(Protocol):
    """A response: its head, and its body in the parts that come."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers: ...
    async def part(self) -> bytes:
        """Returns the next part of the body, as soon as it comes; empty at the end. Raises UpstreamError."""
        ...

    async def pump(self, sink: Callable[[bytes], None]) -> None:
        """Gives each part of the body to `sink` as it comes, until its end. Raises UpstreamError, and what `sink`
        raises."""
        ...

    def pause(self) -> None:
        """Stops reading until `resume`."""
        ...

    def resume(self) -> None: ...

    def close(self) -> None:
        """Drops the rest: the server learns that its client has left, unless the body has ended."""
        ...


class Upstream(Protocol):
    """One server."""

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None,
        is_working: Callable[[], bool] = lambda: False,
    ) -> Reply:  # fmt: skip
        """Sends a request, and returns the response once its head is there.

        Args:
            method: of HTTP.
            path: with the query.
            headers: further ones.
            body: its bytes.
            seconds: limit on the whole exchange; None: none.
            is_working: whether the server is known to work on the request, so that its silence is no failure.

        Raises:
            UpstreamError: the exchange failed, or nothing came for MAX_SILENCE_S; also raised by the reply.
        """
        ...

    async def close(self) -> None: ...


async def ask_health(server: Upstream, seconds: float) -> int:
    """Returns the status of a server's /health. Raises UpstreamError."""
    reply = await server.open("GET", "/health", PROBE_HEADERS, b"", seconds=seconds)
    reply.close()
    return reply.status


async def read_all(reply: Reply, max_bytes: int | None = None) -> bytes:
    """Returns the rest of a response's body. Raises UpstreamError, also for a body longer than `max_bytes` (default:
    MAX_ANSWER_BYTES)."""
    raw, max_bytes = bytearray(), max_bytes or MAX_ANSWER_BYTES
    try:
        while part := await reply.part():
            raw += part
            if len(raw) > max_bytes:
                raise UpstreamError(f"the server's answer is longer than {max_bytes} bytes")
    finally:
        reply.close()
    return bytes(raw)


def error_code(body: bytes) -> str:
    """Returns what an error in OpenAI's shape is called, as ` (overloaded)`; empty for one without such a name. Nothing
    else of it may be logged or shown to clients: its text may quote a prompt."""
    try:
        page = orjson.loads(body)
        error = page.get("error", page)
        names = [error.get("code"), error.get("type")]
    except (ValueError, AttributeError):
        return ""
    return next((f" ({name})" for name in names if isinstance(name, str) and IDENTIFIER.fullmatch(name)), "")
