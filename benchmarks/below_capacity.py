"""What policies cost below capacity, and gain near and above it, live: the bundled model over HTTP, the demo's tiers.

    python benchmarks/below_capacity.py [--policies edf rubato] [--times 0.5,0.8,1.0] [--seeds 3] [--seconds 40]
        [--json FILE]

The rate at which `vllm` attains 90 % is tried on the real server. Shares of it (`--times`) are offered: the same
requests at the same times to `vllm` and to each policy, each in a server of its own, in an order that turns with the
seed. Reported for each share and policy: attainment, mean end-to-end latency, mean TTFT and its P99, with a 95 %
interval over seeds, and the ratios of the means (policy / vllm, seed by seed). Keep the machine quiet.
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
from rubato.demo.progress import PhaseProgress
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, attainment_over_seeds, over_seeds
from rubato.measure.records import BenchResult
from rubato.measure.tables import percent
from rubato_torch import bundled_model

VLLM = PolicyChoice("vllm")


def row(policy: str, times: float, seed: int, run: BenchResult) -> dict[str, Any]:
    verdicts = [r.verdict for r in run.records]
    return {
        "policy": policy,
        "times": times,
        "seed": seed,
        "met": demo.count_met(run),
        "offered": len(run.records),
        "mean_e2e": mean([v.e2e for v in verdicts if v.e2e is not None]),
        "mean_ttft": mean([v.ttft for v in verdicts if v.ttft is not None]),
        "ttft_p99": float(np.quantile([v.ttft for v in verdicts if v.ttft is not None], 0.99)),
        "problems": list(run.problems),
    }


def shown(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} {estimate.interval('{:.2f}'.format)}"


def told(rows: Sequence[Mapping[str, Any]], policies: Sequence[str]) -> str:
    lines = [
        "| times the rate | policy | attained | mean e2e, s | over `vllm`'s | mean TTFT, s | over `vllm`'s |"
        " P99 of TTFT, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in dict.fromkeys(r["times"] for r in rows):
        base = [r for r in rows if r["times"] == times and r["policy"] == VLLM.label]
        for policy in (VLLM.label, *policies):
            own = [r for r in rows if r["times"] == times and r["policy"] == policy]
            cells = [percent(attainment_over_seeds([r["met"] for r in own], [r["offered"] for r in own]))]
            for key in ("mean_e2e", "mean_ttft"):
                cells.append(shown(over_seeds([r[key] for r in own])))
                cells.append(shown(over_seeds([b[key] / a[key] for a, b in zip(base, own, strict=True)])))
            cells.append(shown(over_seeds([r["ttft_p99"] for r in own])))
            lines.append(f"| {times:g} | `{policy}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["edf", "rubato"])
    parser.add_argument("--times", default="0.5,0.8,1.0", help="shares of the rate that vllm holds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, help="requests/s that vllm holds (default: found)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    choices = [VLLM, *map(PolicyChoice.parse, args.policies)]
    with tempfile.TemporaryDirectory() as folder:
        stage = demo.DemoStage(Path(folder), str(bundled_model.ensure()), 0, PhaseProgress("each policy"))
        warm = stage.warm_up(args.seconds)

        def run(choice: PolicyChoice, rate: float, seconds: float, seed: int) -> BenchResult:
            return stage.contest(choice.policy, choice.settings, warm, loads(stage, warm, rate, seconds, seed))

        rate = args.rate or found(lambda r: demo.attained_share(run(VLLM, r, TRY_SECONDS, 0)), warm.rate, VLLM.label)
        print(f"vllm holds {rate:.2f}/s", flush=True)
        rows = []
        for seed in range(1, args.seeds + 1):
            for times in map(float, args.times.split(",")):
                turn = seed % len(choices)
                for choice in choices[turn:] + choices[:turn]:
                    rows.append(row(choice.label, times, seed, run(choice, times * rate, args.seconds, seed)))
                    print(json.dumps(rows[-1]), flush=True)
    print("\n" + told(rows, [choice.label for choice in choices[1:]]))
    if args.json:
        slos = {tier: dataclasses.asdict(slo) for tier, slo in warm.slos.items()}
        whole = {"holds": rate, "scale": warm.scale, "slos": slos, "seconds": args.seconds, "runs": rows}
        args.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
