"""Twice the capacity of one replica: attainment of the top tier, of admitted requests, and the queue.

A chat in three tiers on one replica (Llama-3.1-8B, H200, ChatBot's lengths): gold, low, and batch without an SLO. For a
minute gold and low are offered at twice their capacity under SLOs-Serve, gold alone at less than 70 % of its own, then
a tenth of that; capacity is the rate at which 90 % attain. Uncontended is the same gold without the others. SLOs-Serve
runs with and without `tier_values` (gold worth four), the baselines beside it. Attainment is over all requests offered
with an SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import Found
from experiments._recording_slos_serve import PromiseLog
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import Record
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload
from rubato.workloads.arrivals import Piecewise
from rubato.workloads.generate import make
from rubato.workloads.request_kinds import Kind
from rubato.workloads.scenarios import get

SOURCE = "ours; soft admission as in SLOs-Serve, §3.2"
SECONDS = 140.0

PROFILE = "llama-3.1-8b-h200@vllm-2024"
SEEDS = 3
RATES = {"gold": 13.0, "low": 37.0, "batch": 1.0}  # requests/s while it lasts
SLOS = {"gold": SLO(1.0, 0.03), "low": SLO(3.0, 0.06), "batch": SLO()}
HIGH, AFTER, LOW = 60.0, 60.0, 0.1  # seconds of overload, seconds after it, and how much comes then
LOGGED = "experiments._recording_slos_serve"  # records requests promised, also where given up later
KEEPS = {"tier_values": {"gold": 4.0}}
POLICIES = {
    "slos_serve": PolicyChoice("slos_serve", KEEPS),
    "slos_serve, no values": PolicyChoice("slos_serve"),
    "sarathi": PolicyChoice("sarathi"),
    "sarathi, 2048": PolicyChoice("sarathi", {"budget": 2048}),
    "vllm": PolicyChoice("vllm"),
}


@dataclass(frozen=True)
class Scale:
    """count: requests of a steady run. high, after: seconds of overload, and after it."""

    count: int
    high: float
    after: float
    seeds: int


FULL, SMALL = Scale(1500, HIGH, AFTER, SEEDS), Scale(60, 6.0, 12.0, 1)


def scale_of(small: bool) -> Scale:
    return SMALL if small else FULL


def jobs(small: bool) -> list[Job]:
    scale = scale_of(small)
    made = []
    for seed in range(scale.seeds):
        made += [
            Job(f"{'+'.join(tiers)} x{factor:.3g} seed={seed}", steadily, (tiers, factor, scale.count, seed))
            for tiers, factor in ((("gold",), 1.0 / 0.7), (("gold", "low"), 0.5))
        ]
        made.append(Job(f"uncontended seed={seed}", play, ("slos_serve", ("gold",), scale, seed)))
        made += [Job(f"{policy} seed={seed}", play, (policy, tuple(RATES), scale, seed)) for policy in POLICIES]
    return made


def hardware() -> Hardware:
    return packaged_hardware(PROFILE)


def kinds(tiers: Sequence[str]) -> tuple[Kind, ...]:
    chat = get("slos-serve-chatbot").kinds[0]
    return tuple(Kind(tier, SLOS[tier], chat.prompt, chat.output, tier, RATES[tier]) for tier in tiers)


def offered(tiers: Sequence[str], scale: Scale, seed: int) -> Workload:
    rate = sum(RATES[tier] for tier in tiers)
    process = Piecewise((0.0, scale.high), (1.0, LOW), scale.high + scale.after)
    mean = rate * (scale.high + LOW * scale.after) / (scale.high + scale.after)
    return make(
        "overload", kinds(tiers), mean, duration=scale.high + scale.after, seed=seed, arrivals=process, texts=False
    )


def steadily(tiers: Sequence[str], factor: float, count: int, seed: int) -> dict[str, Any]:
    """What SLOs-Serve attains of these tiers at so many times their rates, for as long as it takes."""
    rate = factor * sum(RATES[tier] for tier in tiers)
    load = make("steadily", kinds(tiers), rate, count=count, seed=seed, texts=False)
    spec = RunSpec(hardware(), PolicyChoice("slos_serve"), lengths=oracle_lengths)
    run = simulate(load, spec, times=False, causes=False)
    return {
        "steadily": list(tiers), "factor": factor, "seed": seed, "attained": share(run.records),
        "seconds": load.duration, "e2e_p99": e2e_p99(run),
    }  # fmt: skip


def play(policy: str, tiers: Sequence[str], scale: Scale, seed: int) -> dict[str, Any]:
    load = offered(tiers, scale, seed)
    choice, log = POLICIES[policy], PromiseLog()
    if choice.policy == "slos_serve":
        choice = replace(choice, policy=LOGGED, settings={**choice.settings, "log": log})
    run = simulate(load, RunSpec(hardware(), choice, lengths=oracle_lengths), seed, times=False, causes=False)
    records = run.records
    rows = {tier: [r for r in records if r.tier == tier] for tier in tiers}
    asked = [r for r in records if r.tier != "batch"]
    kept = [r for r in asked if r.id in log.promised]
    patient = [r for r in records if r.best_effort or r.tier == "batch"]
    begun = [r for r in patient if r.outcome != "refused"]
    return {
        "policy": policy,
        "tiers": list(tiers),
        "seed": seed,
        "offered": {tier: len(own) for tier, own in rows.items()},
        "attained": {tier: share(own) for tier, own in rows.items()},
        "all": share(asked),
        "promised": len(kept),
        "promised_attained": share(kept),
        "best_effort": len(begun),
        "best_effort_completed": sum(r.outcome == "completed" for r in begun) / max(1, len(begun)),
        "seconds": scale.high,  # of the load that is in question
        "e2e_p99": e2e_p99(run),
        "seconds_after": max((_end(r) for r in records if r.outcome == "completed"), default=0.0) - scale.high,
    }


def share(records: Sequence[Record]) -> float:
    return sum(r.verdict.met for r in records) / len(records) if records else 1.0


def _end(record: Record) -> float:
    return record.at + (record.verdict.e2e or 0.0)


def found(values: Sequence[Any], small: bool) -> Found:
    scale = scale_of(small)

    def of(policy: str, tiers: Sequence[str] = tuple(RATES)) -> list[Any]:
        return [v for v in values if v.get("policy") == policy and v["tiers"] == list(tiers)]

    def held(*tiers: str) -> Estimate:
        return over_seeds([v["attained"] for v in values if v.get("steadily") == list(tiers)])

    ours, alone, sarathi = of("slos_serve"), of("slos_serve", ("gold",)), [of("sarathi"), of("sarathi, 2048")]
    best = [max(v["all"] for v in each) for each in zip(*sarathi, strict=True)]
    estimates = {
        "gold-beyond": held("gold"),
        "half-of-all": held("gold", "low"),
        "gold-of-uncontended": over_seeds(
            [v["attained"]["gold"] / a["attained"]["gold"] for v, a in zip(ours, alone, strict=True)]
        ),
        "promised-attained": Estimate.exact(min(v["promised_attained"] for v in ours)),
        "all-over-sarathi": over_seeds([v["all"] - b for v, b in zip(ours, best, strict=True)]),
        "best-effort-completed": Estimate.exact(min(v["best_effort_completed"] for v in ours)),
        "seconds-after": Estimate.exact(max(v["seconds_after"] for v in ours) / (scale.after + 30.0)),
    }
    settings = {"profile": PROFILE, "rates": RATES, "keeps": KEEPS, "seconds": [scale.high, scale.after], "after": LOW}
    return Found(estimates, list(values), range(scale.seeds), "deadline", settings)


def draw(data: Any, axes: Any) -> None:
    """Attainment of each tier under each policy, the mean of the seeds."""
    runs = [v for v in data if "policy" in v and len(v["tiers"]) == len(RATES)]
    names = list(dict.fromkeys(v["policy"] for v in runs))
    for place, tier in enumerate(("gold", "low")):
        means = [100 * np.mean([v["attained"][tier] for v in runs if v["policy"] == name]) for name in names]
        axes.bar(np.arange(len(names)) + 0.4 * place - 0.2, means, 0.4, label=tier)
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names])
    axes.set_ylabel("SLO attainment (%, of offered)")
    axes.legend()
