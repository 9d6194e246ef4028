"""Requests in the system over time on SLOs-Serve's Coder, beyond the capacity of every system (Fig. 11).

Code requests come in bursts. SLOs-Serve serves those that it could not admit as best effort, once a burst is over. The
paper's 4.5 requests/s are for its machines; here a replica of OPT-13B is offered more than any system attains 90 % of.
A request counts in the tier in which it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments import Found
from experiments._axes import name_axes
from experiments._slos_serve_runs import FULL, SMALL, hardware, load
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import Record
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate

SOURCE = "SLOs-Serve, Fig. 11 and §6.1"
SECONDS = 4.0

RATE = 2.2  # requests/s
POINTS = 120  # in time
POLICIES = {
    "slos_serve": "slos_serve",
    "prefill_first": "prefill_first:reserve_kv=true",
    "sarathi": "sarathi:reserve_kv=true",
    "vllm": "vllm:reserve_kv=true",
}


def jobs(small: bool) -> list[Job]:
    seeds = SMALL.seeds if small else FULL.seeds
    return [Job(f"{name} seed={seed}", followed, (name, seed, small)) for name in POLICIES for seed in seeds]


def followed(name: str, seed: int, small: bool) -> dict[str, Any]:
    """How many were there at each time, by tier, and how many of each tier attained."""
    scale = SMALL if small else FULL
    offered = load("coder", seed, scale).rescaled(RATE)
    spec = RunSpec(hardware("coder", scale), PolicyChoice.parse(POLICIES[name]), lengths=oracle_lengths)
    run = simulate(offered, spec, causes=False)
    until = max(r.times[-1] for r in run.records if r.times)
    at = np.linspace(0.0, until, POINTS).round(2)
    tiers = {
        "standard": [r for r in run.records if not r.best_effort],
        "best effort": [r for r in run.records if r.best_effort],
    }
    return {
        "policy": name, "seed": seed, "at": at.tolist(),
        "seconds": run.workload.duration, "e2e_p99": e2e_p99(run),
        "here": {tier: here(records, at) for tier, records in tiers.items()},
        "offered": {tier: len(records) for tier, records in tiers.items()},
        "attained": {tier: sum(r.verdict.met for r in records) for tier, records in tiers.items()},
        "unfinished": sum(r.outcome != "completed" or r.output != r.asked for r in run.records),
    }  # fmt: skip


def here(records: Sequence[Record], at: NDArray[np.float64]) -> list[int]:
    """How many had arrived and not had their last token."""
    came, went = np.sort([r.at for r in records]), np.sort([r.times[-1] for r in records])
    return [int(n) for n in came.searchsorted(at, side="right") - went.searchsorted(at, side="right")]


def found(values: Sequence[Any], small: bool) -> Found:
    own = {name: [v for v in values if v["policy"] == name] for name in POLICIES}
    ours = own["slos_serve"]
    baselines = [name for name in POLICIES if name != "slos_serve"]
    best = max(baselines, key=lambda name: sum(map(_attained, own[name])))
    estimates = {
        "standard-attained": over_seeds([v["attained"]["standard"] / max(1, v["offered"]["standard"]) for v in ours]),
        "attained-over-best": over_seeds([
            _attained(a) / max(1, _attained(b)) for a, b in zip(ours, own[best], strict=True)
        ]),
        "standard-peak": over_seeds([
            max(a["here"]["standard"]) / max(b["here"]["standard"]) for a, b in zip(ours, own["vllm"], strict=True)
        ]),
        "unfinished": Estimate.exact(sum(v["unfinished"] for v in values)),
    }  # fmt: skip
    settings = {"rate": RATE, "policies": POLICIES, "best": best, "machine": hardware("coder", FULL).describe()}
    return Found(estimates, list(values), (SMALL if small else FULL).seeds, "deadline", settings)


def _attained(value: Mapping[str, Any]) -> int:
    return sum(value["attained"].values())


def draw(data: Sequence[Any], axes: Any) -> None:
    """The first seed's."""
    first = data[0]["seed"]
    for value in data:
        for tier, here in value["here"].items() if value["seed"] == first else ():
            if any(here):
                axes.plot(value["at"], here, label=f"{value['policy']}, {tier}")
    name_axes(axes, "seconds", "requests in the system")
