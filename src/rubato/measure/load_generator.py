"""Load over HTTP: open loop, unless the workload says otherwise; every request is sent at its scheduled time, whatever
became of those before it.

Latency counts from the scheduled arrival, so a server that stalls is charged for the requests that pile up meanwhile
(no coordinated omission). In a closed loop (`Workload.concurrency`), and for requests that go on from others
(`Arrival.after`), it counts from the instant at which a request was to be offered, which comes later where the server
is slow: while it stalls it is offered less, and the requests that users would have sent meanwhile are in no percentile
and no attainment. So a closed loop tells what a server does for so many users who wait for it, such as its throughput;
not what arrival rate it sustains, nor how long those wait who come whatever others do.

A client that cannot keep the schedule itself would charge the server for its own lateness: then the run says so in
`BenchResult.problems`, and its numbers must not be used.

Works with any OpenAI-compatible server that streams (`http_client`); token counts are the server's usage when it sends
usage with each chunk (`continuous_usage_stats`, vLLM's name). With usage at the end only, its tokens are spread evenly
over the chunks, which leaves mean TPOT exact; without any, one token is assumed per non-empty chunk. The run says
which.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any

import aiohttp
import numpy as np

from rubato.core.clock import process_cpu_time, watch_timers
from rubato.core.request import Request
from rubato.core.slo import judge
from rubato.measure.goodput import SLOBounds
from rubato.measure.http_client import AnswerStream, BenchError, Endpoint, authorised, list_models, stream_request, v1
from rubato.measure.progress_bar import ProgressBar
from rubato.measure.records import BenchResult, ClientLoad, Record, came, not_offered, stages, versions
from rubato.workloads import Arrival, Workload, prompts
from rubato.workloads.offering import Offering

TIMER_CHECK_S = 0.02  # seconds between two looks at how late the event loop's timers fire
# Idle connections are dropped before the server does (uvicorn after 5 s): reusing one in that instant fails.
KEEP_ALIVE_S = 2.0
SESSION_HEADER = "x-session-id"
WARM_UP_TIMEOUT_S = 120.0  # seconds a warm-up request may take


def delay_bound(workload: Workload) -> float:
    """How late the client itself may be (p99, seconds): 5 % of the tightest TTFT, so that its lateness decides few
    verdicts; at least 10 ms, since timers and the scheduler of a busy machine cost a few; at most 50 ms."""
    promised = {*workload.tiers.values(), *(workload.slo(a) for a in workload.arrivals)}
    tightest = min((slo.ttft for slo in promised if slo.ttft is not None), default=1.0)
    return min(0.05, max(0.01, 0.05 * tightest))


async def run(
    workload: Workload,
    target: Endpoint,
    *,
    label: str = "server",
    slo_rule: str = "deadline",
    timeout: float = 600.0,  # noqa: ASYNC109 - per request, from its scheduled arrival; not of this call
    warmup: int = 4,
    progress: bool = True,
    max_delay: float | None = None,
    goodput: SLOBounds | None = None,
) -> BenchResult:
    """Offers the workload to the server and judges what comes back by `slo_rule`.

    Args:
        timeout: seconds after its scheduled arrival at which a request is given up as failed.
        warmup: how many short requests are sent first, tiers in turn, not counted.
        max_delay: in seconds, instead of `delay_bound`.
        goodput: bounds beside the tiers' SLOs.

    Raises:
        BenchError: the run cannot begin.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    never = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
    headers = {"content-type": "application/json"} | authorised(target.api_key, target.headers)
    async with aiohttp.ClientSession(connector=connector, timeout=never, headers=headers) as session:
        calls, offering = _Calls(session, target, workload, timeout), workload.offering()
        await _prepare(session, target, workload, warmup)
        loop = asyncio.get_running_loop()
        before, start = process_cpu_time(), loop.time()
        with ProgressBar(
            total=len(workload.arrivals), unit="request", mininterval=0.5, disable=not progress, desc=label
        ) as bar:
            calls.start = loop.time() + 2 * TIMER_CHECK_S
            async with _lags() as lags:
                await (_offer(calls, workload, bar) if offering is None else _offer_in_turn(calls, offering, bar))
        wall, cpu = loop.time() - start, process_cpu_time() - before
    answers, dropped = calls.answers, {} if offering is None else offering.dropped
    offered = zip(workload.requests(), workload.arrivals, answers, strict=True)
    records = tuple(
        not_offered(arrival, *dropped[arrival.id], slo_rule)
        if arrival.id in dropped
        else _record(calls.came.get(request.id, request), arrival, answer, slo_rule)
        for request, arrival, answer in offered
    )
    client = _client(records, lags, wall, cpu, delay_bound(workload) if max_delay is None else max_delay)
    return BenchResult(
        label,
        workload,
        records,
        slo_rule,
        client,
        problems=tuple(_problems(client, records, answers)),
        notes=tuple(_notes(records, answers)),
        settings=target.described() | {"timeout": timeout, "warmup": warmup},
        versions=versions("aiohttp", "numpy", "orjson"),
        goodput=goodput,
        paced_seconds=None if offering is None else calls.last_end,
    )


# --------------------------------------------------------------------------- before the clock starts


async def _prepare(session: aiohttp.ClientSession, target: Endpoint, workload: Workload, warmup: int) -> None:
    """The server answers, has the model and knows the tiers, and has run a few requests (its first steps are slow)."""
    listed = await list_models(target.base_url, target.api_key, target.headers)
    if listed.models is not None and target.model not in listed.models:
        known = ", ".join(map(repr, listed.models))
        raise BenchError(f"the server at {v1(target.base_url)} has no model {target.model!r}: it has {known}")
    rng = np.random.default_rng()  # unseeded: a warm-up text must not be in any cache either
    tiers = list(workload.tiers.items())
    for index in range(warmup):
        tier, slo = tiers[index % len(tiers)]
        arrival = Arrival("warm-up", 0.0, tier, "chat", 64, 16, (("user", prompts.chat(rng, 64)),))
        answer = AnswerStream()
        start = asyncio.get_running_loop().time()
        await stream_request(session, target.url, target.body(arrival, slo), answer, start, start + WARM_UP_TIMEOUT_S)
        if answer.outcome == "failed":
            raise BenchError(f"a warm-up request of tier {tier!r} failed: {answer.reason}")


# --------------------------------------------------------------------------- sending


class _Calls:
    """The requests of one workload to one server. start: of the workload, by the loop's clock; came: requests as they
    were offered, where that follows from the run; last_end: of those that have ended, in seconds from the start."""

    def __init__(self, session: aiohttp.ClientSession, target: Endpoint, load: Workload, patience: float) -> None:
        """Raises BenchError for a request that cannot be written."""
        self.answers = [AnswerStream() for _ in load.arrivals]
        self.start = 0.0
        self.came: dict[str, Request] = {}
        self.last_end = 0.0
        self._session, self._target, self._load, self._patience = session, target, load, patience
        self._bodies = [target.body(a, load.slo(a)) for a in load.arrivals]

    def now(self) -> float:
        """Seconds from the workload's start."""
        return asyncio.get_running_loop().time() - self.start

    async def call(self, place: int, at: float, bar: Any) -> None:
        """Send the request that stands at `place`, which was to come at `at`, and follow it to its end."""
        give_up = self.start + at + self._patience
        of = self._load.arrivals[place].session
        await stream_request(
            self._session, self._target.url, self._bodies[place], self.answers[place], self.start, give_up,
            {SESSION_HEADER: of} if of else None,
        )  # fmt: skip
        self.last_end = self.now()
        bar.update()

    def restate(self, place: int, request: Request) -> None:
        """With what remains of its session, which is known when it is offered."""
        self.came[request.id] = request
        arrival, slo = self._load.arrivals[place], request.stages[0].slo
        if slo != self._load.slo(arrival):
            self._bodies[place] = self._target.body(arrival, slo)


async def _offer(calls: _Calls, workload: Workload, bar: Any) -> None:
    """Send every request at its time."""
    async with asyncio.TaskGroup() as group:
        for place, arrival in enumerate(workload.arrivals):
            wait = arrival.at - calls.now()
            if wait > 0:
                await asyncio.sleep(wait)
            group.create_task(calls.call(place, arrival.at, bar))


async def _offer_in_turn(calls: _Calls, offering: Offering, bar: Any) -> None:
    """Send requests as ends of others say."""
    places = {request.id: place for place, request in enumerate(offering.requests)}
    some_end = asyncio.Event()

    async def one(place: int, request: Request) -> None:
        await calls.call(place, request.arrival, bar)
        offering.record_end(request.id, calls.now(), calls.answers[place].outcome)
        some_end.set()

    async with asyncio.TaskGroup() as group:
        while offering.remaining:
            for request in offering.due(calls.now()):
                calls.restate(places[request.id], request)
                group.create_task(one(places[request.id], request))
            some_end.clear()
            with contextlib.suppress(TimeoutError):
                next_at = None if offering.next_at == inf else calls.start + offering.next_at
                async with asyncio.timeout_at(next_at):
                    await some_end.wait()


@contextlib.asynccontextmanager
async def _lags() -> AsyncIterator[list[float]]:
    """How late a timer fires, every TIMER_CHECK_S seconds."""
    lags: list[float] = []
    task = asyncio.create_task(watch_timers(TIMER_CHECK_S, lags.append))
    try:
        yield lags
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# --------------------------------------------------------------------------- afterwards


def _record(request: Request, arrival: Arrival, answer: AnswerStream, slo_rule: str) -> Record:
    arrival = came(arrival, request.arrival)
    return Record(
        id=arrival.id,
        tier=arrival.tier,
        app=arrival.app,
        at=arrival.at,
        outcome=answer.outcome,
        verdict=judge(request, stages(arrival, answer.times, answer.tokens), answer.outcome, slo_rule),
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


def _client(records: Sequence[Record], lags: Sequence[float], wall: float, cpu: float, bound: float) -> ClientLoad:
    delays = np.array([max(0.0, r.sent - r.at) for r in records if r.sent is not None] or [0.0])
    p50, p99 = (float(q) for q in np.quantile(delays, [0.5, 0.99]))
    lag = float(np.quantile(lags, 0.99)) if lags else 0.0
    return ClientLoad(wall, cpu, p50, p99, float(delays.max()), lag, bound)


def _problems(client: ClientLoad, records: Sequence[Record], answers: Sequence[AnswerStream]) -> list[str]:
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


def _notes(records: Sequence[Record], answers: Sequence[AnswerStream]) -> list[str]:
    notes: list[str] = []
    completed = [(r, a) for r, a in zip(records, answers, strict=True) if r.outcome == "completed"]
    spread = sum(not r.counted and a.total > 0 for r, a in completed)
    guessed = sum(not r.counted and a.total == 0 for r, a in completed)
    if spread:
        notes.append(f"{spread} responses had usage at the end only: its tokens were spread evenly over their chunks")
    if guessed:
        notes.append(f"{guessed} responses had no usage: one token was assumed per non-empty chunk")
    other = sum(r.output != r.asked for r, _ in completed)
    if other:
        notes.append(f"{other} completed requests have another output length than asked for (ignore_eos not obeyed?)")
    return notes
