"""Attainment and goodput of AdaServe and baselines by the scale of the urgent SLO, 4.0 requests/s (Fig. 11).

Scale 1 is 1.0 × the unloaded time per token of code, 60 % of the requests; other SLOs stay as they are. Else as
`adaserve-rate`, unequal acceptance, token budgets of 256 and 1,024, 30 s a run (with `--trace` the whole stream); a
ratio is the largest of the scales', on average over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from experiments import Found
from experiments._adaserve_runs import MODELS, TTFT, Sweep, offered
from rubato.core.request import SLO
from rubato.planning.jobs import Job
from rubato.workloads import Workload

SOURCE = "AdaServe, §6.2 and Fig. 11"
SECONDS = 116.0
RATE = 4.0


def load(model: str, seconds: float, trace: str | None, scale: float, seed: int) -> Workload:
    slo = SLO(ttft=TTFT, tpot=scale * MODELS[model].unloaded)
    return offered(model, RATE, seconds, seed, trace).with_slos({"code": slo})


def measured(
    model: str, scales: Sequence[float], seconds: float, seeds: Sequence[int], trace: str | None, policy: str | None
) -> list[dict[str, Any]]:
    return SWEEP.measured(model, scales, partial(load, model, seconds, trace), seeds, policy)


SWEEP = Sweep("scale", "urgent TPOT in unloaded ones", (0.6, 1.0, 1.6), measured, (1.0,))


def jobs(small: bool, trace: str | None = None, policy: str | None = None) -> list[Job]:
    return SWEEP.jobs(small, trace, policy)


def found(values: Sequence[Any], small: bool) -> Found:
    return SWEEP.found(values, {"rate": RATE, "scales": list(SWEEP.at)})


tables, draw = SWEEP.tables, SWEEP.draw
