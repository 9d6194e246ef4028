"""Requests simulated in a CPU second, growth with their number, memory.

Replicas of Llama-3.1-8B on an H200, inputs uniform from 1 to 8192 tokens, outputs from 1 to 2048, Poisson arrivals at
80 % of the rate at which `sarathi` attains 90 % (TTFT 1 s, TPOT 50 ms): `sarathi` with a budget of 2048 tokens, and a
policy that looks at every running request in every step. The check: the fast driver says what the plain one does.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rubato.core.clock import measured
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.core.timeline import Timeline, timelines
from rubato.experiments import Found
from rubato.latency import profiles
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.capacity import narrowed
from rubato.planning.jobs import Job
from rubato.simulation.simulate import SimulationSetup, simulate, simulate_fast

SOURCE = "ours; bars from prototypes, 14,000 to 35,000 requests/s counting and 5,500 one by one"
SECONDS = 180.0
ALONE = True

PROFILE = "llama-3.1-8b-h200"
LONGEST_IN, LONGEST_OUT = 8192, 2048
PROMISE = SLO(ttft=1.0, tpot=0.05)
LOAD, ATTAINED = 0.8, 0.9
SARATHI, LOOKING = "sarathi", "rubato.experiments._due_reading_sarathi"
BUDGET = {"budget": 2048}
ROUNDS = 8  # clocks drift
MANY = 300_000
_LENGTHS, _GAPS = 31, 32  # random streams


def jobs(small: bool) -> list[Job]:
    replicas, few, many = (2, 100, 400) if small else (20, 5_000, 20_000)
    made = [Job("same", same, (120,))]
    for seed in range(1 if small else ROUNDS):
        made += [
            Job(f"{policy} n={count} seed={seed}", speed, (policy, replicas, count, seed))
            for policy, count in ((SARATHI, few), (SARATHI, many), (LOOKING, few if small else many))
        ]
    made.append(Job("memory", memory, (replicas, many if small else MANY)))
    return made


def same(count: int) -> dict[str, int]:
    """Requests whose end differs between the fast driver and the plain one."""
    sizes, setup = lengths(count, 0), _setup(SARATHI, 2)
    plain = timelines(simulate(list(requests(sizes, 4.0, 0)), _truth(sizes), setup))
    fast = simulate_fast(requests(sizes, 4.0, 0), _truth(sizes), setup)
    return {"differ": sum(fast[line.request.id].end != line.end for line in plain)}


def speed(policy: str, replicas: int, count: int, seed: int) -> dict[str, Any]:
    """Requests simulated in a CPU second."""
    sizes = lengths(count, seed)
    truth = _truth(sizes)
    rate = LOAD * capacity(replicas)
    offered: Iterable[Request] = requests(sizes, rate, seed)
    if count < MANY:
        offered = list(offered)  # as they come from a workload; many take less memory one by one
    lines, cost = measured(lambda: simulate_fast(offered, truth, _setup(policy, replicas), times=False))
    attained = _attained(lines)
    return {
        "policy": policy, "count": count, "rate": rate, "per_second": count / cost.cpu, "attained": attained,
        "loop": loop_seconds(),
    }  # fmt: skip


def loop_seconds() -> float:
    """What a machine whose clock changes was worth at the time: CPU seconds of a million times nothing."""
    return measured(_loop)[1].cpu


def _loop() -> None:
    for _ in range(1_000_000):
        pass


def memory(replicas: int, count: int) -> dict[str, float]:
    """Bytes that the process had at most by the end of a run of so many requests."""
    speed(SARATHI, replicas, count, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    return {"bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}


@lru_cache
def capacity(replicas: int) -> float:
    """The largest rate at which `sarathi` attains its share of some minutes of requests, to 5 %."""
    sizes, setup = lengths(300 * replicas, 1), _setup(SARATHI, replicas)
    truth = _truth(sizes)

    def holds(rate: float) -> bool:
        lines = simulate_fast(requests(sizes, rate, 1), truth, setup, times=False, causes=False)
        return _attained(lines) >= ATTAINED

    return narrowed(holds, 0.5 * replicas, 8.0 * replicas, 0.05)[0]


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Input and output tokens of each request."""
    draw = np.random.default_rng([seed, _LENGTHS])
    inputs, outputs = (draw.integers(1, most + 1, count).tolist() for most in (LONGEST_IN, LONGEST_OUT))
    return list(zip(inputs, outputs, strict=True))


def requests(sizes: Sequence[tuple[int, int]], rate: float, seed: int) -> Iterator[Request]:
    at = np.cumsum(np.random.default_rng([seed, _GAPS]).exponential(1.0 / rate, len(sizes))).tolist()
    for i, (prompt, output) in enumerate(sizes):
        yield Request(f"q{i}", (Stage(prompt, PROMISE),), at[i], tier="all", sampling=Sampling(output))


def _truth(sizes: Sequence[tuple[int, int]]) -> dict[str, tuple[int]]:
    """Output tokens of each request, for the engine."""
    return {f"q{i}": (output,) for i, (_, output) in enumerate(sizes)}


def _attained(lines: Mapping[str, Timeline]) -> float:
    return sum(line.end is not None and line.end.verdict.met for line in lines.values()) / len(lines)


def _setup(policy: str, replicas: int) -> SimulationSetup:
    model, limits = _machine()
    return SimulationSetup(lambda: model, limits, policy, BUDGET, replicas=replicas, learns=False)


@lru_cache
def _machine() -> tuple[Any, Limits]:
    profile = profiles.load(PROFILE)
    length = LONGEST_IN + LONGEST_OUT
    return profile.model(), profile.limits(max_seqs=512, max_tokens=8192, max_length=length, block=16)


def found(values: Sequence[Any], small: bool) -> Found:
    runs = [v for v in values if "per_second" in v]
    counts = sorted({v["count"] for v in runs})

    def speeds(policy: str, count: int) -> list[float]:
        return [v["per_second"] for v in runs if v["policy"] == policy and v["count"] == count]

    sarathi, few = speeds(SARATHI, counts[-1]), speeds(SARATHI, counts[0])
    growth = [a / b for a, b in zip(few, sarathi, strict=True)]
    estimates = {
        "same-as-plain": Estimate.exact(next(v["differ"] for v in values if "differ" in v)),
        "sarathi-speed": over_seeds(sarathi),
        "every-request-speed": over_seeds(speeds(LOOKING, counts[0 if small else -1])),
        "growth": over_seeds(growth),
        "memory": Estimate.exact(next(v["bytes"] for v in values if "bytes" in v) / 2**30),
    }
    loop = float(np.median([v["loop"] for v in runs]))
    settings = {"profile": PROFILE, "budget": BUDGET["budget"], "load": LOAD, "counts": counts, "loop": loop}
    return Found(estimates, runs, range(len(sarathi)), "deadline", settings)


def draw(data: Sequence[Any], axes: Any) -> None:
    names = {SARATHI: "sarathi", LOOKING: "every request, every step"}
    for policy, name in names.items():
        runs = [v for v in data if v["policy"] == policy]
        axes.plot([v["count"] for v in runs], [v["per_second"] for v in runs], "o", label=name)
    axes.set_xlabel("requests in the run")
    axes.set_ylabel("requests per CPU second")
    axes.set_ylim(bottom=0)
    axes.legend()
