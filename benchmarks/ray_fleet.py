"""Two Ray actors with the simulated engine on the wall clock behind `least_loaded`: what the way to another process
costs, and what becomes of requests when one actor is killed.

    python benchmarks/ray_fleet.py [--seconds 20] [--rate 8] [--json FILE]

Three runs of the same seeded load, one after the other: hosts in this process, Ray actors, Ray actors of which one is
killed half way. The engine takes the times of a latency model, so the machine is idle but for control and transport.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from rubato.core.clock import Clock, WallClock, run_strict
from rubato.core.events import Event, Finished, Lost, Offered, Tokens
from rubato.core.interfaces import LatencyModel
from rubato.core.plan import Limits
from rubato.core.request import SLO, Request, Sampling, Stage
from rubato.engines.simulated import Engine
from rubato.fleet.build import local_cluster
from rubato.fleet.cluster import Cluster
from rubato.fleet.cluster_options import ClusterOptions, PolicyChoice
from rubato.fleet.ray_host import RayHost, ray_cluster
from rubato.latency.affine import Model

LIMITS = Limits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096, kv_blocks=4000, block_size=16)
TIERS = {"chat": (SLO(ttft=0.6, tpot=0.03), 0.7), "batch": (SLO(ttft=3.0, tpot=0.1), 0.3)}


def latency() -> Model:
    """About 9 ms a step and 0.15 ms a prompt token: a small GPU."""
    return Model(k=(1.5e-4, 1.5e-4), b=(9e-3, 9e-3), host=0.0, host_per_seq=5e-5, a=2e-8, d=0.0, e=0.0)


def make(clock: Clock) -> tuple[Engine, LatencyModel]:
    return Engine(latency(), LIMITS, clock), latency()


def offered(rate: float, seconds: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    at = float(rng.exponential(1 / rate))
    while at < seconds:
        tier = str(rng.choice(list(TIERS), p=[share for _, share in TIERS.values()]))
        stage = Stage(int(rng.integers(50, 1500)), TIERS[tier][0])
        output = int(rng.integers(50, 250))
        requests.append(Request(f"q{len(requests)}", (stage,), at, tier=tier, sampling=Sampling(output)))
        at += float(rng.exponential(1 / rate))
    return requests


async def run(cluster: Cluster, requests: Sequence[Request], kill_at: float | None) -> list[Event]:
    """Offer on schedule, kill the first host at `kill_at` seconds; every event."""
    events: list[Event] = []

    def hear(event: Event) -> None:
        events.append(event)
        if cluster.offered != cluster.finished + cluster.in_flight:
            raise RuntimeError(f"{cluster.offered} offered, {cluster.finished} finished, {cluster.in_flight} in flight")

    cluster.listen(hear)
    await cluster.start()
    began = cluster.clock.now() + 0.1

    def kill() -> None:
        host = cluster.hosts["r0"]
        assert isinstance(host, RayHost)
        ray.kill(host.actor)

    if kill_at is not None:
        asyncio.get_running_loop().call_later(0.1 + kill_at, kill)
    for r in requests:
        await asyncio.sleep(max(0.0, began + r.arrival - cluster.clock.now()))
        cluster.offer(Request(r.id, r.stages, began + r.arrival, tier=r.tier, sampling=r.sampling))
    await cluster.drain()
    await cluster.close()
    return events


def summary(name: str, events: Sequence[Event]) -> dict[str, Any]:
    ends = [e for e in events if isinstance(e, Finished)]
    asked = {e.id: e.request for e in events if isinstance(e, Offered)}
    tokens: dict[str, int] = {}
    for e in events:
        if isinstance(e, Tokens):
            tokens[e.id] = tokens.get(e.id, 0) + e.tokens
    completed = [e for e in ends if e.outcome == "completed"]
    whole = sum(tokens[e.id] == e.output == asked[e.id].sampling.max_tokens for e in completed)
    return {
        "run": name,
        "offered": len(asked),
        "finished": len(ends),
        "completed": len(completed),
        "moved": len({e.id for e in events if isinstance(e, Lost)}),
        "outputs whole, no token twice": whole,
        "attained": {
            tier: f"{sum(e.verdict.met for e in ends if asked[e.id].tier == tier)}"
            f" of {sum(r.tier == tier for r in asked.values())}"
            for tier in TIERS
        },
        "ttft p50 ms": round(1e3 * median(e.verdict.ttft for e in completed if e.verdict.ttft is not None), 1),
        "tpot p50 ms": round(1e3 * median(e.verdict.tpot for e in completed if e.verdict.tpot is not None), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second, two replicas together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    requests = offered(args.rate, args.seconds, args.seed)
    rows = []

    options = ClusterOptions(PolicyChoice("edf"))

    def local() -> Cluster:
        clock = WallClock()
        return local_cluster([make(clock)[0] for _ in range(2)], [latency() for _ in range(2)], clock, options)

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    for name, build, kill_at in (
        ("in process", local, None),
        ("ray", lambda: ray_cluster([make, make], WallClock(), options), None),
        ("ray, one killed", lambda: ray_cluster([make, make], WallClock(), options), args.seconds / 2),
    ):
        rows.append(summary(name, run_strict(run(build(), requests, kill_at))))
        print(json.dumps(rows[-1]))
    ray.shutdown()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
