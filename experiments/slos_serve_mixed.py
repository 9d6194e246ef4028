"""P99 of TTFT and TPOT on SLOs-Serve's Mixed over their SLOs, at two rates (Fig. 12).

ChatBot, Coder and Summarizer, a third each, on a replica of OPT-13B: at the paper's 1.5 requests/s, and at twice that,
which SLOs-Serve holds here at 90 %. Under SLOs-Serve requests of the standard tier count, as in the paper: those that
did not end as best effort; under the others all do. TPOT is a request's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._slos_serve_runs import FULL, SMALL, hardware, load
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate

SOURCE = "SLOs-Serve, Fig. 12 and §6.1"
SECONDS = 13.0

RATES = (1.5, 3.0)  # requests/s
POLICIES = {
    "slos-serve": "slos_serve",
    "vllm": "prefill_first:reserve_kv=true",  # the paper's
    "sarathi": "sarathi:reserve_kv=true",
}
MEASURES = ("ttft", "tpot")


def jobs(small: bool) -> list[Job]:
    seeds = SMALL.seeds if small else FULL.seeds
    return [
        Job(f"{name} rate={rate} seed={seed}", measured, (name, rate, seed, small))
        for name in POLICIES for rate in RATES for seed in seeds
    ]  # fmt: skip


def measured(name: str, rate: float, seed: int, small: bool) -> dict[str, Any]:
    """TTFT and TPOT of each request over what it was promised."""
    scale = SMALL if small else FULL
    offered = load("mixed", seed, scale).rescaled(rate)
    spec = RunSpec(hardware("mixed", scale), PolicyChoice.parse(POLICIES[name]), lengths=oracle_lengths)
    run = simulate(offered, spec, times=False, causes=False)
    shares: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for arrival, record in zip(run.workload.arrivals, run.records, strict=True):
        for measure in MEASURES:
            promised, had = getattr(run.workload.slo(arrival), measure), getattr(record.verdict, measure)
            if not record.best_effort and had is not None:
                shares[measure].append(round(had / promised, 4))
    return {
        "policy": name, "rate": rate, "seed": seed, "shares": shares,
        "seconds": run.workload.duration, "e2e_p99": e2e_p99(run),
        "standard": sum(not r.best_effort for r in run.records) / len(run.records),
        "attained": sum(r.verdict.met for r in run.records) / len(run.records),
        "unfinished": sum(r.outcome != "completed" or r.output != r.asked for r in run.records),
    }  # fmt: skip


def found(values: Sequence[Any], small: bool) -> Found:
    def p99(name: str, rate: float, measure: str) -> Estimate:
        own = [v["shares"][measure] for v in values if (v["policy"], v["rate"]) == (name, rate)]
        return over_seeds([float(np.quantile(shares, 0.99)) for shares in own])

    estimates = {
        f"{name}-{measure}-{rate:g}": p99(name, rate, measure)
        for rate in RATES for name in POLICIES for measure in MEASURES if measure == "ttft" or name == "slos-serve"
    }  # fmt: skip
    estimates["unfinished"] = Estimate.exact(sum(v["unfinished"] for v in values))
    settings = {"rates": RATES, "policies": POLICIES, "machine": hardware("mixed", FULL).describe()}
    return Found(estimates, list(values), (SMALL if small else FULL).seeds, "deadline", settings)


def draw(data: Sequence[Any], axes: Any) -> None:
    """How TTFT over what was promised is distributed, at the higher rate."""
    for name in POLICIES:
        own = [s for v in data if (v["policy"], v["rate"]) == (name, RATES[-1]) for s in v["shares"]["ttft"]]
        axes.plot(np.sort(own), np.linspace(0.0, 1.0, len(own)), label=name)
    axes.axvline(1.0, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
    name_axes(axes, "TTFT over what was promised", "share of requests", log="x")
