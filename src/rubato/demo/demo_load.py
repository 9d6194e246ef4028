"""The load of `rubato gateway --demo`: four tiers of requests whose rate rises above capacity and falls again.

`python -m rubato.demo.demo_load --url http://127.0.0.1:8000` offers it to a gateway, cycle after cycle.
Arrivals are Poisson, lengths log-normal; a seed gives the same requests at the same times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi

import aiohttp
import numpy as np
import orjson

from rubato.core.interfaces import LatencyModel
from rubato.core.plan import NO_BATCH, Limits
from rubato.core.request import SLO
from rubato.demo.simulated_core import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PROFILE
from rubato.latency import profiles
from rubato.measure.http_client import BenchError, list_models, v1
from rubato.workloads import prompts
from rubato.workloads.arrivals import Piecewise
from rubato.workloads.generate import make
from rubato.workloads.lengths import log_normal, mean, of
from rubato.workloads.request_kinds import Kind
from rubato.workloads.workload import Arrival

SERVERS = 4
PERIOD_S = 240.0  # one rise and fall of the rate
MIN_LOAD, MAX_LOAD = 0.4, 1.4  # times capacity, at the start of a cycle and in its middle
CYCLE_STEPS = 24  # a cycle is this many steps of constant rate
TIMEOUT_S = 600.0  # for one request
RETRY_S = 1.0  # between two looks for the server

KINDS = (
    Kind("chat", SLO(ttft=2.0, tpot=0.08), log_normal(900, 700, 3500), log_normal(160, 100, 500), share=0.40),
    Kind("code", SLO(ttft=1.0, tpot=0.06), log_normal(1500, 900, 4000), log_normal(50, 40, 200), share=0.20),
    Kind("summary", SLO(e2e=25.0), log_normal(4500, 2000, 9000), log_normal(160, 60, 350), share=0.15),
    Kind("batch", SLO(), log_normal(3000, 1500, 8000), log_normal(250, 120, 600), share=0.25),
)
STREAMED_TIERS = ("chat", "code")  # the other tiers want whole answers


def wave(period_s: float = PERIOD_S, low: float = MIN_LOAD, high: float = MAX_LOAD) -> Piecewise:
    """Poisson arrivals from `low` to `high` times some rate and back, as a cosine, in `CYCLE_STEPS` steps."""
    middles = [(step + 0.5) / CYCLE_STEPS for step in range(CYCLE_STEPS)]
    levels = tuple(low + (high - low) * (1.0 - cos(2.0 * pi * at)) / 2.0 for at in middles)
    return Piecewise(tuple(period_s * step / CYCLE_STEPS for step in range(CYCLE_STEPS)), levels, period_s)


def capacity(latency: LatencyModel, limits: Limits, kinds: Sequence[Kind] = KINDS) -> float:
    """Requests/s of this mix that one server sustains with every decode at the tightest TPOT promised.

    In a steady state a step of T seconds has λ·O·T decodes and λ·P·T prompt tokens, for λ requests/s of P prompt and O
    output tokens on average. λ is the largest for which such a step takes no longer than that TPOT, and fits.
    """
    total = sum(kind.share for kind in kinds)
    prompt = sum(kind.share * mean(of(kind.prompt)) for kind in kinds) / total
    output = sum(kind.share * mean(of(kind.output)) for kind in kinds) / total
    tightest = min(kind.slo.tpot for kind in kinds if kind.slo.tpot is not None)
    best = 0.0
    for decodes in range(1, limits.max_num_seqs):
        chunk = round(decodes * prompt / output)
        context = round(prompt + output / 2)
        shape = NO_BATCH.with_entries([(1, context)] * decodes + [(chunk, round(prompt / 2))])
        seconds = latency.step_time(shape)
        fits = decodes + chunk <= limits.max_num_batched_tokens
        if seconds > tightest or not fits or decodes * limits.blocks(context) > limits.kv_blocks:
            break
        best = decodes / (output * seconds)
    return best


def fleet_capacity(servers: int = SERVERS) -> float:
    """Requests/s that `servers` simulated servers sustain together."""
    profile = profiles.load(PROFILE)
    return servers * capacity(profile.model(), profile.limits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS))


def mean_rate(servers: int = SERVERS) -> float:
    """Requests/s offered to `servers` servers, on average over a cycle."""
    return fleet_capacity(servers) * (MIN_LOAD + MAX_LOAD) / 2


def cycle(rate: float, seed: int, number: int, period_s: float = PERIOD_S) -> tuple[Arrival, ...]:
    """Makes the requests of one cycle.

    Args:
        rate: requests/s on average.
    """
    return make(
        "demo", KINDS, rate, duration=period_s, seed=seed + number, arrivals=wave(period_s), texts=False
    ).arrivals


@dataclass(frozen=True)
class Bodies:
    """Writes request bodies for `model`. A prompt has as many bytes as tokens, and no two begin alike."""

    model: str
    text: str

    @classmethod
    def of(cls, model: str, seed: int) -> Bodies:
        return cls(model, prompts.summary(np.random.default_rng(seed), 4000).replace("\n", " "))

    def body(self, arrival: Arrival, number: int) -> bytes:
        begin = number * 131 % len(self.text)
        text = f"{number}: {self.text[begin:]}{self.text}{self.text}"[: max(1, arrival.prompt_tokens - len("user: \n"))]
        return orjson.dumps(
            {
                "model": self.model, "messages": [{"role": "user", "content": text}],
                "max_tokens": arrival.output_tokens, "stream": arrival.tier in STREAMED_TIERS,
                "service_tier": arrival.tier,
            }
        )  # fmt: skip


async def offer(url: str, rate: float, seed: int, period_s: float) -> None:
    """Offer cycle after cycle, without end. Failed and refused requests are ignored: the board shows them."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        model = await _await_model(url)
        bodies, loop, number = Bodies.of(model, seed), asyncio.get_running_loop(), 0
        begin, open_requests = loop.time(), set[asyncio.Task[None]]()
        for at_cycle in itertools.count():
            for arrival in cycle(rate, seed, at_cycle, period_s):
                await asyncio.sleep(begin + at_cycle * period_s + arrival.at - loop.time())
                task = asyncio.create_task(_send(session, f"{v1(url)}/chat/completions", bodies.body(arrival, number)))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
                number += 1


async def _await_model(url: str) -> str:
    """Wait for the server, which may start later than the load, and return its first model."""
    has_warned = False
    while True:
        try:
            return (await list_models(url)).first(url)
        except BenchError as error:
            if not has_warned:
                print(f"load: waits for a server ({error})", file=sys.stderr, flush=True)
            has_warned = True
        await asyncio.sleep(RETRY_S)


async def _send(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.post(url, data=body) as response:
            async for _ in response.content.iter_any():
                pass


async def _run(args: argparse.Namespace) -> None:
    offering = asyncio.create_task(offer(args.url, mean_rate(args.servers), args.seed, args.period))
    if args.end_with_stdin:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), offering.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await offering


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rubato.demo.demo_load", description=__doc__)
    parser.add_argument("--url", required=True, help="of the gateway, or any server that knows the tiers")
    parser.add_argument("--servers", type=int, default=SERVERS, help="simulated servers, by which the rate is chosen")
    parser.add_argument("--period", type=float, default=PERIOD_S, metavar="SECONDS", help="of one rise and fall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input does: with its parent")
    return parser


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser().parse_args()))


if __name__ == "__main__":
    main()
