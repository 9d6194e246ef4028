"""What a policy costs below capacity, and gains near it, live: the bundled model over HTTP, the demo's three tiers.

    python benchmarks/below_capacity.py [--policy edf] [--times 0.5,0.8,1.0] [--seeds 3] [--seconds 40] [--json FILE]

The rate at which `vllm` attains 90 % is tried on the real server. Shares of it (`--times`) are offered: the same
requests at the same times to `vllm` and to the policy, each in a server of its own, the first of the two in turn.
Reported for each share: attainment, mean end-to-end latency and P99 of TTFT of either, with a 95 % interval over seeds,
and the ratio of the mean latencies (policy / vllm, seed by seed). Keep the machine quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from slos_serve_live import TRY_SECONDS, found, loads

from rubato.demo import runs as demo
from rubato.demo.progress import Progress
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, attainment_over_seeds, over_seeds
from rubato.measure.records import BenchResult
from rubato.planning.sweep import percent
from rubato_torch import bundled_model

VLLM = PolicyChoice("vllm")


def row(policy: str, times: float, seed: int, run: BenchResult) -> dict[str, Any]:
    verdicts = [r.verdict for r in run.records]
    return {
        "policy": policy,
        "times": times,
        "seed": seed,
        "met": demo.met(run),
        "offered": len(run.records),
        "mean_e2e": mean([v.e2e for v in verdicts if v.e2e is not None]),
        "ttft_p99": float(np.quantile([v.ttft for v in verdicts if v.ttft is not None], 0.99)),
        "problems": list(run.problems),
    }


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} {estimate.interval('{:.2f}'.format)}"


def told(rows: Sequence[Mapping[str, Any]], policy: str) -> str:
    lines = [
        f"| times the rate | attained, `vllm` | attained, `{policy}` | mean e2e, `vllm`, s | `{policy}`, s | ratio "
        f"| P99 of TTFT, `vllm`, s | `{policy}`, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in dict.fromkeys(r["times"] for r in rows):
        base, ours = ([r for r in rows if r["times"] == times and r["policy"] == p] for p in (VLLM.label, policy))
        attained = [
            percent(attainment_over_seeds([r["met"] for r in own], [r["offered"] for r in own])) for own in (base, ours)
        ]
        e2e, ttft = (
            [shown(over_seeds([r[key] for r in own])) for own in (base, ours)] for key in ("mean_e2e", "ttft_p99")
        )
        ratio = shown(over_seeds([b["mean_e2e"] / a["mean_e2e"] for a, b in zip(base, ours, strict=True)]))
        lines.append(f"| {times:g} | {' | '.join(attained)} | {' | '.join(e2e)} | {ratio} | {' | '.join(ttft)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="edf")
    parser.add_argument("--times", default="0.5,0.8,1.0", help="shares of the rate that vllm holds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, help="requests/s that vllm holds (default: found)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ours = PolicyChoice.parse(args.policy)
    with tempfile.TemporaryDirectory() as folder:
        stage = demo.Stage(Path(folder), str(bundled_model.ensure()), 0, Progress("each policy"))
        warm = stage.warm_up(args.seconds)

        def run(choice: PolicyChoice, rate: float, seconds: float, seed: int) -> BenchResult:
            return stage.contest(choice.policy, choice.settings, warm, loads(stage, warm, rate, seconds, seed))

        rate = args.rate or found(lambda r: demo.attained(run(VLLM, r, TRY_SECONDS, 0)), warm.rate, VLLM.label)
        print(f"vllm holds {rate:.2f}/s", flush=True)
        rows = []
        for seed in range(1, args.seeds + 1):
            for times in map(float, args.times.split(",")):
                for choice in (VLLM, ours) if seed % 2 else (ours, VLLM):
                    rows.append(row(choice.label, times, seed, run(choice, times * rate, args.seconds, seed)))
                    print(json.dumps(rows[-1]), flush=True)
    print("\n" + told(rows, ours.label))
    if args.json:
        slos = {tier: dataclasses.asdict(slo) for tier, slo in warm.slos.items()}
        whole = {"holds": rate, "scale": warm.scale, "slos": slos, "seconds": args.seconds, "runs": rows}
        args.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
