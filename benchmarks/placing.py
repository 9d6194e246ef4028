"""Placements per CPU second of a router in front of many replicas, one core, every update of their state counted.

    python benchmarks/placing.py [--routers least_loaded,minimal,round_robin] [--replicas 100] [--rounds 5]

Requests to replicas of Llama-3.1-8B on an H200 under sarathi, through the real Cluster and the simulator's fast driver,
Poisson at a rate at which each replica runs about 20 sequences. `placed/s, all` is over the CPU time of the whole run:
arrivals, placements, starts, steps, tokens and ends of all replicas; `placed/s, cluster` over the time inside the
cluster alone (offering, placing, the events that come back), the replicas' own steps left out. A router that reads its
views has the replicas book the steps that are over then, which is in both. Medians over rounds, routers taking turns.
`--profile` prints where the time of one run goes (cProfile) in place of that.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments._cluster_time import Inside
from rubato.core.clock import measure_cost
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.core.timeline import Timeline
from rubato.fleet.cluster_options import PolicyChoice
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate_requests

ROUTERS = "least_loaded,minimal,round_robin"
PROFILE, POLICY, BUDGET = "llama-3.1-8b-h200@vllm-2024", "sarathi", {"budget": 2048}
LONGEST_IN, LONGEST_OUT = 8192, 2048  # tokens, uniform from 1
PROMISE = SLO(ttft=1.0, tpot=0.05)
REPLICA_RATE = 1.25  # requests/s of a replica: 20 sequences at a time, of about 12 s each


def run_spec(router: str, replicas: int) -> RunSpec:
    machine = packaged_hardware(
        PROFILE, max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=LONGEST_IN + LONGEST_OUT, block_size=16
    )
    return RunSpec(machine, PolicyChoice(POLICY, BUDGET, router), replicas)


def offered(count: int, replicas: int, seed: int) -> tuple[list[Request], dict[str, tuple[int]]]:
    """Requests in order of arrival, and the output tokens of each."""
    draw = np.random.default_rng(seed)
    inputs, outputs = (draw.integers(1, most + 1, count).tolist() for most in (LONGEST_IN, LONGEST_OUT))
    at = np.cumsum(draw.exponential(1.0 / (REPLICA_RATE * replicas), count)).tolist()
    requests = [
        Request(f"q{i}", (Stage(inputs[i], PROMISE),), at[i], sampling=Sampling(outputs[i])) for i in range(count)
    ]
    return requests, {f"q{i}": (outputs[i],) for i in range(count)}


def run(router: str, replicas: int, count: int, seed: int) -> dict[str, float]:
    """One run. running: sequences at a replica, on average (Little's law)."""
    requests, truth = offered(count, replicas, seed)
    with Inside() as inside:
        lines, cost = measure_cost(lambda: simulate_requests(requests, truth, run_spec(router, replicas), times=False))
    share = inside.seconds / cost.wall  # of the wall's time, as of the CPU's: others take both alike
    running = sum(map(_stay, lines.values())) / requests[-1].arrival / replicas
    tokens = sum(line.end.output for line in lines.values() if line.end is not None)
    return {
        "all": count / cost.cpu, "cluster": count / (share * cost.cpu), "tokens": tokens / cost.cpu,
        "share": share, "running": running,
    }  # fmt: skip


def _stay(line: Timeline) -> float:
    return line.end.at - line.request.arrival if line.end is not None else 0.0


def profiled(router: str, replicas: int, count: int) -> None:
    requests, truth = offered(count, replicas, 0)
    profile = cProfile.Profile()
    profile.runcall(lambda: simulate_requests(requests, truth, run_spec(router, replicas), times=False))
    print(f"{router}, {replicas} replicas, {count} requests")
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["router", "placed/s, all", "placed/s, cluster", "cluster's share", "tokens/s", "running"]
    lines = [f"{head[0]:14}" + "".join(f"{h:>19}" for h in head[1:])]
    for row in rows:
        cells = [f"{row['all']:,.0f}", f"{row['cluster']:,.0f}", f"{row['share']:.0%}", f"{row['tokens']:,.0f}"]
        cells.append(f"{row['running']:.1f}")
        lines.append(f"{row['router']:14}" + "".join(f"{c:>19}" for c in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default=ROUTERS)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    routers = args.routers.split(",")
    if args.profile:
        for router in routers:
            profiled(router, args.replicas, args.requests)
        return
    rounds = [{r: run(r, args.replicas, args.requests, seed) for r in routers} for seed in range(args.rounds)]
    rows = [{"router": r} | {k: median(one[r][k] for one in rounds) for k in rounds[0][r]} for r in routers]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
