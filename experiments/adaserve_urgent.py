"""Attainment and goodput of AdaServe and baselines by the share of urgent requests, 4.0 requests/s (Fig. 10).

Urgent is code, at 1.2 × the unloaded time per token; chat and summaries share the rest evenly (the paper does not say).
Else as `adaserve-rate`, 90 s a run; a ratio is the largest of the three shares', on average over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import Found
from experiments._adaserve_runs import MODELS, Sweep
from rubato.planning.jobs import Job
from rubato.workloads import scenarios

SOURCE = "AdaServe, §6.2 and Fig. 10"
SECONDS = 310.0
RATE = 4.0


def measured(
    model: str, share: float, seconds: float, seed: int, trace: str | None, policy: str | None
) -> dict[str, Any]:
    of = MODELS[model]
    kinds = scenarios.categories(of.unloaded, (share, (1.0 - share) / 2, (1.0 - share) / 2))
    load = scenarios.make(of.scenario, RATE, duration=seconds, seed=seed, kinds=kinds)
    return SWEEP.measured(model, share, load, seed, policy)


SWEEP = Sweep("urgent", "share of urgent requests", (0.1, 0.5, 0.9), measured, (0.5,))


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    return SWEEP.jobs(small, policy=policy)


def found(values: Sequence[Any], small: bool) -> Found:
    return SWEEP.found(values, {"rate": RATE, "shares": list(SWEEP.at)})


tables, draw = SWEEP.tables, SWEEP.draw
