"""Requests simulated in a CPU second, growth with their number, memory.

Replicas of Llama-3.1-8B on an H200, inputs uniform from 1 to 8192 tokens, outputs from 1 to 2048, Poisson arrivals at
80 % of the rate at which `sarathi` attains 90 % (TTFT 1 s, TPOT 50 ms): `sarathi` with a budget of 2048 tokens, and a
policy that looks at every running request in every step. The check: the two drivers say the same.

The same load with more of what a replica can do (`CASES`): roles and requests handed on without KV; prefill and decode
replicas, KV moved between them at 50 GB/s; chains of drafted tokens, and trees, by a drafter of 1B parameters that is
right with probability 0.7; a prefix cache, where the first half of each prompt is the beginning of one of 64 texts.
Each is offered what it holds without queues that grow, 80 % of sarathi's capacity, but 60 % under `distserve` (beyond,
TPOT grows in its decode replicas) and `vllm_spec` (TTFT grows: drafts take the budget that prompts need). These runs
are timed with the making of their requests and records (`simulate`). They are short, too short to fill the
replicas, as where each step is walked they take longest.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from experiments import Found
from experiments._timelines import timelines
from rubato.core.clock import measure_cost
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.core.timeline import Timeline
from rubato.engines.simulated import FREE_LINK, Drafter, KVLink, drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.capacity import narrowed
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate, simulate_events, simulate_requests
from rubato.workloads import Arrival, Workload
from rubato.workloads.workload import HASH_BLOCK_TOKENS

SOURCE = "ours; bars from prototypes, 14,000 to 35,000 requests/s counting and 5,500 one by one"
SECONDS = 430.0
ALONE = True

PROFILE = "llama-3.1-8b-h200@vllm-2024"
LONGEST_IN, LONGEST_OUT = 8192, 2048
PROMISE = SLO(ttft=1.0, tpot=0.05)
LOAD, ATTAINED = 0.8, 0.9
SARATHI, LOOKING = "sarathi", "experiments._due_reading_sarathi"
BUDGET = {"budget": 2048}
ROUNDS = 8  # clocks drift
MANY, MANY_ROUNDS = 300_000, 3
_LENGTHS, _GAPS, _TEXTS = 31, 32, 33  # random streams


@dataclass(frozen=True)
class Case:
    """What the load is simulated with. load: share of sarathi's capacity that is offered; count: requests of a run;
    drafter: a profile's name; texts: how many different beginnings prompts have, 0 for no token ids."""

    says: str
    policy: str
    count: int
    settings: Mapping[str, object] = field(default_factory=dict)
    load: float = LOAD
    link: KVLink = FREE_LINK
    drafter: str = ""
    texts: int = 0


LINK = KVLink(kv_bytes=131_072, bandwidth=50e9, latency=0.001)  # the model's KV, over InfiniBand NDR
DRAFTER, ALPHA = "llama-3.2-1b-a100", 0.7
CASES = {
    "roles": Case("two kinds, hand-offs without KV", "experiments._handing_off_sarathi", 1_000, BUDGET),
    "pd": Case("prefill and decode replicas", "distserve", 1_000, load=0.6, link=LINK),
    "drafts": Case("chains of 4 drafts", "vllm_spec", 1_000, {"n": 4}, load=0.6, drafter=DRAFTER),
    "trees": Case("trees of drafts", "adaserve", 400, drafter=DRAFTER),
    "prefix": Case("prefix cache", SARATHI, 1_000, BUDGET, texts=64),
}
CASE_ROUNDS = 3


def jobs(small: bool) -> list[Job]:
    replicas, few, many = (2, 100, 400) if small else (20, 5_000, 20_000)
    rounds = 1 if small else MANY_ROUNDS
    made = [  # first: memory is the most that the process ever had
        Job(f"memory seed={seed}", long_run, (replicas, few, many if small else MANY, seed)) for seed in range(rounds)
    ]
    made.append(Job("same", same, (120,)))
    for seed in range(1 if small else ROUNDS):
        made += [
            Job(f"{policy} n={count} seed={seed}", speed, (policy, replicas, count, seed))
            for policy, count in ((SARATHI, few), (SARATHI, many), (LOOKING, few if small else many))
        ]
    for seed in range(1 if small else CASE_ROUNDS):
        made += [
            Job(f"{name} seed={seed}", case_speed, (name, replicas, 40 if small else case.count, seed))
            for name, case in CASES.items()
        ]
    return made


def same(count: int) -> dict[str, int]:
    """Requests whose end differs between the two drivers."""
    sizes, spec = lengths(count, 0), _spec(SARATHI, 2)
    plain = timelines(simulate_events(list(requests(sizes, 4.0, 0)), _truth(sizes), spec))
    fast = simulate_requests(requests(sizes, 4.0, 0), _truth(sizes), spec)
    return {"differ": sum(fast[line.request.id].end != line.end for line in plain)}


def speed(policy: str, replicas: int, count: int, seed: int, *, listed: bool = True) -> dict[str, Any]:
    """Requests simulated in a CPU second. listed: made before, as they come from a workload; many take less memory one
    by one."""
    sizes = lengths(count, seed)
    truth = _truth(sizes)
    rate = LOAD * capacity(replicas)
    offered: Iterable[Request] = requests(sizes, rate, seed)
    if listed:
        offered = list(offered)
    lines, cost = measure_cost(lambda: simulate_requests(offered, truth, _spec(policy, replicas), times=False))
    attained = _attained(lines)
    return {
        "case": policy, "count": count, "rate": rate, "per_second": count / cost.cpu, "attained": attained,
        "loop": loop_seconds(),
    }  # fmt: skip


def case_speed(name: str, replicas: int, count: int, seed: int) -> dict[str, Any]:
    """Requests simulated in a CPU second, by whichever driver can do what the case asks."""
    case = CASES[name]
    rate = case.load * capacity(replicas)
    load, spec = workload(case, count, rate, seed), case_spec(case, replicas)
    run, cost = measure_cost(lambda: simulate(load, spec, times=False))
    attained = sum(record.verdict.met for record in run.records) / count
    return {
        "case": name, "count": count, "rate": rate, "per_second": count / cost.cpu, "attained": attained,
        "loop": loop_seconds(),
    }  # fmt: skip


def workload(case: Case, count: int, rate: float, seed: int) -> Workload:
    """The load, where the case has texts with the ids of each prompt's blocks."""
    sizes = lengths(count, seed)
    text = np.random.default_rng([seed, _TEXTS]).integers(max(1, case.texts), size=count).tolist()
    arrivals = tuple(
        Arrival(
            request.id, request.arrival, "load", "", prompt, output,
            blocks=_blocks(i, prompt, case.texts, text[i]) if case.texts else (),
        )
        for i, (request, (prompt, output)) in enumerate(zip(requests(sizes, rate, seed), sizes, strict=True))
    )  # fmt: skip
    return Workload("simulator-speed", seed, rate, arrivals[-1].at, {"load": PROMISE}, arrivals)


def _blocks(number: int, prompt: int, texts: int, text: int) -> tuple[int, ...]:
    """Of request `number`: the first half of its blocks are the first of `text`, of `texts`, the rest its own."""
    most = LONGEST_IN // HASH_BLOCK_TOKENS
    count = -(-prompt // HASH_BLOCK_TOKENS)
    return tuple((text if i < count // 2 else texts + number) * most + i for i in range(count))


def case_spec(case: Case, replicas: int) -> RunSpec:
    return RunSpec(
        _machine(), PolicyChoice(case.policy, case.settings), replicas, link=case.link,
        drafter=_drafter(case.drafter) if case.drafter else None, prefix_cache=case.texts > 0,
    )  # fmt: skip


@lru_cache
def _drafter(profile: str) -> Drafter:
    return drafter(profile, alpha=ALPHA)


def loop_seconds() -> float:
    """What a machine whose clock changes was worth at the time: CPU seconds of a million times nothing."""
    return measure_cost(_loop)[1].cpu


def _loop() -> None:
    for _ in range(1_000_000):
        pass


def long_run(replicas: int, few: int, many: int, seed: int) -> dict[str, Any]:
    """`speed` of sarathi with many requests; the bytes that the process had at most by its end; growth: CPU time of a
    request among them over that of one among few, the mean of a run before and one after, as clocks drift."""
    before = speed(SARATHI, replicas, few, seed, listed=False)
    found = speed(SARATHI, replicas, many, seed, listed=False)
    unit = 1 if sys.platform == "darwin" else 1024
    most = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    after = speed(SARATHI, replicas, few, seed, listed=False)
    fews = (1.0 / before["per_second"] + 1.0 / after["per_second"]) / 2
    return found | {"bytes": most, "growth": 1.0 / found["per_second"] / fews}


@lru_cache
def capacity(replicas: int) -> float:
    """The largest rate at which `sarathi` attains its share of some minutes of requests, to 5 %."""
    sizes, spec = lengths(300 * replicas, 1), _spec(SARATHI, replicas)
    truth = _truth(sizes)

    def holds(rate: float) -> bool:
        lines = simulate_requests(requests(sizes, rate, 1), truth, spec, times=False, causes=False)
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


def _spec(policy: str, replicas: int) -> RunSpec:
    return RunSpec(_machine(), PolicyChoice(policy, BUDGET), replicas)


@lru_cache
def _machine() -> Hardware:
    longest = LONGEST_IN + LONGEST_OUT
    return packaged_hardware(
        PROFILE, max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=longest, block_size=16
    )


def found(values: Sequence[Any], small: bool) -> Found:
    runs = [v for v in values if "per_second" in v]
    long = [v for v in runs if "bytes" in v]
    counts = sorted({v["count"] for v in runs if v["case"] == SARATHI and "bytes" not in v})

    def speeds(case: str, count: int) -> list[float]:
        return [v["per_second"] for v in runs if (v["case"], v["count"]) == (case, count) and "bytes" not in v]

    few, sarathi = speeds(SARATHI, counts[0]), speeds(SARATHI, counts[-1])
    estimates = {
        "same-as-plain": Estimate.exact(next(v["differ"] for v in values if "differ" in v)),
        "sarathi-speed": over_seeds(sarathi),
        "every-request-speed": over_seeds(speeds(LOOKING, counts[0 if small else -1])),
        **{f"{name}-speed": over_seeds([v["per_second"] for v in runs if v["case"] == name]) for name in CASES},
        "growth": over_seeds([a / b for a, b in zip(few, sarathi, strict=True)]),
        "growth-to-many": over_seeds([v["growth"] for v in long]),
        "memory": Estimate.exact(long[0]["bytes"] / 2**30),
    }
    loop = float(np.median([v["loop"] for v in runs]))
    settings = {
        "profile": PROFILE, "budget": BUDGET["budget"], "load": LOAD, "counts": counts, "loop": loop,
        "loads": {name: case.load for name, case in CASES.items()}, "drafter": DRAFTER, "alpha": ALPHA,
    }  # fmt: skip
    return Found(estimates, runs, range(len(sarathi)), "deadline", settings)
