"""PolyServe's cost: replica-seconds a request in SLO with as many replicas as it takes, beside CO-Chunk (Fig. 8).

Uniform-4096-1024 at three rates. polyserve has more replicas than it needs, and pays for those that serve a tier,
prefill or drain, not for the pool's. CO-Chunk has its budget and its router swept, and the fewest replicas at which
90 % attain; it pays for all of them, all the time. Both are over the time in which the requests counted come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments._axes import name_axes
from experiments._fleet_roles import FleetRoles
from experiments._polyserve_runs import CHUNKS, MODES, OURS, REPLICAS
from experiments._rate_search import share
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "PolyServe, §5.4 and Fig. 8"
SECONDS = 200.0

DATA, HOST = "uniform-4096-1024", "constant"
LOADS = (0.2, 0.6, 1.0)  # of the optimum of 20 replicas, co-located
POOL, ROOM = "best_effort", 3.0  # replicas given to polyserve, over those that the optimum needs
SEEDS, STAYS, TARGET = (1, 2, 3), 1.0, 0.9


def jobs(small: bool) -> list[Job]:
    if small:
        return [Job("0.1 seed=1", measured, (0.1, 1, 0.3, 0.1, CHUNKS[1:2]))]
    return [
        Job(f"{load} seed={seed}", measured, (load, seed, STAYS, runs.BEFORE, CHUNKS))
        for seed in SEEDS for load in LOADS
    ]  # fmt: skip


class Window:
    """Requests at one load; those from `first` to `last` are counted. enough: replicas for whom no load is too much."""

    def __init__(self, load: float, seed: int, stays: float, fill: float) -> None:
        self.rate = load * REPLICAS * runs.best_rate(DATA, HOST, "co")
        self.enough = max(6, round(ROOM * load * REPLICAS))
        busy = max(1, round(load * REPLICAS))
        count = runs.coming_in(DATA, HOST, busy, stays)
        self.first = runs.coming_in(DATA, HOST, busy, fill)
        self._offered = runs.offered(DATA, HOST, count, seed, busy, fill).rescaled(self.rate)
        self.last = min(self.first + count, len(self._offered.arrivals) - 1)
        self.start, self.end = (self._offered.arrivals[i].at for i in (self.first, self.last))

    def attained(self, choice: str, replicas: int, listen: Any = None) -> float:
        ran = runs.served(self._offered, DATA, HOST, choice, replicas, listen=listen)
        return share(ran.records[self.first : self.last])

    def paid(self, choice: str) -> tuple[float, float]:
        """Replica-seconds a request in SLO, the pool's apart, and the share in SLO, with more replicas than needed."""
        roles = FleetRoles()
        attained = self.attained(choice, self.enough, roles)
        spent = sum(spent for role, spent in roles.seconds(self.start, self.end).items() if role != POOL)
        return spent / (attained * (self.last - self.first)), attained


def measured(load: float, seed: int, stays: float, fill: float, choices: Sequence[str]) -> dict[str, Any]:
    """cost: replica-seconds a request in SLO, so that one that is given up saves nothing; attained: share in SLO."""
    window = Window(load, seed, stays, fill)
    attained, enough, rate = window.attained, window.enough, window.rate
    cost: dict[str, float] = {}
    shares: dict[str, float] = {}
    for mode in MODES:
        cost[mode], shares[mode] = window.paid(OURS[mode])
    fewest, best = 2 * enough, ""
    for choice in choices:
        if attained(choice, fewest - 1) < TARGET:
            continue
        low, high = 0, fewest - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if attained(choice, middle) >= TARGET else (middle, high)
        fewest, best = high, choice
    if not best:
        raise ValueError(f"no setting of CO-Chunk attains {TARGET:g} with {fewest - 1} replicas at {rate:.4g}/s")
    shares["CO-Chunk"] = attained(best, fewest)
    spent = fewest * (window.end - window.start)
    cost["CO-Chunk"] = spent / (shares["CO-Chunk"] * (window.last - window.first))
    return {"load": load, "seed": seed, "rate": rate, "cost": cost, "attained": shares,
            "replicas": fewest, "setting": best}  # fmt: skip


def found(values: Sequence[Any], small: bool) -> Found:
    loads = sorted({v["load"] for v in values})
    seeds = sorted({v["seed"] for v in values})
    estimates = {}
    for mode in MODES:
        ratio = {(v["load"], v["seed"]): v["cost"][mode] / v["cost"]["CO-Chunk"] for v in values}
        means = [over_seeds([ratio[load, seed] for seed in seeds]) for load in loads]
        estimates[f"{mode}-dearest"] = max(means, key=lambda e: e.value)
        estimates[f"{mode}-attained"] = over_seeds(
            [min(v["attained"][mode] for v in values if v["seed"] == seed) for seed in seeds]
        )
    settings = {"data": DATA, "host": HOST, "loads": loads, "CO-Chunk": CHUNKS, "room": ROOM}
    return Found(estimates, list(values), seeds, "deadline", settings)


def draw(data: Any, axes: Any) -> None:
    """Cost of a request in SLO over the rate."""
    loads = sorted({v["load"] for v in data})
    rates = [np.mean([v["rate"] for v in data if v["load"] == load]) for load in loads]
    for name in data[0]["cost"]:
        costs = [np.mean([v["cost"][name] for v in data if v["load"] == load]) for load in loads]
        axes.plot(rates, costs, marker="o", label=name if name == "CO-Chunk" else f"polyserve {name}")
    name_axes(axes, "requests/s", "replica-seconds a request in SLO", from_zero=True)


def tables(data: Any) -> str:
    head = [f"{n}, replica-seconds a request in SLO (in SLO)" for n in data[0]["cost"]]
    rows = [["requests/s", *head, "replicas of CO-Chunk"]]
    for load in sorted({v["load"] for v in data}):
        own = [v for v in data if v["load"] == load]
        cells = [
            f"{np.mean([v['cost'][n] for v in own]):.3f} ({100 * np.mean([v['attained'][n] for v in own]):.1f} %)"
            for n in data[0]["cost"]
        ]
        taken = ", ".join(f"{v['replicas']} `{v['setting']}`" for v in own)
        rows.append([f"{own[0]['rate']:.1f}", *cells, taken])
    return markdown(rows)
