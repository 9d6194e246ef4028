"""Three tenants' open-loop load over HTTP, one of them hostile, and the probe that looks at the server each second."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.kit.asgi import values
from tests.soak.server import KEYS, Server

SHARES = {"shop": 0.4, "lab": 0.4, "hostile": 0.2}  # of the arrivals
LEVELS = (0.5, 1.0, 1.5)  # of the rate, a third of the time each
OUTPUT = 24  # tokens
LATE = 60.0  # seconds after which a request counts as hung
KEEP_ALIVE_S = 2.0  # of an idle connection: below the 5 s after which a server closes it
LIES = ({"ttft_ms": 0.001}, {"tpot_ms": 0.001}, {"ttft_ms": 0.001, "tpot_ms": 1e9, "e2e_ms": 1e9}, {"e2e_ms": 0.001})


@dataclass
class Seen:
    """What clients and the probe saw. excused: from when to when timing says nothing, and what an error may say. lies:
    a server may send what is no chunk. others: what became of requests that are no tenant's load."""

    sent: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in KEYS})
    met: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    excused: list[tuple[float, float]] = field(default_factory=list)
    may_fail: tuple[str, ...] = ()
    health: list[tuple[float, float]] = field(default_factory=list)  # when, seconds
    gaps: list[tuple[float, float]] = field(default_factory=list)
    lies: bool = False
    others: Counter[str] = field(default_factory=Counter)

    def broken(self, what: str) -> None:
        if len(self.violations) < 50:
            self.violations.append(what)

    def worst(self, of: list[tuple[float, float]]) -> float:
        """The longest that ended outside of what is excused."""
        return max((s for at, s in of if not any(a <= at and at - s <= b for a, b in self.excused)), default=0.0)


async def load(server: Server, rate: float, seconds: float, seed: int, seen: Seen, hostile: bool = True) -> None:
    """Offer requests for so long, each tenant's from a stream of its own, and wait for all that is in flight."""
    timeout = aiohttp.ClientTimeout(total=LATE)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    ) as http:
        tenants = [name for name in KEYS if hostile or name != "hostile"]
        await asyncio.gather(*(_tenant(server, http, name, rate, seconds, seed, seen) for name in tenants))


async def _tenant(
    server: Server, http: aiohttp.ClientSession, name: str, rate: float, seconds: float, seed: int, seen: Seen
) -> None:
    rng = Random(f"{name} {seed}")
    began, at, sent = time.monotonic(), 0.0, []
    while True:
        level = LEVELS[min(len(LEVELS) - 1, int(len(LEVELS) * at / seconds))]
        at += rng.expovariate(rate * level * SHARES[name])
        if at >= seconds:
            break
        body = _body(name, rng)
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        sent.append(asyncio.create_task(_ask(server, http, name, body, seen)))
    await asyncio.gather(*sent)


def _body(name: str, rng: Random) -> dict[str, Any]:
    words = " ".join(rng.choices(("time", "note", "slack", "tempo", "bar"), k=rng.randint(6, 20)))
    body: dict[str, Any] = {
        "model": "soak", "messages": [{"role": "user", "content": words}], "max_tokens": OUTPUT, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    if name == "lab":
        body["slo"] = {"ttft_ms": 2000, "tpot_ms": 200}
    if name == "hostile":
        body["slo"] = {**rng.choice(LIES), "on_decline": rng.choice(["refuse", "best_effort"])}
        body["n"] = rng.choice([1, 1, 1, 4])
    return body


async def _ask(server: Server, http: aiohttp.ClientSession, name: str, body: dict[str, Any], seen: Seen) -> None:
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    seen.sent[name] += 1
    try:
        async with http.post(f"{server.url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                _refused(name, str(answer.status), await answer.text(), seen)
                return
            if answer.content_type != "text/event-stream":
                seen.outcomes[name]["no stream"] += 1
                if not seen.lies:
                    seen.broken(f"{name}: a stream was asked for, and {answer.content_type} came")
                return
            await _read(name, answer, seen)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        seen.outcomes[name]["no answer"] += 1
        seen.broken(f"{name}: no answer: {type(error).__name__} {error}")


def _refused(name: str, status: str, text: str, seen: Seen) -> None:
    """status: of the answer, or the code of the error that ends a stream which has begun."""
    seen.outcomes[name][status] += 1
    refused = status == "429" or status.startswith("rejected-") or "rejected-shutting-down" in text
    if not refused and not any(word in text for word in seen.may_fail):
        seen.broken(f"{name}: {status} {text[:300]}")


async def _read(name: str, answer: aiohttp.ClientResponse, seen: Seen) -> None:
    last, done, report = None, False, None
    async for line in _lines(answer):
        if not line.startswith(b"data:"):
            continue
        now = time.monotonic()
        if last is not None and name != "hostile":
            seen.gaps.append((now, now - last))
        last = now
        if line[5:].strip() == b"[DONE]":
            done = True
            continue
        try:
            chunk = json.loads(line[5:])
        except ValueError:
            if not seen.lies:
                seen.broken(f"{name}: a chunk is no JSON: {line[:100]!r}")
            continue
        if "error" in chunk:
            _refused(name, str(chunk["error"].get("code")), chunk["error"]["message"], seen)
            return
        report = chunk.get("rubato") or report
    if not done:
        seen.broken(f"{name}: the stream {answer.headers.get('x-request-id')} ended without [DONE]")
    seen.outcomes[name]["completed"] += done
    seen.met[name] += bool(report and report["met"])


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """By any of the three line ends of server-sent events."""
    rest = b""
    async for data in answer.content.iter_any():
        *lines, rest = re.split(rb"\r\n|\n|\r(?!\Z)", rest + data)
        for line in lines:
            yield line
    yield rest.strip()


# --------------------------------------------------------------------------- from outside


async def metrics(server: Server, http: aiohttp.ClientSession) -> Callable[..., float]:
    """`values` of a scrape."""
    async with http.get(f"{server.url}/metrics") as answer:
        return values(await answer.text())


async def probe(server: Server, seen: Seen) -> None:
    """Each second, until cancelled: the books agree, /health answers, memory."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LATE)) as http:
        while True:
            began = time.monotonic()
            try:
                async with http.get(f"{server.url}/health") as answer:
                    if answer.status != 200:
                        seen.broken(f"/health says {answer.status}")
                seen.health.append((time.monotonic(), time.monotonic() - began))
                value = await metrics(server, http)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                seen.broken(f"/health or /metrics: {type(error).__name__} {error}")
            else:
                offered, ended = value("rubato_requests_offered_total"), value("rubato_requests_finished_total")
                if not ended <= offered <= ended + value("rubato_requests_in_flight"):  # it counts what has begun
                    seen.broken(f"offered {offered}, finished {ended}, in flight {value('rubato_requests_in_flight')}")
            for process in (server, *server.beside):
                process.look_at_memory()
            await asyncio.sleep(max(0.0, began + 1.0 - time.monotonic()))
