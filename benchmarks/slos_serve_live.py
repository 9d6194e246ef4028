"""SLOs-Serve and baselines, live: the bundled model over HTTP, two tiers and best effort, beyond what `sarathi` holds.

    python benchmarks/slos_serve_live.py [--seeds 3] [--seconds 30] [--policy slos_serve:safety_margin=0.05] [--json
    FILE]

SLOs are multiples of what this machine takes unloaded, as in `rubato demo`. `sarathi`, its budget tuned in simulation,
is tried at several rates for the one at which 90 % of what carries an SLO is attained. 1.3 times that rate is offered:
the same requests at the same times to each policy, in a server of its own, in an order that turns with every seed.
Attained is of offered; best effort is told by its tokens in a second and by how many of it have ended. Keep the machine
quiet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rubato.core.request import SLO
from rubato.demo import runs as demo
from rubato.demo.progress import PhaseProgress
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import over_seeds
from rubato.measure.records import BenchResult
from rubato.workloads import Workload
from rubato.workloads.request_kinds import Kind
from rubato_torch import bundled_model

POLICIES = ("prefill_first", "vllm", "sarathi", "edf", "slos_serve", "slos_serve:safety_margin=0.1")
PATIENT = "batch"  # the tier without an SLO


SHARES = {"chat": 0.5, "code": 0.3, "summary": 0.2}
TRIES = 6  # rates tried on the real server, at most
TRY_SECONDS = 20.0  # each of them
HALF = 0.5  # below it a rate is far too high


@dataclass(frozen=True)
class Stage(demo.DemoStage):
    """The demo's, with more summaries, which carry no SLO."""

    def kinds(self, slos: Mapping[str, SLO], scale: float) -> list[Kind]:
        mix = demo.kinds({**slos, "summary": SLO()}, scale)
        tiers = {"summary": PATIENT}
        return [dataclasses.replace(k, tier=tiers.get(k.app, k.app), share=SHARES[k.app]) for k in mix]


def attained(run: BenchResult) -> tuple[int, int]:
    asked = [r for r in run.records if r.tier != PATIENT]
    return sum(r.verdict.met for r in asked), len(asked)


def rate_of(stage: Stage, choice: PolicyChoice, warm: demo.WarmUp) -> float:
    """Requests/s at which it attains 90 %."""

    def attained_at(rate: float) -> float:
        load = stage.load(rate, TRY_SECONDS, warm.slos, warm.scale, "hold")
        met, offered = attained(stage.contest(choice.policy, choice.settings, warm, load))
        print(f"  {choice.label} at {rate:.2f}/s: {met} of {offered}", flush=True)
        return met / offered

    return found(attained_at, warm.rate, choice.label)


def found(attained_at: Callable[[float], float], rate: float, policy: str) -> float:
    """The rate at which 90 % is attained, tried from `rate` on. Raises as `demo.sustained_rate`."""
    tries: list[tuple[float, float]] = []
    for _ in range(TRIES):
        share = attained_at(rate)
        tries.append((rate, share))
        if min(a for _, a in tries) < demo.HOLDING_ATTAINMENT <= max(a for _, a in tries):
            break
        rate *= 1.15 if share >= demo.HOLDING_ATTAINMENT else 0.85 if share >= HALF else 0.7
    return demo.sustained_rate(tries, policy)


def row(choice: PolicyChoice, seed: int, run: BenchResult) -> dict[str, Any]:
    met, offered = attained(run)
    of = {tier: [r for r in run.records if r.tier == tier] for tier in run.workload.tiers}
    patient = [r for r in run.records if r.tier == PATIENT or r.best_effort]
    done = [r for r in patient if r.outcome == "completed"]
    kept = [r for r in run.records if r.tier != PATIENT and not r.best_effort]
    last = max((r.times[-1] for r in run.records if r.times), default=0.0)
    return {
        "policy": choice.label,
        "seed": seed,
        "met": met,
        "offered": offered,
        "tiers": {tier: [sum(r.verdict.met for r in own), len(own)] for tier, own in of.items()},
        "kept": len(kept),
        "kept_met": sum(r.verdict.met for r in kept),
        "best_effort": len(patient),
        "best_effort_completed": len(done),
        "best_effort_tokens_per_s": sum(r.output for r in done) / last,
        "seconds": last,
        "problems": list(run.problems),
    }


def loads(stage: demo.DemoStage, warm: demo.WarmUp, rate: float, seconds: float, seed: int) -> Workload:
    """What is offered at `rate`, the same for each policy."""
    return dataclasses.replace(stage, seed=seed).load(rate, seconds, warm.slos, warm.scale)


def told(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| policy | attained of offered | promised to the end, met | best effort ended | its tokens/s | ended, s |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["policy"] for r in rows):
        own = [r for r in rows if r["policy"] == name]
        share = over_seeds([r["met"] / r["offered"] for r in own])
        mean = [sum(r[key] for r in own) / len(own) for key in ("best_effort_tokens_per_s", "seconds")]
        counts = [sum(r[key] for r in own) for key in ("kept_met", "kept", "best_effort_completed", "best_effort")]
        each = ", ".join(f"{r['met']}/{r['offered']}" for r in own)
        lines.append(
            f"| `{name}` | {100 * share.value:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}] ({each}) "
            f"| {counts[0]} of {counts[1]} | {counts[2]} of {counts[3]} | {mean[0]:.0f} | {mean[1]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", help="only these (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rate", type=float, help="requests/s that sarathi holds (default: found)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), str(bundled_model.ensure()), 0, PhaseProgress("each policy"))
        warm = stage.warm_up()
        slos = warm.slos
        budget = stage.tune_budget(warm, stage.load(demo.OVERLOAD * warm.rate, args.seconds, slos, warm.scale))
        sarathi = PolicyChoice("sarathi", {"budget": budget})
        rate = args.rate or rate_of(stage, sarathi, warm)
        print(f"{sarathi.label} holds {rate:.2f}/s; offered: {demo.OVERLOAD * rate:.2f}/s", flush=True)
        choices = [sarathi if name == "sarathi" else PolicyChoice.parse(name) for name in args.policy or POLICIES]
        rows = []
        for seed in range(1, args.seeds + 1):
            load = loads(stage, warm, demo.OVERLOAD * rate, args.seconds, seed)
            for i in range(len(choices)):
                choice = choices[(i + seed) % len(choices)]
                run = stage.contest(choice.policy, choice.settings, warm, load)
                rows.append(row(choice, seed, run))
                print(json.dumps(rows[-1]), flush=True)
    print("\n" + told(rows))
    if args.json:
        slo = {tier: dataclasses.asdict(slos[tier]) for tier in ("chat", "code")}
        found = {"holds": rate, "offered": demo.OVERLOAD * rate, "slos": slo, "model": warm.model.to_dict()}
        args.json.write_text(json.dumps({**found, "seconds": args.seconds, "runs": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
