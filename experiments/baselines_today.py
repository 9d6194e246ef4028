"""Baselines of today: SCORPIO, QoServe and JITServe on SLOs-Serve's scenarios, LMetric as router of four replicas.

`scorpio`, `qoserve` and `jitserve` beside `edf`, `sarathi`, `vllm`, `slos_serve` and `rubato`, on one replica: 90 % of
all requests offered, 95 % of all, 90 % of each tier; Reasoning is left out. Machinery, settings and requests are those
of the figure `rubato-replica`, with fewer requests and seeds: lengths are learnt, steps are off by 5 %, each system is
tuned for each measure on requests of one seed and measured on others. The fleet: Mixed on four replicas of
`slos_serve`, placed by its own router, which hands on what a replica declines, by `least_loaded` and by `lmetric`; no
prefixes are shared there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside
from experiments._rate_search import geometric
from experiments._rubato_runs import GRID, NOISE
from experiments.rubato_replica import LEAST, LONGEST, OURS, STARTS, SYSTEMS, TODAY, Table, measured, settings
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES

SOURCE = "ours; scenarios of SLOs-Serve, §6.1"
SECONDS = 1000.0

BESIDE = ("vllm", "sarathi", "edf", "slos_serve", OURS)
COUNT, SEEDS = 150, (1, 2, 3)
SMALL = ("sarathi", "edf", OURS, *TODAY)
FLEET, REPLICAS, FLEET_COUNT = "mixed", 4, 80  # requests of a run, of each replica
ROUTERS = {"slos_serve": "slos_serve", "least_loaded": "slos_serve@least_loaded", "lmetric": "slos_serve@lmetric"}
NAMES = dict(zip(MEASURES, ("90", "95", "each"), strict=True))


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        made = [Job(f"coder {name}", measured, ("coder", name, settings(name)[:1], (1,), 20)) for name in SMALL]
        return [*made, *(Job(f"2 × coder {router}", fleet, ("coder", router, (1,), 10, 2)) for router in ROUTERS)]
    names = beside((*BESIDE, *TODAY), policy)
    made = [
        Job(f"{load} {name}", measured, (load, name, settings(name), SEEDS, COUNT))
        for load in STARTS for name in names if load != LONGEST
    ]  # fmt: skip
    routed = (
        Job(f"{REPLICAS} × {FLEET} {router}", fleet, (FLEET, router, SEEDS, FLEET_COUNT, REPLICAS))
        for router in ROUTERS
    )
    return [*made, *routed]


def fleet(load: str, router: str, seeds: Sequence[int], count: int, replicas: int) -> dict[str, Any]:
    """What this router's fleet holds; `count` requests a replica."""
    return measured(load, router, (ROUTERS[router],), seeds, count * replicas, replicas) | {"replicas": replicas}


# --------------------------------------------------------------------------- what was found


class Ratios(Table):
    """Of any system over any other, by seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__([v for v in values if "replicas" not in v])
        self.routers = {v["name"]: v for v in values if "replicas" in v}

    def over(self, name: str, base: str, measure: str) -> Estimate:
        """Geometric mean over scenarios."""
        logs = [np.log(self.goodput(load, name, measure) / self.goodput(load, base, measure)) for load in self.loads]
        return over_seeds([float(x) for x in np.mean(logs, axis=0)]).exp()

    def of_fleet(self, router: str, measure: str) -> Any:
        value = self.routers[router]
        return np.maximum(value["measures"][measure]["goodput"], LEAST * value["start"])

    def fleet_over(self, router: str, base: str, measure: str) -> Estimate:
        return geometric(self.of_fleet(router, measure) / self.of_fleet(base, measure))


def found(values: Sequence[Any], small: bool) -> Found:
    ratios = Ratios(values)
    estimates = {}
    for measure, name in NAMES.items():
        for own in TODAY if name == "90" else ():
            for base in ("edf", "sarathi"):
                estimates[f"{own}-over-{base}-{name}"] = ratios.over(own, base, measure)
        estimates[f"rubato-over-best-{name}"] = ratios.mean(ratios.loads, measure)
        for base in ("least_loaded", "slos_serve"):
            estimates[f"lmetric-over-{base.replace('_', '-')}-{name}"] = ratios.fleet_over("lmetric", base, measure)
    given = {
        "systems": {name: list(SYSTEMS[name]) for name in (*BESIDE, *TODAY)}, "routers": ROUTERS, "replicas": REPLICAS,
        "count": COUNT, "fleet_count": FLEET_COUNT, "noise": NOISE, "grid": GRID, "lengths": "conditional_mean",
    }  # fmt: skip
    return Found(estimates, list(values), SEEDS[:1] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """Where a baseline of today holds most over ours first; then requests/s of each system."""
    ratios = Ratios(data)
    rows = []
    for measure in MEASURES:
        for load in ratios.loads:
            held = {
                name: float(np.mean(ratios.goodput(load, name, measure)))
                for known, name in ratios.values
                if known == load
            }
            best = max((name for name in TODAY if name in held), key=lambda name: held[name])
            setting = ratios.values[load, best]["measures"][measure]["setting"]
            over = [held[best] / held[base] for base in (OURS, "edf", "sarathi")]
            rows.append((-over[0], [load, measure, f"`{setting}`", *(f"{x:.2f}" for x in over)]))
    head = ["load", "measure", "the better baseline of today", "over `rubato`", "over `edf`", "over `sarathi`"]
    parts = [f"Losses of ours first:\n\n{markdown([head, *(row for _, row in sorted(rows))])}"]
    for measure in MEASURES:
        names = list(dict.fromkeys(name for _, name in ratios.values))
        rates = [
            [load, *(f"{float(np.mean(ratios.goodput(load, name, measure))):.3g}" for name in names)]
            for load in ratios.loads
        ]  # fmt: skip
        parts.append(f"{measure}, requests/s:\n\n{markdown([['load', *(f'`{name}`' for name in names)], *rates])}")
    routed = [
        [measure, *(f"{float(np.mean(ratios.of_fleet(router, measure))):.3g}" for router in ratios.routers)]
        for measure in MEASURES
    ]  # fmt: skip
    one = next(iter(ratios.routers.values()))
    head = [
        f"{one['load']}, {one['replicas']} replicas of `slos_serve`, requests/s",
        *(f"`{router}`" for router in ratios.routers),
    ]
    return "\n\n".join([*parts, markdown([head, *routed])])
