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
from experiments import _adaserve_runs as ada
from experiments._axes import name_axes
from rubato.measure.confidence import Estimate
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
        return [Job(model, measured, (model, RATE, 2.0, ada.SEEDS[:1], policy)) for model in ada.MODELS]
    return [
        Job(f"{model} {rate:.2f}", measured, (model, rate, SECONDS_OF_RUN, ada.SEEDS, policy))
        for model in ada.MODELS
        for rate in RATES
    ]


def measured(model: str, rate: float, seconds: float, seeds: Sequence[int], policy: str | None) -> dict[str, Any]:
    @lru_cache
    def load(seed: int) -> Workload:
        return ada.with_ttft(scenarios.make(f"{ada.MODELS[model].scenario}-peaks", rate, duration=seconds, seed=seed))

    def runs(seed: int) -> ada.Run:
        return lambda name: _run(model, name, load(seed), seed, seconds)

    return {
        "model": model, "rate": rate, "requests": len(load(seeds[0]).arrivals),
        **ada.cell(runs, ada.tuned([runs(0)], ada.BUDGETS[::2], SYSTEMS), (ada.OURS,), policy, seeds, (ada.JUDGE,)),
    }  # fmt: skip


def _run(model: str, name: str, load: Workload, seed: int, seconds: float) -> dict[str, Any]:
    run = ada.served(model, ada.choice(model, name), load, ada.REAL, seed)
    at = (np.array([a.at for a in load.arrivals]) / BIN).astype(int)
    bins = int(np.ceil(seconds / BIN))
    came, met = np.bincount(at, minlength=bins), np.bincount(at, run.met(ada.JUDGE), minlength=bins)
    return run.summary() | {"came": came.tolist(), "met": met.tolist()}


def worst(run: Mapping[str, Any]) -> float:
    """The share attained in the worst 30 s."""
    met, came = np.array(run["met"]), np.array(run["came"])
    return float(np.min(met[came > 0] / came[came > 0]))


def found(values: Sequence[Any], small: bool) -> Found:
    estimates: dict[str, Estimate] = {}
    for model in dict.fromkeys(v["model"] for v in values):
        own = [v for v in values if v["model"] == model]
        # where it is ahead by least
        estimates[f"{model}-attained"] = min((ada.ahead(v, "paper") for v in own), key=lambda estimate: estimate.value)
    seeds = [run["seed"] for run in values[0]["runs"]]
    return Found(
        estimates, list(values), seeds, "mean", {"rates": list(RATES), "ttft": ada.TTFT, "acceptance": ada.REAL}
    )


def tables(data: Any) -> str:
    parts = []
    for v in data:
        rows = [
            [f"{v['model']}, {v['rate']:.2f} requests/s", *ada.JUDGES, *TIERS, "worst 30 s", "TTFT P99, s", "goodput"]
        ]
        for name in ada.shown(v):
            runs = [run["systems"][name] for run in v["runs"]]
            numbers = [ada.mean_of(v, name, "share", judge) for judge in ada.JUDGES]
            numbers += [float(np.mean([r["by_tier"].get(tier, np.nan) for r in runs])) for tier in TIERS]
            numbers += [float(np.mean([worst(r) for r in runs]))]
            late, goodput = ada.mean_of(v, name, "ttft_p99"), ada.mean_of(v, name, "goodput", ada.JUDGE)
            rows.append([name, *(f"{n:.3f}" for n in numbers), f"{late:.1f}", f"{goodput:.0f}"])
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def draw(data: Any, axes: Any) -> None:
    """Share attained by time of arrival, the fastest rate of the first model, all seeds."""
    run = max((v for v in data if v["model"] == data[0]["model"]), key=lambda v: float(v["rate"]))
    for name in ada.shown(run):
        came, met = (np.sum([r["systems"][name][key] for r in run["runs"]], axis=0) for key in ("came", "met"))
        times = BIN * (np.arange(len(came)) + 0.5)
        axes.plot(times, [m / n if n else np.nan for m, n in zip(met, came, strict=True)], label=name)
    name_axes(axes, "seconds", "in SLO, TTFT of 2 s among them")
