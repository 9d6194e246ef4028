"""HTTP to one server of a fleet: bodies and streams as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import orjson

from rubato.core.server_url import connection_failure

Headers = Sequence[tuple[str, str]]
KEPT_ALIVE = 4.0  # seconds of an idle connection: below the 5 s after which uvicorn, vLLM's server, closes it
CONNECT_SECONDS = 2.0  # for a connection; a machine that is gone answers nothing
IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class UpstreamError(Exception):
    """The server cannot be reached, or the connection broke. Clients see the message: it holds no address, and nothing
    that the server has sent."""


class Reply(Protocol):
    """A response: its head, and its body in the parts that come."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Headers: ...
    async def part(self) -> bytes:
        """What has come of the body, as soon as there is something; empty at its end. Raises UpstreamError."""
        ...

    def close(self) -> None:
        """Take no more of it: the server learns that its client has left, unless the body has come to its end."""
        ...


class Upstream(Protocol):
    """One server."""

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None
    ) -> Reply:
        """Send a request; its response, once the head is there. seconds: for all of it. Raises UpstreamError."""
        ...

    async def close(self) -> None: ...


async def whole(reply: Reply) -> bytes:
    """The rest of a response's body. Raises UpstreamError."""
    raw = bytearray()
    while part := await reply.part():
        raw += part
    return bytes(raw)


def error_code(body: bytes) -> str:
    """What an error in OpenAI's shape is called, as ` (overloaded)`; empty where it has no such name. Nothing else of
    it may be logged or shown to clients: its text may quote a prompt."""
    try:
        page = orjson.loads(body)
        error = page.get("error", page)
        names = [error.get("code"), error.get("type")]
    except (ValueError, AttributeError):
        return ""
    return next((f" ({name})" for name in names if isinstance(name, str) and IDENTIFIER.fullmatch(name)), "")


class _HttpReply:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.headers.items()]

    async def part(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise UpstreamError(connection_failure(error)) from error

    def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class HttpServer:
    """A server by its base URL (`Upstream`). Opened on the running event loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None
    ) -> Reply:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 18,
            )
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            response = await self._session.request(
                method, self.url + path, headers=headers, data=body or None, timeout=timeout, allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError, ConnectionError, ValueError) as error:
            raise UpstreamError(connection_failure(error)) from error
        return _HttpReply(response)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
