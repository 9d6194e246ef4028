"""Attainment and goodput of AdaServe and baselines by the share of urgent requests, 4.0 requests/s (Fig. 10).

Urgent is code, at 1.2 × the unloaded time per token; chat and summaries share the rest evenly (the paper does not say).
Else as `adaserve-rate`, unequal acceptance, token budgets of 256 and 1,024, 30 s a run; a ratio is the largest of the
three shares', on average over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments import Found
from experiments._adaserve_runs import MODELS, Sweep, with_ttft
from rubato.planning.jobs import Job
from rubato.workloads import Workload, scenarios

SOURCE = "AdaServe, §6.2 and Fig. 10"
SECONDS = 126.0
RATE = 4.0


def load(model: str, seconds: float, share: float, seed: int) -> Workload:
    of = MODELS[model]
    kinds = scenarios.categories(of.unloaded, (share, (1.0 - share) / 2, (1.0 - share) / 2))
    return with_ttft(scenarios.make(of.scenario, RATE, duration=seconds, seed=seed, kinds=kinds))


def measured(
    model: str, shares: Sequence[float], seconds: float, seeds: Sequence[int], trace: str | None, policy: str | None
) -> list[dict[str, Any]]:
    return SWEEP.measured(model, shares, partial(load, model, seconds), seeds, policy)


SWEEP = Sweep("urgent", "share of urgent requests", (0.1, 0.5, 0.9), measured, (0.5,))


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    return SWEEP.jobs(small, policy=policy)


def found(values: Sequence[Any], small: bool) -> Found:
    return SWEEP.found(values, {"rate": RATE, "shares": list(SWEEP.at)})


tables, draw = SWEEP.tables, SWEEP.draw
