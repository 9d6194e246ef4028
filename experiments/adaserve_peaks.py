"""AdaServe and baselines while chat, code and summaries peak one after the other (Figs. 13 and 14).

360 s of each model's scenario of peaks (1,445 requests; the levels are ours, Fig. 13 has no numbers), unequal
acceptance, a TTFT of 2 s, else as `adaserve-rate`. The rate is the paper's mean, 4.0 requests/s; also 5.0. Baselines
are tuned on seed 0, with token budgets of 256 and 1,024; vLLM without drafts and chains of 6 and 8, which are not
the best in `adaserve-rate`, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import (
    BUDGETS,
    JUDGE,
    JUDGES,
    MODELS,
    OURS,
    REAL,
    SEEDS,
    TTFT,
    Run,
    ahead,
    best_baseline,
    cell,
    choice,
    mean_of,
    served,
    shown,
    tuned,
    violations,
    with_ttft,
)
from experiments._axes import name_axes
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.workloads import Workload, scenarios

SOURCE = "AdaServe, §6.3, Fig. 13 and 14"
SECONDS = 690.0

SECONDS_OF_RUN, RATE = 360.0, 1445 / 360
RATES = (RATE, 1.25 * RATE)
BIN = 30.0  # seconds
TIERS = ("code", "chat", "summary")
SYSTEMS = ("sarathi", "chains of 4", "chains of 2", "smart_spec", "priority", "edf")


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        return [Job(model, measured, (model, RATE, 2.0, SEEDS[:1], policy)) for model in MODELS]
    return [
        Job(f"{model} {rate:.2f}", measured, (model, rate, SECONDS_OF_RUN, SEEDS, policy))
        for model in MODELS
        for rate in RATES
    ]


def measured(model: str, rate: float, seconds: float, seeds: Sequence[int], policy: str | None) -> dict[str, Any]:
    @lru_cache
    def load(seed: int) -> Workload:
        return with_ttft(scenarios.make(f"{MODELS[model].scenario}-peaks", rate, duration=seconds, seed=seed))

    def runs(seed: int) -> Run:
        return lambda name: _run(model, name, load(seed), seed, seconds)

    return {
        "model": model, "rate": rate, "requests": len(load(seeds[0]).arrivals),
        **cell(runs, tuned([runs(0)], BUDGETS[::2], SYSTEMS), (OURS,), policy, seeds, (JUDGE,)),
    }  # fmt: skip


def _run(model: str, name: str, load: Workload, seed: int, seconds: float) -> dict[str, Any]:
    run = served(model, choice(model, name), load, REAL, seed)
    at = (np.array([a.at for a in load.arrivals]) / BIN).astype(int)
    bins = int(np.ceil(seconds / BIN))
    came, met = np.bincount(at, minlength=bins), np.bincount(at, run.met(JUDGE), minlength=bins)
    return run.summary() | {"came": came.tolist(), "met": met.tolist()}


def worst(run: Mapping[str, Any]) -> float:
    """The share attained in the worst 30 s."""
    met, came = np.array(run["met"]), np.array(run["came"])
    return float(np.min(met[came > 0] / came[came > 0]))


def found(values: Sequence[Any], small: bool) -> Found:
    estimates: dict[str, Estimate] = {}
    for model in dict.fromkeys(v["model"] for v in values):
        own = [v for v in values if v["model"] == model]
        fastest = max(own, key=lambda v: float(v["rate"]))
        best = best_baseline(fastest, "all")
        estimates |= {
            f"{model}-attained": _least([ahead(v, "paper") for v in own]),
            f"{model}-attained-tuned": _least([ahead(v) for v in own]),
            f"{model}-violations": over_seeds(violations(fastest, "all")).exp(),
            f"{model}-worst-half-minute": over_seeds(
                [100 * (worst(run["systems"][OURS]) - worst(run["systems"][best])) for run in fastest["runs"]]
            ),
        }
    seeds = [run["seed"] for run in values[0]["runs"]]
    return Found(estimates, list(values), seeds, "mean", {"rates": list(RATES), "ttft": TTFT, "acceptance": REAL})


def _least(points: Sequence[Estimate]) -> Estimate:
    """Of the rate at which ours is ahead by least."""
    return min(points, key=lambda estimate: estimate.value)


def tables(data: Any) -> str:
    parts = []
    for v in data:
        rows = [[f"{v['model']}, {v['rate']:.2f} requests/s", *JUDGES, *TIERS, "worst 30 s", "TTFT P99, s", "goodput"]]
        for name in shown(v):
            runs = [run["systems"][name] for run in v["runs"]]
            numbers = [mean_of(v, name, "share", judge) for judge in JUDGES]
            numbers += [float(np.mean([r["by_tier"].get(tier, np.nan) for r in runs])) for tier in TIERS]
            numbers += [float(np.mean([worst(r) for r in runs]))]
            late, goodput = mean_of(v, name, "ttft_p99"), mean_of(v, name, "goodput", JUDGE)
            rows.append([name, *(f"{n:.3f}" for n in numbers), f"{late:.1f}", f"{goodput:.0f}"])
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def draw(data: Any, axes: Any) -> None:
    """Share attained by time of arrival, the fastest rate of the first model, all seeds."""
    run = max((v for v in data if v["model"] == data[0]["model"]), key=lambda v: float(v["rate"]))
    for name in shown(run):
        came, met = (np.sum([r["systems"][name][key] for r in run["runs"]], axis=0) for key in ("came", "met"))
        times = BIN * (np.arange(len(came)) + 0.5)
        axes.plot(times, [m / n if n else np.nan for m, n in zip(met, came, strict=True)], label=name)
    name_axes(axes, "seconds", "in SLO, TTFT of 2 s among them")
