"""PolyServe's goodput of a replica in fleets of 8 to 32, beside baselines (Fig. 9: 8 to 64).

Uniform-4096-1024, 90 % in SLO of all, windows of two mean stays; each baseline has the setting that `polyserve-goodput`
finds at 20, its prefill replicas a part of the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments._axes import name_axes
from experiments._polyserve_runs import OURS, Tried
from experiments.polyserve_goodput import ALL, mode_of
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "PolyServe, §5.5 and Fig. 9"
SECONDS = 400.0

DATA, HOST = "uniform-4096-1024", "constant"
SIZES, SEEDS, STAYS = (8, 16, 32), (1,), 2.0
SYSTEMS = {
    "polyserve co": (OURS["co"],),
    "polyserve pd": (OURS["pd"],),
    "baseline co": ("sarathi:budget=2048@least_loaded",),
    "baseline pd": ("distserve@minimal:prefill=6,decode=14",),
}


def jobs(small: bool) -> list[Job]:
    if small:
        names = ("polyserve pd", "baseline pd")
        return [Job(f"{name} 4 1", measured, (name, 4, 1, 0.3, 0.1)) for name in names]
    return [
        Job(f"{name} {size} {seed}", measured, (name, size, seed, STAYS, runs.BEFORE))
        for seed in SEEDS for size in SIZES for name in SYSTEMS
    ]  # fmt: skip


def measured(name: str, size: int, seed: int, stays: float, fill: float) -> dict[str, Any]:
    """name: one of `SYSTEMS`, or a policy."""
    best = size * runs.best_rate(DATA, HOST, mode_of(name))
    tried = Tried(DATA, HOST, seed, stays, size, fill)
    rate, choice = tried.best(SYSTEMS.get(name, (name,)), 0.6 * best, ALL, coarse=2)
    return {"name": name, "size": size, "seed": seed, "each": rate / size, "setting": choice, "tried": tried.listed()}


def found(values: Sequence[Any], small: bool) -> Found:
    sizes = sorted({v["size"] for v in values})
    seeds = sorted({v["seed"] for v in values})
    names = list(dict.fromkeys(v["name"] for v in values))
    each = {(v["name"], v["size"], v["seed"]): v["each"] for v in values}
    ours = [name for name in names if name.startswith("polyserve")]
    others = [name for name in names if name not in ours]

    def over(size: int) -> Estimate:
        return over_seeds([
            max(each[n, size, s] for n in ours) / max(each[n, size, s] for n in others) for s in seeds
        ])  # fmt: skip

    def growth(mode: str) -> Estimate:
        name = f"polyserve {mode}" if f"polyserve {mode}" in ours else ours[0]
        return over_seeds([each[name, sizes[-1], s] / each[name, sizes[0], s] for s in seeds])

    estimates = {
        "least-gain": min((over(size) for size in sizes), key=lambda e: e.value),
        "co-growth": growth("co"),
        "pd-growth": growth("pd"),
    }
    settings = {"data": DATA, "host": HOST, "measure": ALL, "systems": SYSTEMS}
    return Found(estimates, list(values), seeds, "deadline", settings)


def draw(data: Any, axes: Any) -> None:
    """Requests/s of a replica over the size of the fleet."""
    sizes = sorted({v["size"] for v in data})
    for name in dict.fromkeys(v["name"] for v in data):
        means = [np.mean([v["each"] for v in data if (v["name"], v["size"]) == (name, size)]) for size in sizes]
        axes.plot(sizes, means, marker="o", label=name)
    name_axes(axes, "replicas", "requests/s of a replica at 90 %", from_zero=True)


def tables(data: Any) -> str:
    sizes = sorted({v["size"] for v in data})
    rows = [["requests/s of a replica", *(f"{size} replicas" for size in sizes)]]
    for name in dict.fromkeys(v["name"] for v in data):
        means = [np.mean([v["each"] for v in data if (v["name"], v["size"]) == (name, size)]) for size in sizes]
        rows.append([name, *(f"{mean:.2f}" for mean in means)])
    return markdown(rows)
