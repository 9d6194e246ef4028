"""The simulator against queueing theory: M/D/1 waiting times, Lindley's recursion, Little's law.

One sequence at a time, every step the same time, all requests alike: the replica is a queue with one server and a
deterministic service time, whatever the policy. Poisson arrivals make it M/D/1, whose mean wait is ρ·D / 2(1 − ρ)
(Pollaczek and Khinchine); on the arrivals at hand each wait is exactly Lindley's W' = max(0, W + D − gap).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments import Found
from experiments.littles_law import littles_law
from rubato.core.plan import Limits
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency.affine import Model
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Arrival, Workload

SOURCE = "Pollaczek-Khinchine; Lindley (1952); Little (1961)"
SECONDS = 27.0

STEP, OUTPUT = 0.05, 2  # seconds of a step; the first token's and one more: a request holds the server for two steps
SERVICE = STEP * OUTPUT
LIMITS = Limits(
    max_num_seqs=1, max_num_batched_tokens=64, max_model_len=1024, kv_blocks=64, block_size=16, max_running=1
)
MACHINE = Hardware("one at a time", Model(k=(0.0, 0.0), b=(STEP, 0.0)), LIMITS)
POLICIES = ("vllm", "sarathi", "prefill_first")
LOADS = (0.5, 0.8)
_GAPS = 30  # the random stream of arrivals


def jobs(small: bool) -> list[Job]:
    seeds, count = (4, 1200) if small else (12, 8000)
    return [
        Job(f"load={load} seed={seed}", queue, (POLICIES[seed % len(POLICIES)], load, seed, count))
        for load in LOADS
        for seed in range(seeds)
    ]


def queue(policy: str, load: float, seed: int, count: int) -> dict[str, Any]:
    """Mean wait over theory's, the largest difference from Lindley's recursion (s), and the gap in Little's law."""
    gaps = np.random.default_rng([seed, _GAPS]).exponential(SERVICE / load, size=count)
    times = np.cumsum(gaps).tolist()
    arrivals = tuple(Arrival(f"q{i}", at, "all-alike", "", 8, OUTPUT) for i, at in enumerate(times))
    offered = Workload("queue", seed, load / SERVICE, times[-1], {"all-alike": SLO()}, arrivals)
    run = simulate(offered, RunSpec(MACHINE, PolicyChoice(policy)))
    waits = [record.times[0] - STEP - record.at for record in run.records]
    expected = [0.0]
    for before, after in pairwise(times):
        expected.append(max(0.0, expected[-1] + SERVICE - (after - before)))
    theory = load * SERVICE / (2 * (1 - load))
    return {
        "policy": policy,
        "load": load,
        "seed": seed,
        "wait": float(np.mean(waits)) / theory,
        "lindley": max(abs(a - b) for a, b in zip(waits, expected, strict=True)),
        "little": littles_law(run).gap,
    }


def found(values: Sequence[Any], small: bool) -> Found:
    waits = {load: over_seeds([v["wait"] for v in values if v["load"] == load]) for load in LOADS}
    estimates = {f"md1-wait-{round(100 * load)}": waits[load] for load in LOADS}
    for name in ("lindley", "little"):
        estimates[name] = Estimate.exact(max(v[name] for v in values))
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "deadline", MACHINE.describe())


def draw(data: Any, axes: Any) -> None:
    """Each seed's mean wait over theory's."""
    for load in LOADS:
        axes.plot([load] * sum(v["load"] == load for v in data), [v["wait"] for v in data if v["load"] == load], "o")
    axes.axhline(1.0, color="#999999")
    axes.set_xlabel("load")
    axes.set_ylabel("mean wait / M/D/1's")
