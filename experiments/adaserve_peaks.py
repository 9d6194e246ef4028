"""AdaServe and baselines while chat, code and summaries peak one after the other (Figs. 13 and 14).

360 s of the scenarios `adaserve-*-peaks` (1,445 requests; the levels are ours, Fig. 13 has no numbers), else as
`adaserve-rate`. The rate is the paper's mean, 4.0 requests/s; also 5.0, where our step times let baselines miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import (
    ALPHA,
    FEW,
    MODELS,
    OURS,
    PAPER,
    TUNED,
    best_of,
    choice,
    fewer,
    served,
)
from experiments._guest import beside
from rubato.measure.confidence import over_seeds
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.workloads import scenarios

SOURCE = "AdaServe, §6.3, Fig. 13 and 14"
SECONDS = 370.0

SECONDS_OF_RUN, RATE = 360.0, 1445 / 360
RATES = (RATE, 1.25 * RATE)
SEEDS = (1, 2)
BIN = 30.0  # seconds
SYSTEMS = tuple(name for name in FEW if name != "vllm")  # which serves these as `sarathi` does, or worse


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    systems = beside(SYSTEMS, policy)
    if small:
        return [Job("llama", measured, ("llama", RATE, 3.0, 1, systems))]
    return [
        Job(f"{model} {rate:.2f} seed={seed}", measured, (model, rate, SECONDS_OF_RUN, seed, systems))
        for model, rates in (("llama", RATES), ("qwen", RATES[:1]))
        for rate in rates
        for seed in SEEDS
    ]


def measured(model: str, rate: float, seconds: float, seed: int, names: Sequence[str]) -> dict[str, Any]:
    load = scenarios.make(f"{MODELS[model].scenario}-peaks", rate, duration=seconds, seed=seed)
    bins = int(np.ceil(seconds / BIN))
    tiers = ("code", "chat", "summary")
    came = {tier: [0] * bins for tier in tiers}
    for arrival in load.arrivals:
        came[arrival.tier][int(arrival.at / BIN)] += 1
    systems: dict[str, Any] = {}
    for name in names:
        run = served(model, choice(model, name), load, ALPHA, seed)
        met = {tier: [0] * bins for tier in tiers}
        tokens = [0.0] * bins
        for arrival, kept, output in zip(load.arrivals, run.met, run.output, strict=True):
            met[arrival.tier][int(arrival.at / BIN)] += kept
            tokens[int(arrival.at / BIN)] += kept * output / BIN
        systems[name] = run.summary() | {"met": met, "goodput_by_time": tokens}
    return {
        "model": model, "rate": rate, "seed": seed, "requests": len(load.arrivals), "seconds": seconds, "came": came,
        "systems": systems,
    }  # fmt: skip


def worst(run: Mapping[str, Any], came: Mapping[str, Sequence[int]]) -> float:
    """The share attained in the worst 30 s."""
    met, all_ = (np.sum(list(counts.values()), axis=0) for counts in (run["met"], came))
    return float(np.min(met[all_ > 0] / all_[all_ > 0]))


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {}
    for model in MODELS:
        own = [v for v in values if v["model"] == model] or values
        most = max(v["rate"] for v in own)
        own = [v for v in own if v["rate"] == most]
        for which, systems in (("", PAPER), ("-tuned", TUNED)):
            estimates[f"{model}-attained{which}"] = over_seeds(
                [100 * (v["systems"][OURS]["share"] - best_of(v["systems"], systems)) for v in own]
            )
        estimates[f"{model}-violations"] = over_seeds(
            [
                float(np.log(fewer(v["systems"][OURS]["share"], best_of(v["systems"], TUNED), v["requests"])))
                for v in own
            ]
        ).exp()
        estimates[f"{model}-worst-half-minute"] = over_seeds(
            [
                100 * (w[OURS] - max(w[name] for name in TUNED if name in w))
                for w in ({n: worst(run, v["came"]) for n, run in v["systems"].items()} for v in own)
            ]
        )
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", {"rates": list(RATES)})


def tables(data: Any) -> str:
    parts = []
    for model, rate in dict.fromkeys((v["model"], v["rate"]) for v in data):
        own = [v for v in data if (v["model"], v["rate"]) == (model, rate)]
        tiers = list(own[0]["came"])
        rows = [[f"{model}, {rate:.2f} requests/s", "attained", *tiers, "worst 30 s", "goodput"]]
        for name in own[0]["systems"]:
            runs = [v["systems"][name] for v in own]
            low = [worst(v["systems"][name], v["came"]) for v in own]
            numbers = [np.mean([r["share"] for r in runs])]
            numbers += [np.mean([r["by_tier"].get(tier, np.nan) for r in runs]) for tier in tiers]
            numbers += [np.mean(low)]
            goodput = np.mean([r["goodput"] for r in runs])
            rows.append([name, *(f"{n:.3f}" for n in numbers), f"{goodput:.0f}"])
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def draw(data: Any, axes: Any) -> None:
    """Share attained by time of arrival, the fastest rate's first seed."""
    run = max(data, key=lambda v: float(v["rate"]))
    all_ = [sum(n) for n in zip(*run["came"].values(), strict=True)]
    times = [BIN * (i + 0.5) for i in range(len(all_))]
    for name, system in run["systems"].items():
        met = [sum(n) for n in zip(*system["met"].values(), strict=True)]
        axes.plot(times, [m / n if n else np.nan for m, n in zip(met, all_, strict=True)], label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("attained")
    axes.legend(fontsize=7)
