"""A trip through Envoy: Envoy learns the endpoint, sends the request there, and shows the response here."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from rubato.core.events import Event, Finished
from rubato.core.plan import KV
from rubato.core.request import Progress, Request
from rubato.fleet.relay import Ask, Carrier, Flow, Trip
from rubato.fleet.resume import NotResumableError
from rubato.fleet.upstream import Headers, Reply, UpstreamError

log = logging.getLogger(__name__)

PORTS = {"http": 80, "https": 443}


def endpoint_of(url: str) -> str:
    """Returns a server's address as the protocol has it, `ip:port`. Raises ValueError for one by name, or with a path:
    Envoy connects to this address, looks no name up, and sends each request by its own path."""
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise ValueError(f"server {url}: an endpoint picker has no servers under a path; use `rubato gateway`")
    try:
        address = ipaddress.ip_address(parts.hostname or "")
        port = parts.port or PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise ValueError(f"server {url}: give its IP address and port, such as http://10.0.0.7:8000") from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


class ObservedResponse:
    """Holds a response as Envoy shows it (`upstream.Reply`)."""

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self._parts: deque[bytes] = deque()
        self._has_ended = False
        self._news = asyncio.Event()

    def add_part(self, data: bytes, *, last: bool) -> None:
        """Adds a part of the body, which may be empty.

        Args:
            last: the body ends with it.
        """
        if data:
            self._parts.append(data)
        self._has_ended = self._has_ended or last
        self._news.set()

    async def part(self) -> bytes:
        while not self._parts and not self._has_ended:
            self._news.clear()
            await self._news.wait()
        return self._parts.popleft() if self._parts else b""

    async def pump(self, sink: Callable[[bytes], None]) -> None:
        while part := await self.part():
            sink(part)

    def pause(self) -> None:
        """Does nothing: the connection is Envoy's."""

    def resume(self) -> None: ...

    def close(self) -> None:
        self.add_part(b"", last=True)


class EnvoyClient:
    """A `relay.Client` that gets its response from Envoy."""

    flow: Flow | None = None
    direct = None

    def start(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes = b"") -> None: ...


class PickedTrip(Trip):
    """Carries a trip whose body and response pass through Envoy alone.

    `placement_known` is set when the trip is placed, or will not be; then either `endpoint` says where it goes, or
    `failed_end` why nowhere.

    Args:
        on_end: called when all its requests have ended.
    """

    def __init__(
        self, ask: Ask, requests: tuple[Request, ...], on_prompt_tokens: Callable[[int], None],
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(ask, requests, EnvoyClient(), on_prompt_tokens)
        self.endpoint = ""
        self.placement_known = asyncio.Event()
        self.response: ObservedResponse | None = None
        self._open_ids = set(self.ids)
        self._head = asyncio.Event()  # of its response, or Envoy has gone elsewhere
        self._on_end = on_end

    @property
    def answer(self) -> str:
        return self.ask.answer  # the same in each try: the servers have no link, and only Envoy knows them

    def hear(self, event: Event) -> None:
        super().hear(event)
        if type(event) is not Finished:
            return
        self._open_ids.discard(event.id)
        if self.failed_end is not None:
            self.placement_known.set()
        if not self._open_ids:
            self._on_end()

    def build_request(self, progress: Progress | None, ids: tuple[int, ...] | None = None) -> tuple[Headers, bytes]:
        if self.has_begun:
            raise NotResumableError("Envoy has sent it to a server")
        return [], b""

    def why_not_resumable(self, progress: Progress | None) -> str | None:
        return "Envoy has sent it to a server" if self.has_begun else None

    async def open(self, replica: Carrier, request: Request, kv: KV | None, *, prefills: bool) -> Reply:
        """Sets the endpoint, and returns the response once its head is there.

        Raises:
            UpstreamError: Envoy has sent the request elsewhere.
        """
        self.build_request(request.progress)
        endpoint = endpoint_of(replica.url)
        self.has_begun = True
        if not self.endpoint:
            self.endpoint = endpoint
            self.placement_known.set()
        while self.endpoint == endpoint:
            if self.response is not None:
                return self.response
            self._head.clear()
            await self._head.wait()
        raise UpstreamError("Envoy has sent it to another server")

    def break_off(self, why: str) -> None:
        log.info("request %s: %s, after its end", self.answer, why)

    # ----------------------------------------------------------------- from Envoy

    @property
    def is_open(self) -> bool:
        """Whether requests of it are in flight."""
        return bool(self._open_ids)

    def begin_response(self, status: int, headers: Headers, served_by: str) -> None:
        """Begins the response.

        Args:
            served_by: the endpoint that it comes from, if Envoy says it; from now on the request counts there.
        """
        if served_by and served_by != self.endpoint:
            log.warning("request %s was to go to %s, and Envoy sent it to %s", self.answer, self.endpoint, served_by)
            self.endpoint, self.has_begun = served_by, False
        self.response = ObservedResponse(status, headers)
        self._head.set()

    def add_part(self, data: bytes, *, last: bool) -> None:
        """Adds a part of the response's body. After the end of the requests nobody reads it any more."""
        if self.response is not None and (self.is_open or last):
            self.response.add_part(data, last=last)
