"""Admitted requests that miss under SLOs-Serve where step times differ from predictions, by margin.

Three of the paper's scenarios are offered beyond one replica's capacity, so that requests are declined and batches are
full. Step times are those of an affine model fitted to the profile (median error below 2 %), times a lognormal factor
drawn anew for each step. The scheduler begins with that model and goes on learning, as it does live. An admitted
request that misses counts, also where it was demoted before. Output lengths are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from experiments import Found
from experiments._recording_slos_serve import PromiseLog
from experiments._slos_serve_runs import FULL, SMALL, Scale, hardware, load
from rubato.core.plan import Sample, Shape
from rubato.fleet.cluster_options import PolicyChoice
from rubato.latency import affine
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate

SOURCE = "ours; SLOs-Serve, §4.1, plans by predicted times"
SECONDS = 150.0

POLICY = "experiments._recording_slos_serve"
RATES = {"chatbot": 5.0, "coder": 2.2, "mixed": 6.0}  # requests/s, 1.2 to 1.3 times what it holds
NOISES = (0.0, 0.1, 0.2)  # relative spread of step times
MARGINS = (0.0, 0.05, 0.1, 0.2, None)  # None: the default, as much as the model has been off
DEFAULT = "default"
_SHAPES = 63  # random stream


def jobs(small: bool) -> list[Job]:
    scale = SMALL if small else FULL
    return [
        Job(
            f"{scenario} noise={noise} margin={_name(margin)} seed={seed}", kept, (scenario, noise, margin, seed, small)
        )
        for scenario in RATES
        for noise in NOISES
        for margin in MARGINS
        for seed in scale.seeds
    ]


def _name(margin: float | None) -> str:
    return DEFAULT if margin is None else f"{margin:g}"


@cache
def learning(scenario: str, scale: Scale) -> Hardware:
    """The scenario's machine with a latency model that learns."""
    machine = hardware(scenario, scale)
    draw, limits, model = np.random.default_rng(_SHAPES), machine.limits, affine.Model()
    samples = []
    for _ in range(400):
        decodes = int(draw.integers(1, limits.max_num_seqs))
        shape = Shape(decodes, decodes, decodes * int(draw.integers(50, 1500)))
        if draw.random() < 0.6:
            shape = shape.plus(
                int(draw.integers(16, limits.max_num_batched_tokens - decodes)), int(draw.integers(1000))
            )
        samples.append(Sample(shape, machine.model.step_time(shape)))
    model.fit(samples)
    return replace(machine, model=model)


def kept(scenario: str, noise: float, margin: float | None, seed: int, small: bool) -> dict[str, Any]:
    """Promises made and broken, and requests attained of all offered."""
    scale, log = SMALL if small else FULL, PromiseLog()
    choice = PolicyChoice(POLICY, {"safety_margin": margin, "log": log})
    setting = RunSpec(learning(scenario, scale), choice, noise=noise, lengths=oracle_lengths, learns=True)
    offered = load(scenario, seed, scale).rescaled(RATES[scenario])
    run = simulate(offered, setting, seed, times=False, causes=False)
    met = {r.id: r.verdict.met for r in run.records}
    return {
        "scenario": scenario, "noise": noise, "margin": _name(margin), "seed": seed,
        "offered": len(met), "attained": sum(met.values()), "promised": len(log.promised),
        "broken": sum(not met[id] for id in log.promised), "came_to": float(np.mean(log.margins)),
        "unfinished": sum(r.outcome != "completed" for r in run.records),
        "seconds": run.workload.duration, "e2e_p99": e2e_p99(run),
    }  # fmt: skip


def found(values: Sequence[Any], small: bool) -> Found:
    estimates = {}
    for noise in NOISES:
        for margin in MARGINS:
            broken = _by_seed(values, noise, margin, "broken", "promised")
            estimates[f"broken-{100 * noise:g}-{_name(margin)}"] = over_seeds(broken)
    for noise in NOISES[1:]:
        shares = [_by_seed(values, noise, margin, "attained", "offered") for margin in (None, 0.0)]
        estimates[f"attained-{100 * noise:g}"] = over_seeds([a - b for a, b in zip(*shares, strict=True)])
        own = [v["came_to"] / noise for v in values if (v["noise"], v["margin"]) == (noise, DEFAULT)]
        estimates[f"default-{100 * noise:g}"] = Estimate(float(np.mean(own)), min(own), max(own))
    estimates["unfinished"] = Estimate.exact(sum(v["unfinished"] for v in values))
    scale = SMALL if small else FULL
    return Found(estimates, list(values), scale.seeds, "deadline", {"rates": RATES, "lengths": "oracle"})


def _by_seed(values: Sequence[Any], noise: float, margin: float | None, part: str, whole: str) -> list[float]:
    """All scenarios together."""
    own = [v for v in values if (v["noise"], v["margin"]) == (noise, _name(margin))]
    seeds = [[v for v in own if v["seed"] == seed] for seed in dict.fromkeys(v["seed"] for v in own)]
    return [sum(v[part] for v in seed) / max(1, sum(v[whole] for v in seed)) for seed in seeds]


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Broken of promised, and attained of offered, by scenario, noise and margin."""
    rows = [["scenario", "noise", *(f"margin {_name(margin)}" for margin in MARGINS)]]
    for scenario in RATES:
        for noise in NOISES:
            own = [v for v in data if (v["scenario"], v["noise"]) == (scenario, noise)]
            row = [scenario, f"{noise:g}"]
            for margin in MARGINS:
                sums = {
                    key: sum(v[key] for v in own if v["margin"] == _name(margin))
                    for key in ("broken", "promised", "attained", "offered")
                }
                row.append("{broken}/{promised}, {attained}/{offered}".format(**sums) if sums["offered"] else "")
            rows.append(row)
    return f"Promises broken, and attained of offered, all seeds:\n\n{markdown(rows)}"
