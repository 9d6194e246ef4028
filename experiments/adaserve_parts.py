"""AdaServe's gain, taken apart: admission alone, trees alone, both (§6.2's mix, two models).

Code, chat and summaries as in `adaserve-rate`, unequal acceptance, a TTFT of 2 s, 45 s, at rates where baselines miss
half. Neither: `vllm_spec` with chains of 2 or 4, or `smart_spec`. Admission: the same behind `adaserve`'s
(`policy_kit.paced_admission`). Trees: `adaserve` without it, so that all run, and all begin in order. These are tuned
over token budgets of 256 to 1,024 (of trees: prompt tokens of a step) on seed 0, over the rates of a model together.
Both: `adaserve` as it comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._adaserve_runs import JUDGE, JUDGES, MODELS, OURS, REAL, SEEDS, TTFT, choice, offered, served
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "AdaServe, §6.2, taken apart"
SECONDS = 200.0

RATES = {"llama": (6.0, 7.0), "qwen": (7.5, 9.0)}
RUN, BUDGETS = 45.0, (256, 512, 1024)
CHAINS: Sequence[tuple[str, dict[str, int]]] = (("vllm_spec", {"n": 2}), ("vllm_spec", {"n": 4}), ("smart_spec", {}))
NEITHER, ADMISSION, TREES, BOTH = "neither", "admission", "trees", "both"


def written(name: str, **settings: object) -> str:
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in settings.items())


def candidates(model: str, budgets: Sequence[int]) -> dict[str, list[str]]:
    """Of each part what it is chosen from."""
    trees = choice(model, "adaserve").partition(":")[2]
    bounds = f",{trees}" if trees else ""
    return {
        NEITHER: [written(name, **own, budget=b) for name, own in CHAINS for b in budgets],
        ADMISSION: [
            written("experiments._paced", inner=name, **own, budget=b) for name, own in CHAINS for b in budgets
        ],
        TREES: [f"experiments._trees_alone:prefill_chunk={b}{bounds}" for b in budgets],
        BOTH: [choice(model, OURS)],
    }


def jobs(small: bool) -> list[Job]:
    if small:
        return [Job("llama", measured, ("llama", RATES["llama"][:1], BUDGETS[:1], 2.0, SEEDS[:1]))]
    return [Job(model, measured, (model, rates, BUDGETS, RUN, SEEDS)) for model, rates in RATES.items()]


def measured(
    model: str, rates: Sequence[float], budgets: Sequence[int], seconds: float, seeds: Sequence[int]
) -> list[dict[str, Any]]:
    def run(policy: str, rate: float, seed: int) -> dict[str, Any]:
        return served(model, policy, offered(model, rate, seconds, seed), REAL, seed).summary()

    chosen = {}
    for part, policies in candidates(model, budgets).items():
        shares = {p: sum(run(p, rate, 0)["share"][JUDGE] for rate in rates) for p in policies if len(policies) > 1}
        chosen[part] = max(shares, key=shares.__getitem__) if shares else policies[0]
    return [
        {"model": model, "rate": rate, "seed": seed, "part": part, "policy": policy, **run(policy, rate, seed)}
        for rate in rates for seed in seeds for part, policy in chosen.items()
    ]  # fmt: skip


def ahead(values: Sequence[Any], part: str, than: str) -> Estimate:
    """Points by which a part attains more than another, mean over rates, over seeds."""

    def share(seed: int, name: str) -> float:
        return float(np.mean([v["share"][JUDGE] for v in values if (v["seed"], v["part"]) == (seed, name)]))

    return over_seeds([100 * (share(s, part) - share(s, than)) for s in sorted({v["seed"] for v in values})])


def found(jobs: Sequence[Any], small: bool) -> Found:
    values, estimates = [v for of_job in jobs for v in of_job], {}
    for model in MODELS:
        own = [v for v in values if v["model"] == model] or values  # a small run has one model
        for name, part, than in (
            ("admission", ADMISSION, NEITHER), ("trees", TREES, NEITHER), ("both", BOTH, NEITHER),
            ("trees-behind-admission", BOTH, ADMISSION),
        ):  # fmt: skip
            estimates[f"{model}-{name}"] = ahead(own, part, than)
    seeds = sorted({v["seed"] for v in values})
    return Found(estimates, values, seeds, "mean", {"ttft": TTFT, "acceptance": REAL, "seconds": RUN})


def tables(values: Sequence[Any]) -> str:
    rows = [["model, requests/s", "part", "policy", *JUDGES, "least tier", "TTFT P99, s"]]
    for model, rate, part in dict.fromkeys((v["model"], v["rate"], v["part"]) for v in values):
        own = [v for v in values if (v["model"], v["rate"], v["part"]) == (model, rate, part)]
        rows.append([
            f"{model}, {rate:g}", part, f"`{own[0]['policy']}`",
            *(f"{np.mean([v['share'][judge] for v in own]):.3f}" for judge in JUDGES),
            f"{np.mean([min(v['by_tier'].values()) for v in own]):.2f}",
            f"{np.mean([v['ttft_p99'] for v in own]):.1f}",
        ])  # fmt: skip
    return markdown(rows)
