"""Routers where prompts share prefixes: attainment, TTFT and cached tokens of a simulated fleet.

    python benchmarks/routers.py [--rates 45,60,75] [--count 1500] [--seeds 0,1] [--json FILE]

Eight replicas of Llama-3.1-8B on an A100 (packaged profile, exact step times) under edf, prefix cache on. Poisson
arrivals; each prompt begins with one of 100 system prompts of 1,536 to 3,072 tokens (Zipf, exponent 1), and 64 to
1,024 tokens of its own follow. Outputs are log-normal, 120 tokens at the median and 1,000 at most. TTFT 500 ms, TPOT
50 ms.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import count as numbers
from pathlib import Path
from statistics import mean

import numpy as np

from rubato.core.events import Finished, Started
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.simulation.run_spec import RunSpec, packaged_hardware
from rubato.simulation.simulate import simulate_events
from rubato.workloads.workload import HASH_BLOCK_TOKENS, Arrival, Workload

PLAIN = ("least_loaded", "power_of_two", "round_robin", "lmetric")
ROUTERS = [router + setting for router in PLAIN for setting in ("", ":prefix_affinity=true")]
PROFILE, REPLICAS, SYSTEM_PROMPTS = "llama-3.1-8b-a100@vllm-2024", 8, 100
PROMISE = SLO(ttft=0.5, tpot=0.05)


def offered(rate: float, count: int, seed: int) -> Workload:
    draw = np.random.default_rng(seed)
    at = np.cumsum(draw.exponential(1.0 / rate, count)).tolist()
    weights = 1.0 / np.arange(1, SYSTEM_PROMPTS + 1)
    system = draw.choice(SYSTEM_PROMPTS, size=count, p=weights / weights.sum()).tolist()
    outputs = np.clip(draw.lognormal(4.8, 0.7, count), 1, 1000).astype(int).tolist()
    own = draw.integers(64, 1025, count).tolist()
    fresh = numbers(10 * SYSTEM_PROMPTS)  # ids of blocks that no other prompt has
    arrivals = []
    for i in range(count):
        shared = 3 + system[i] % 4
        blocks = [10 * system[i] + j for j in range(shared)]
        blocks += [next(fresh) for _ in range(-(-own[i] // HASH_BLOCK_TOKENS))]
        prompt = HASH_BLOCK_TOKENS * shared + own[i]
        arrivals.append(Arrival(f"q{i}", at[i], "chat", "chat", prompt, outputs[i], blocks=tuple(blocks)))
    return Workload("shared prefixes", seed, rate, at[-1], {"chat": PROMISE}, tuple(arrivals))


def run(router: str, workload: Workload) -> dict[str, float]:
    """Shares in percent, times in milliseconds."""
    choice = PolicyChoice.parse(f"edf@{router}")
    spec = RunSpec(packaged_hardware(PROFILE), choice, REPLICAS, learns=False, prefix_cache=True)
    events = simulate_events(list(workload.requests()), workload.truth(), spec)
    ends = [e for e in events if isinstance(e, Finished)]
    cached = sum(e.cached for e in events if isinstance(e, Started) and not e.resumed)
    ttft = [1e3 * e.verdict.ttft for e in ends if e.verdict.ttft is not None]
    return {
        "attained": 100.0 * mean(e.verdict.met for e in ends),
        "cached": 100.0 * cached / sum(a.prompt_tokens for a in workload.arrivals),
        "ttft": mean(ttft),
        "ttft_p99": float(np.quantile(ttft, 0.99)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rates", default="45,60,75")
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    seeds, rows = [int(seed) for seed in args.seeds.split(",")], []
    print("| requests/s | router | attained, by seed | cached | mean TTFT | TTFT p99 |\n|---|---|---|---|---|---|")
    for rate in map(float, args.rates.split(",")):
        for router in ROUTERS:
            runs = [run(router, offered(rate, args.count, seed)) for seed in seeds]
            rows.append({"rate": rate, "router": router, "runs": runs})
            attained = ", ".join(f"{each['attained']:.1f} %" for each in runs)
            cached, ttft, p99 = (mean(each[name] for each in runs) for name in ("cached", "ttft", "ttft_p99"))
            print(f"| {rate:g} | `{router}` | {attained} | {cached:.0f} % | {ttft:.0f} ms | {p99:.0f} ms |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"seeds": seeds, "count": args.count, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
