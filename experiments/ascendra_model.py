"""Ascendra's performance model: the error of `operation_count` over time, from a cold start.

One replica under Sarathi (budget 512: hybrid batches), `ascendra-sharegpt4-*`, Poisson, ten minutes; step times are the
profile's, made of kernel tables, with 5 % of noise. The model knows the network's dimensions and the A100's two rates,
and begins with default coefficients. Each step is predicted before it is learnt from. Errors are relative, absolute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from rubato.core.events import Stepped
from rubato.core.plan import Sample
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import profiles
from rubato.latency.fit import blank
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate_events
from rubato.workloads import scenarios

SOURCE = "Ascendra, §5.1 and Fig. 6"
SECONDS = 33.0

MODELS = {"mistral": 1.2, "llama": 1.2, "qwen": 0.7}  # requests/s of one replica: about three quarters of its capacity
DURATION, AFTER, BUCKET = 600.0, 300.0, 30.0  # seconds
NOISE = 0.05
SEEDS = (1, 2, 3)


def jobs(small: bool) -> list[Job]:
    seeds, duration = (SEEDS[:1], 60.0) if small else (SEEDS, DURATION)
    return [Job(f"{model} seed={seed}", learnt, (model, duration, seed)) for model in MODELS for seed in seeds]


def learnt(model: str, duration: float, seed: int) -> dict[str, Any]:
    """Median and P90 of errors by time, and of all steps in the second half."""
    scenario = scenarios.get(f"ascendra-sharegpt4-{model}")
    machine, believed = packaged_hardware(scenario.profile), blank("operation_count", profiles.load(scenario.profile))
    load = scenarios.make(f"ascendra-sharegpt4-{model}", MODELS[model], duration=duration, seed=seed)
    spec = RunSpec(machine, PolicyChoice("sarathi", {"budget": 512}), noise=NOISE, lengths=oracle_lengths)
    times, errors, prefills = [], [], []
    for event in simulate_events(list(load.requests()), load.truth(), spec, seed):
        if isinstance(event, Stepped) and event.shape.tokens and event.at <= duration:
            times.append(event.at)
            errors.append(abs(believed.step_time(event.shape) / event.seconds - 1.0))
            prefills.append(event.shape.chunks > 0)
            believed.update(Sample(event.shape, event.seconds))
    at, error, prefill = np.array(times), np.array(errors), np.array(prefills)
    late = at >= duration * AFTER / DURATION
    bucket = duration * BUCKET / DURATION
    series = [error[(at >= begin) & (at < begin + bucket)] for begin in np.arange(0.0, duration, bucket)]
    return {
        "model": model, "seed": seed, "steps": len(at), "bucket": bucket,
        "p50": [float(np.median(own)) for own in series if len(own)],
        "p90": [float(np.quantile(own, 0.9)) for own in series if len(own)],
        "late_p50": float(np.median(error[late])), "late_p90": float(np.quantile(error[late], 0.9)),
        "late_prefill_p50": float(np.median(error[late & prefill])),
        "late_below_10": float(np.mean(error[late] < 0.1)),
    }  # fmt: skip


def found(values: Sequence[Any], small: bool) -> Found:
    def of(model: str, number: str) -> list[float]:
        return [100 * v[number] for v in values if v["model"] == model]

    estimates = {f"median-{model}": over_seeds(of(model, "late_p50")) for model in MODELS}
    estimates |= {f"p90-{model}": over_seeds(of(model, "late_p90")) for model in MODELS}
    seeds = sorted({v["seed"] for v in values})
    return Found(estimates, list(values), seeds, "none", {"noise": NOISE, "rates": MODELS, "duration": DURATION})


def draw(data: Any, axes: Any) -> None:
    """Median and P90 of the error, by minutes since the cold start; the mean of the seeds."""
    for i, model in enumerate(dict.fromkeys(v["model"] for v in data)):
        own = [v for v in data if v["model"] == model]
        for number, style in (("p50", "-"), ("p90", ":")):
            length = min(len(v[number]) for v in own)
            means = 100 * np.mean([v[number][:length] for v in own], axis=0)
            minutes = own[0]["bucket"] / 60 * (np.arange(length) + 0.5)
            axes.plot(minutes, means, style, color=f"C{i}", label=f"{model}, {'median' if number == 'p50' else 'P90'}")
    axes.axhline(10.0, color="grey", linewidth=0.8)
    name_axes(axes, "minutes since a cold start", "relative error of a step (%)")


def tables(data: Any) -> str:
    rows = [["model", "median, first 30 s", "median after minute 5", "P90", "median with prefill", "below 10 %"]]
    for model in dict.fromkeys(v["model"] for v in data):
        own = [v for v in data if v["model"] == model]
        mean = {key: 100 * np.mean([v[key] for v in own]) for key in own[0] if key.startswith("late")}
        first = 100 * np.mean([v["p50"][0] for v in own])
        rows.append(
            [model, f"{first:.1f} %", *(f"{mean[key]:.1f} %" for key in
             ("late_p50", "late_p90", "late_prefill_p50", "late_below_10"))]
        )  # fmt: skip
    return markdown(rows)
