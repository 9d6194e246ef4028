"""R² of SLOs-Serve's performance model, its times of batches against executed ones, by model, TP and GPU (Fig. 10b).

The roofline of §3.1.1, two planes over the tokens of a batch and the draft steps run, is fitted to the batches that
SLOs-Serve executes in one half of a run and predicts those of the other half. Batches of a GPU are the packaged
profile's: kernel times measured on that GPU, added up, with 5 % of noise. The paper reports R² of 0.82 to 0.93. Beside
it our `affine` model, which also sees KV and prefill attention. Rates are ours, about 0.9 of what a replica holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._executed_batches import Replica, executed, jobs_of
from rubato.latency.fit import blank, error_report
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "SLOs-Serve, Fig. 10(b), §3.1.1 and §6.5"
SECONDS = 60.0

REPLICAS = {
    "opt-7b": Replica("opt-6.7b-a100-40g@vllm-2024", "mixed", 3.0),
    "opt-7b-drafts": Replica("opt-6.7b-a100-40g@vllm-2024", "mixed", 3.0, drafts=True),
    "opt-13b-tp2": Replica("opt-13b-2xa100-40g@vllm-2024", "mixed", 3.2),
    "opt-30b-tp4": Replica("opt-30b-4xa100-40g@vllm-2024", "mixed", 3.0),
    "opt-13b-h100": Replica("opt-13b-h100@vllm-2024", "mixed", 5.0),
    "toolllama-7b": Replica("llama-2-7b-a100-40g@vllm-2024", "toolllm", 0.18),
}
POLICY, NOISE = "slos_serve", 0.05
MODELS = ("roofline", "affine")
SEEDS, COUNT, FEW = (1, 2, 3), 300, 24
POINTS = 200  # of a replica that the picture has, of the first seed


def jobs(small: bool) -> list[Job]:
    return jobs_of(REPLICAS, measured, SEEDS, COUNT, FEW, small)


def measured(name: str, count: int, seed: int) -> dict[str, Any]:
    """Errors of each model on the second half of a run's batches, fitted on the first."""
    samples = executed(REPLICAS[name], POLICY, count, seed, NOISE)
    fitted, rest = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    value: dict[str, Any] = {"replica": name, "seed": seed, "batches": len(rest)}
    for kind in MODELS:
        model = blank(kind)
        model.fit(fitted)
        report = error_report(model, rest)
        value[kind] = {"r2": report.r2, "p50": report.p50, "p95": report.p95}
        if kind == MODELS[0] and seed == SEEDS[0]:
            some = rest[:: max(1, len(rest) // POINTS)]
            value["points"] = [[round(model.step_time(s.shape), 5), round(s.seconds, 5)] for s in some]
    return value


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {
        f"{name}-r2": over_seeds([v["roofline"]["r2"] for v in values if v["replica"] == name]) for name in REPLICAS
    }
    settings = {
        "policy": POLICY, "noise": NOISE, "count": FEW if small else COUNT,
        "replicas": {name: [own.profile, own.scenario, own.rate] for name, own in REPLICAS.items()},
    }  # fmt: skip
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "none", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Means of the seeds."""
    rows = [["replica", "batches", *(f"{kind}: R²" for kind in MODELS), *(f"{kind}: p50, p95" for kind in MODELS)]]
    for name in REPLICAS:
        own = [v for v in data if v["replica"] == name]
        mean = {(kind, key): np.mean([v[kind][key] for v in own]) for kind in MODELS for key in own[0][kind]}
        rows.append([
            name, f"{np.mean([v['batches'] for v in own]):.0f}", *(f"{mean[kind, 'r2']:.3f}" for kind in MODELS),
            *(f"{100 * mean[kind, 'p50']:.1f} %, {100 * mean[kind, 'p95']:.1f} %" for kind in MODELS),
        ])  # fmt: skip
    return f"Errors on batches that were not fitted, |predicted − executed| / executed:\n\n{markdown(rows)}"


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """A point a batch: predicted against executed."""
    most = 0.0
    for value in data:
        if "points" in value:
            predicted, executed_ = 1e3 * np.array(value["points"]).T
            axes.plot(predicted, executed_, ".", markersize=3, label=value["replica"])
            most = max(most, float(executed_.max()))
    axes.plot([0.0, most], [0.0, most], color="grey", linewidth=0.8)
    name_axes(axes, "predicted by the roofline (ms)", "executed (ms)")
