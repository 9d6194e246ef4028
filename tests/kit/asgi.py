"""Clients of an app in this process: over HTTP's client library, and bare, so that they can leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import unquote

import httpx2
import orjson
from prometheus_client.parser import text_string_to_metric_families

from rubato.frontdoor.tenants import Quota, Tenant


def tenant(name: str, *, tiers: tuple[str, ...] | None = None, admin: bool = False, **quota: Any) -> Tenant:
    """A tenant whose key is `sk-NAME`."""
    return Tenant(name, (sha256(f"sk-{name}".encode()).digest(),), tiers, Quota(**quota), admin)


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def client_of(app: Any) -> httpx2.AsyncClient:
    """A client that gets a 500 where the app fails, as it would over a socket."""
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://rubato", timeout=None)


def chunks(response: httpx2.Response | bytes) -> list[dict[str, Any]]:
    """Of a whole stream."""
    raw = response if isinstance(response, bytes) else response.content
    assert raw.endswith(b"data: [DONE]\n\n")
    return [orjson.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]


def values(page: str) -> Callable[..., float]:
    """value(name, label=..., ...) of a page of metrics, summed over the series that have these labels."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    return value


@dataclass
class Answer:
    """What a client has got. begun: it has the head."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    messages: list[Any] = field(default_factory=list)  # of ASGI
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error


async def call_asgi(
    app: Any, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, method: str = "POST",
    leaves: Callable[[Answer], Awaitable[object]] | None = None, into: Answer | None = None, **scope: Any,
) -> Answer:  # fmt: skip
    """One request without a socket, whose body comes in two parts.

    Args:
        path: as it is written, with its escapes, and maybe a query.
        leaves: the client, once this has returned.
        into: the answer to be filled, for who looks at it meanwhile.
        scope: more of ASGI's.
    """
    written, _, query = path.partition("?")
    whole = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
        "path": unquote(written), "raw_path": written.encode(), "query_string": query.encode(), "root_path": "",
        "scheme": "http", "client": ("c", 1), "server": ("s", 80), "app": app, "state": {},
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()], **scope,
    }  # fmt: skip
    parts = [body[: len(body) // 2], body[len(body) // 2 :]]
    answer, over = into or Answer(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if parts:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
        await (leaves(answer) if leaves is not None else over.wait())
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {n.decode().lower(): v.decode("latin-1") for n, v in message["headers"]}
        answer.body += message.get("body", b"")
        answer.messages.append(message)
        answer.begun.set()

    await app(whole, receive, send)
    over.set()
    return answer
