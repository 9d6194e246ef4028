"""A server to which Envoy sends the requests: what a `ServerHost` would open there, Envoy opens, and shows here.

The host places, counts and judges as it does for the gateway. In the place of the connection is a call that tells the
picker where the request goes, and then waits for what Envoy shows of the response (`serving.epp`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from rubato.core.events import Event, Finished
from rubato.core.request import Progress, Request
from rubato.fleet.call import CannotContinueError
from rubato.fleet.upstream import Headers, Reply, Upstream, UpstreamError

log = logging.getLogger(__name__)

ID = "x-request-id"  # the header by which a server finds the call that its host opens; it goes nowhere else
PORTS = {"http": 80, "https": 443}


def endpoint_of(url: str) -> str:
    """A server's address as the protocol has it, `ip:port`. Raises ValueError for one by name: Envoy connects to what
    it is told, and looks no name up."""
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
        port = parts.port or PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError(f"server {url}: give its IP address and port, such as http://10.0.0.7:8000") from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class Shown:
    """A response as Envoy shows it (`upstream.Reply`). status, headers: of its head."""

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._parts: deque[bytes] = deque()
        self._ended = False
        self._news = asyncio.Event()

    def shows(self, data: bytes, *, last: bool) -> None:
        """A part of its body, maybe empty. last: no more comes."""
        if data:
            self._parts.append(data)
        self._ended = self._ended or last
        self._news.set()

    async def part(self) -> bytes:
        while not self._parts and not self._ended:
            self._news.clear()
            await self._news.wait()
        return self._parts.popleft() if self._parts else b""

    def close(self) -> None:
        """The connection is Envoy's."""


class EnvoyCall:
    """A `fleet.call.Call` whose body and response pass through Envoy alone.

    requests: a choice each; choices: of one prompt. counted: told how many tokens the prompt has, once that is known.
    over: told when all its requests have ended. settled: set when it is placed, or will not be; then either
    `endpoint` says where it goes, or `failed` why nowhere.
    """

    def __init__(
        self, path: str, answer: str, requests: tuple[Request, ...], choices: int, streams: bool,
        counted: Callable[[int], None], over: Callable[[], None],
    ) -> None:  # fmt: skip
        self.path = self.target = path
        self.tries = 0
        self.answer = answer  # the same in each: the servers have no link, and only Envoy knows them
        self.ids = tuple([request.id for request in requests])
        self.choices = choices
        self.streams = streams
        self.begun = False  # Envoy has been told: it cannot go elsewhere
        self.streamed = 0
        self.endpoint = ""
        self.settled = asyncio.Event()
        self.failed: Finished | None = None  # the first end that is no completion
        self.shown: Shown | None = None
        self._left = set(self.ids)
        self._news = asyncio.Event()
        self.counted = counted
        self._over = over

    # ----------------------------------------------------------------- from the cluster and the host

    def hear(self, event: Event) -> None:
        """Of one of its requests."""
        if type(event) is not Finished:
            return
        self._left.discard(event.id)
        if event.outcome != "completed" and self.failed is None:
            self.failed = event
            self.settled.set()
        if not self._left:
            self._over()

    def sent(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        if self.begun:
            self.so_far()
        return [(ID, self.answer)], b""

    def so_far(self) -> str:
        raise CannotContinueError("Envoy has sent it to a server")

    async def opened(self, endpoint: str) -> Reply:
        """Tell where it goes; the response, once its head is there. Raises UpstreamError if Envoy went elsewhere."""
        self.begun = True
        if not self.endpoint:
            self.endpoint = endpoint
            self.settled.set()
        while self.endpoint == endpoint:
            if self.shown is not None:
                return self.shown
            self._news.clear()
            await self._news.wait()
        raise UpstreamError("Envoy has sent it to another server")

    async def begin(self, status: int, headers: Headers) -> None:
        """Its client has it by Envoy, as all that follows."""

    async def write(self, data: bytes) -> None: ...

    async def end(self, rest: bytes) -> None: ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None: ...

    def breaks(self, why: str) -> None:
        log.info("request %s: %s, after its end", self.answer, why)

    # ----------------------------------------------------------------- from Envoy

    @property
    def open(self) -> bool:
        """Whether requests of it are in flight."""
        return bool(self._left)

    def head(self, status: int, headers: Headers, served: str) -> None:
        """The response has begun. served: the endpoint that it comes from, where Envoy says it: from now on the
        request counts there."""
        if served and served != self.endpoint:
            log.warning("request %s was to go to %s, and Envoy sent it to %s", self.answer, self.endpoint, served)
            self.endpoint, self.begun = served, False
        self.shown = Shown(status, headers)
        self._news.set()

    def shows(self, data: bytes, *, last: bool) -> None:
        """A part of the response's body; nobody reads it any more when the requests have ended."""
        if self.shown is not None and (self.open or last):
            self.shown.shows(data, last=last)


class EnvoyServer:
    """A server (`upstream.Upstream`) of this endpoint: what is asked of it itself goes to `server`; the calls of
    `calls`, by answer, go by Envoy."""

    def __init__(self, server: Upstream, endpoint: str, calls: Mapping[str, EnvoyCall]) -> None:
        self._server = server
        self._endpoint = endpoint
        self._calls = calls

    async def open(
        self, method: str, path: str, headers: Headers, body: bytes, *, seconds: float | None = None
    ) -> Reply:
        if method == "POST" and (call := self._calls.get(dict(headers).get(ID, ""))) is not None:
            return await call.opened(self._endpoint)
        return await self._server.open(method, path, headers, body, seconds=seconds)

    async def close(self) -> None:
        await self._server.close()
