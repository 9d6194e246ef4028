"""Open-loop load over HTTP: every request is sent at its scheduled time, whatever became of those before it.

Latency counts from the scheduled arrival, so a server that stalls is charged for the requests that pile up meanwhile
(no coordinated omission). A client that cannot keep the schedule itself would charge the server for its own lateness:
then the run says so in `Run.problems`, and its numbers must not be used.

Works with any OpenAI-compatible server that streams; token counts are the server's usage when it sends usage with each
chunk (`continuous_usage_stats`, vLLM's name), else one token is assumed per non-empty chunk and the record says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Literal

import aiohttp
import numpy as np
import orjson
from tqdm import tqdm

from rubato import prompts
from rubato.answer import Answer, ask, told
from rubato.results import Client, Record, Run, verdict
from rubato.types import SLO, Request
from rubato.workload import Arrival, Workload

TierField = Literal["slo", "body", "tier", "none"]
BEAT = 0.02  # seconds between two looks at how late the event loop's timers fire
# Idle connections are dropped before the server does (uvicorn after 5 s): reusing one in that instant fails.
KEEP_ALIVE = 2.0
WARM = 120.0  # seconds a warm-up request may take


class BenchError(RuntimeError):
    """The run cannot begin: no server, another model, or a workload without texts."""


def delay_bound(workload: Workload) -> float:
    """How late the client itself may be (p99, seconds): 5 % of the tightest TTFT, so that its lateness decides few
    verdicts; at least 10 ms, since timers and the scheduler of a busy machine cost a few; at most 50 ms."""
    tightest = min((slo.ttft for slo in workload.tiers.values() if slo.ttft is not None), default=1.0)
    return min(0.05, max(0.01, 0.05 * tightest))


async def run(
    workload: Workload,
    base_url: str,
    model: str,
    *,
    label: str = "server",
    tier_field: TierField = "slo",
    rule: str = "deadline",
    timeout: float = 600.0,  # noqa: ASYNC109 - per request, from its scheduled arrival; not of this call
    warmup: int = 4,
    progress: bool = True,
    max_delay: float | None = None,
    api_key: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Run:
    """Offer the workload to the server at base_url (with or without "/v1") and judge what comes back by `rule`.

    tier_field: "slo" states each tier's SLO in the body (ms) and its name as service_tier, "body" only the SLO (for a
    server that has no such tiers), "tier" only the name, "none" neither (for a server that knows no SLOs).
    timeout: seconds after its scheduled arrival at which a request is given up as failed. warmup: that many short
    requests first, tiers in turn, not counted. max_delay: seconds, instead of `delay_bound`. extra: fields to add to
    each body. Raises BenchError when the run cannot begin.
    """
    url = _v1(base_url)
    bodies = [_body(a, workload.tiers[a.tier], model, tier_field, extra or {}) for a in workload.arrivals]
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
    never = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
    async with aiohttp.ClientSession(connector=connector, timeout=never, headers=headers) as session:
        await _prepare(session, url, model, workload, tier_field, warmup)
        loop = asyncio.get_running_loop()
        before, start = _cpu(), loop.time()
        with tqdm(total=len(bodies), unit="req", mininterval=0.5, disable=not progress, desc=label) as bar:
            answers, lags = await _offer(session, f"{url}/chat/completions", workload, bodies, timeout, bar)
        wall, cpu = loop.time() - start, _cpu() - before
    requests = {request.id: request for request in workload.requests()}
    records = tuple(
        _record(arrival, answer, requests[arrival.id], rule)
        for arrival, answer in zip(workload.arrivals, answers, strict=True)
    )
    client = _client(records, lags, wall, cpu, delay_bound(workload) if max_delay is None else max_delay)
    settings = {
        "base_url": base_url,
        "model": model,
        "tier_field": tier_field,
        "timeout": timeout,
        "warmup": warmup,
        "extra": dict(extra or {}),
    }
    problems = tuple(_problems(client, records, answers))
    return Run(label, workload, records, rule, client, problems, tuple(_notes(records)), settings, _versions())


def _cpu() -> float:
    spent = os.times()
    return spent.user + spent.system


def _body(arrival: Arrival, slo: SLO, model: str, tier_field: TierField, extra: Mapping[str, Any]) -> bytes:
    if not arrival.messages:
        raise BenchError(f"request {arrival.id!r} has no prompt text: this workload can only be simulated")
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": role, "content": content} for role, content in arrival.messages],
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": arrival.temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if arrival.seed is not None:
        body["seed"] = arrival.seed
    if tier_field in ("slo", "tier"):
        body["service_tier"] = arrival.tier
    if tier_field in ("slo", "body"):
        promised = (("ttft_ms", slo.ttft), ("tpot_ms", slo.tpot), ("e2e_ms", slo.e2e))
        body["slo"] = {name: value * 1000.0 for name, value in promised if value is not None}
    return orjson.dumps(body | dict(extra))


# --------------------------------------------------------------------------- before the clock starts


async def first_model(base_url: str) -> str:
    """The name of the first model that the server lists. Raises BenchError when there is no server or no list."""
    url = _v1(base_url)
    async with aiohttp.ClientSession() as session:
        names = await _models(session, url)
    if not names:
        raise BenchError(f"the server at {url} lists no models: name the one to ask for")
    return names[0]


def _v1(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1") + "/v1"


async def _models(session: aiohttp.ClientSession, url: str) -> list[str] | None:
    """The models the server lists; None if it keeps no such list. Raises BenchError when it does not answer."""
    try:
        async with asyncio.timeout(30.0), session.get(f"{url}/models") as response:
            if response.status != 200:
                return None
            listed = orjson.loads(await response.read())
            return [str(entry["id"]) for entry in listed["data"]]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BenchError(f"no OpenAI-compatible server at {url}: {told(error)}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise BenchError(f"{url}/models is not a list of models in OpenAI's shape ({told(error)})") from error


async def _prepare(
    session: aiohttp.ClientSession, url: str, model: str, workload: Workload, tier_field: TierField, warmup: int
) -> None:
    """The server answers, has the model and knows the tiers, and has run a few requests (its first steps are slow)."""
    names = await _models(session, url)
    if names is not None and model not in names:
        raise BenchError(f"the server at {url} has no model {model!r}: it has {', '.join(map(repr, names))}")
    rng = np.random.default_rng()  # unseeded: a warm-up text must not be in any cache either
    tiers = list(workload.tiers.items())
    for index in range(warmup):
        tier, slo = tiers[index % len(tiers)]
        arrival = Arrival("warm-up", 0.0, tier, "chat", 64, 16, (("user", prompts.chat(rng, 64)),))
        answer = Answer()
        start = asyncio.get_running_loop().time()
        await ask(
            session, f"{url}/chat/completions", _body(arrival, slo, model, tier_field, {}), answer, start, start + WARM
        )
        if answer.outcome == "failed":
            raise BenchError(f"a warm-up request of tier {tier!r} failed: {answer.reason}")


# --------------------------------------------------------------------------- sending


async def _offer(
    session: aiohttp.ClientSession, url: str, workload: Workload, bodies: Sequence[bytes], patience: float, bar: Any
) -> tuple[list[Answer], list[float]]:
    """Send every request at its time; the answers in the workload's order, and the event loop's lags in seconds."""
    loop = asyncio.get_running_loop()
    answers = [Answer() for _ in bodies]
    start = loop.time() + 2 * BEAT

    async def one(arrival: Arrival, body: bytes, answer: Answer) -> None:
        await ask(session, url, body, answer, start, start + arrival.at + patience)
        bar.update()

    async with _lags() as lags, asyncio.TaskGroup() as group:
        for arrival, body, answer in zip(workload.arrivals, bodies, answers, strict=True):
            wait = start + arrival.at - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(one(arrival, body, answer))
    return answers, lags


@contextlib.asynccontextmanager
async def _lags() -> AsyncIterator[list[float]]:
    """How late a timer fires, every BEAT seconds. A stalled loop is charged for each beat it slept through."""
    loop = asyncio.get_running_loop()
    lags: list[float] = []

    async def watch() -> None:
        due = loop.time()
        while True:
            due += BEAT
            await asyncio.sleep(due - loop.time())
            late = loop.time() - due
            lags.append(late)
            while late > BEAT:
                due += BEAT
                late -= BEAT
                lags.append(late)

    task = asyncio.create_task(watch())
    try:
        yield lags
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# --------------------------------------------------------------------------- afterwards


def _record(arrival: Arrival, answer: Answer, request: Request, rule: str) -> Record:
    return Record(
        id=arrival.id,
        tier=arrival.tier,
        app=arrival.app,
        at=arrival.at,
        outcome=answer.outcome,
        verdict=verdict(request, answer.times, answer.tokens, answer.outcome, rule),
        asked=arrival.output_tokens,
        output=max(answer.total, answer.tokens[-1] if answer.tokens else 0),
        times=tuple(answer.times),
        tokens=tuple(answer.tokens),
        sent=answer.sent,
        status=answer.status,
        reason=answer.reason,
        prompt_tokens=answer.prompt_tokens,
        counted=answer.counted,
        best_effort=answer.server is not None and answer.server.get("served") == "best_effort",
        server=answer.server,
    )


def _client(records: Sequence[Record], lags: Sequence[float], wall: float, cpu: float, bound: float) -> Client:
    delays = np.array([max(0.0, r.sent - r.at) for r in records if r.sent is not None] or [0.0])
    p50, p99 = (float(q) for q in np.quantile(delays, [0.5, 0.99]))
    lag = float(np.quantile(np.maximum(lags, 0.0), 0.99)) if lags else 0.0
    return Client(wall, cpu, p50, p99, float(delays.max()), lag, bound)


def _problems(client: Client, records: Sequence[Record], answers: Sequence[Answer]) -> list[str]:
    """Reasons not to trust this run, as sentences."""
    problems: list[str] = []
    remedy = "give the client a core of its own, lower the rate, or raise the bound if such lateness does not matter"
    for name, late in (("requests were sent late", client.send_delay_p99), ("its event loop lagged", client.lag_p99)):
        if late > client.bound:
            problems.append(
                f"the load generator could not keep its schedule: {name}, by {1000 * late:.1f} ms at p99 "
                f"(bound {1000 * client.bound:.0f} ms), which is charged to the server; {remedy}"
            )
    starved = sum(answer.fault in (errno.EMFILE, errno.ENFILE) for answer in answers)
    if starved:
        problems.append(f"the load generator ran out of file descriptors for {starved} requests: raise `ulimit -n`")
    if all(record.status is None for record in records):
        problems.append(f"no request got an answer over HTTP; the first: {records[0].reason}")
    return problems


def _notes(records: Sequence[Record]) -> list[str]:
    notes: list[str] = []
    done = [r for r in records if r.outcome == "completed"]
    guessed = sum(not r.counted for r in done)
    if guessed:
        notes.append(f"{guessed} responses had no usage per chunk: one token was assumed per non-empty chunk")
    other = sum(r.output != r.asked for r in done)
    if other:
        notes.append(f"{other} completed requests have another output length than asked for (ignore_eos not obeyed?)")
    return notes


def _versions() -> dict[str, str]:
    names = ("rubato-llm", "aiohttp", "numpy", "orjson")
    system = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    return {name: metadata.version(name) for name in names} | system
