"""PolyServe's tier flip: half-way the shares of the tiers turn round (Fig. 7), and how long the fleet takes to follow.

Scenario `polyserve-flip`, 20 replicas: uniform-4096-1024, TPOT of 20, 30, 50, 100 ms with 10, 20, 30, 40 % of the
requests, then 40, 30, 20, 10 %; goodput is over both halves. Systems and tuning are those of `polyserve-goodput`; each
is measured on three seeds, `edf` on one, in windows of three mean stays. The fleet has divided itself anew once the
replicas of the 20 ms tier, averaged over 10 s, come within a tenth of their mean over the last third of the run (ours:
the paper gives no time).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments import polyserve_goodput as goodput
from experiments._axes import name_axes
from experiments._fleet_roles import FleetRoles
from experiments._guest import beside
from experiments._polyserve_runs import OURS, REPLICAS, Tried
from experiments.polyserve_goodput import ALL, HOST, PAPERS, POLYSERVE, SEEDS, SMALL, Table
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES

SOURCE = "PolyServe, §5.3 and Fig. 7"
SECONDS = 1700.0

TIGHTEST, WINDOW, NEAR = "tier 0.02", 10.0, 0.1
LOAD = 0.95  # of its goodput, where the fleet is watched


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        names = beside(SMALL, policy)
        return [Job(name, measured, (name, goodput.settings(name)[:2], (), 0.3, 5, 0.1)) for name in names]
    names = beside((*PAPERS, "edf", *POLYSERVE), policy)
    seeds = {"edf": SEEDS[:1]}
    return [Job(name, measured, (name, goodput.settings(name), seeds.get(name, SEEDS))) for name in names]


def measured(
    name: str, settings: Sequence[str], seeds: Sequence[int], stays: float = runs.COUNTED, replicas: int = REPLICAS,
    fill: float = runs.BEFORE,
) -> dict[str, Any]:  # fmt: skip
    """Goodput as in `polyserve-goodput`; of polyserve also the fleet over time, a little below it, seed by seed."""
    value = goodput.measured("flip", name, settings, seeds, stays, replicas, fill)
    if name not in POLYSERVE:
        return value
    value["watched"] = []
    for seed, rate in zip(value["seeds"], value["measures"][ALL]["goodput"], strict=True):
        tried = Tried("flip", HOST, seed, stays, replicas, fill)
        load, roles = tried.load(LOAD * (rate or 0.5 * value["optimum"])), FleetRoles()
        records = runs.served(load, "flip", HOST, OURS[goodput.mode_of(name)], replicas, listen=roles).records
        value["watched"].append(watched(roles, records, load.duration))
    return value


def watched(roles: FleetRoles, records: Sequence[Any], end: float) -> dict[str, Any]:
    """Second by second: replicas by role, and the share in SLO of the requests that came. The flip is half-way by
    count. again: seconds from it to the new division."""
    flip = records[len(records) // 2].at
    times = np.arange(0.0, end)
    counts = [roles.count(float(t)) for t in times]
    names = sorted({role for count in counts for role in count})
    came = np.array([r.at for r in records])
    met = np.array([r.verdict.met and not r.best_effort for r in records])
    shares = [float(met[inside].mean()) if (inside := (came >= t) & (came < t + WINDOW)).any() else None for t in times]
    tight = np.array([count.get(TIGHTEST, 0) for count in counts], dtype=float)
    aim = tight[times >= end - (end - flip) / 1.5].mean()
    smooth = np.convolve(tight, np.ones(int(WINDOW)) / WINDOW, "valid")  # from t to t + WINDOW
    there = [t for t, value in zip(times, smooth, strict=False) if t >= flip and abs(value - aim) <= NEAR * aim]
    return {
        "flip": flip, "again": float(there[0] + WINDOW - flip) if there else float(end - flip),
        "replicas": {role: [count.get(role, 0) for count in counts] for role in names}, "attained": shares,
    }  # fmt: skip


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    estimates = {
        "co-over-baselines": table.mean(ALL, table.all_of("polyserve co")),
        "pd-over-baselines": table.mean(ALL, table.all_of("polyserve pd")),
    }
    settings = {"replicas": REPLICAS, "measures": MEASURES, "load": LOAD, "window": WINDOW, "near": NEAR}
    return Found(estimates, list(values), sorted({s for v in values for s in v["seeds"]}), "deadline", settings)


def draw(data: Any, axes: Any) -> None:
    """Replicas by tier over time, co-located, first seed; the share in SLO, in twentieths, above them."""
    (own,) = [v for v in data if v["name"] == "polyserve co"]
    seen = own["watched"][0]
    times = range(len(seen["attained"]))
    axes.stackplot(times, *seen["replicas"].values(), labels=list(seen["replicas"]), step="post")
    shares = [None if share is None else REPLICAS * share for share in seen["attained"]]
    axes.plot(times, [np.nan if share is None else share for share in shares], color="black", label="in SLO, of 20")
    axes.axvline(seen["flip"], color="black", linestyle=":")
    name_axes(axes, "seconds", "replicas")


def tables(data: Any) -> str:
    rows = [
        ["system", "seeds", *(f"requests/s at {m}" for m in MEASURES), "setting at the first", "seconds to divide anew"]
    ]
    for v in data:
        again = f"{np.mean([w['again'] for w in v['watched']]):.0f}" if "watched" in v else ""
        rates = [f"{np.mean(v['measures'][m]['goodput']):.1f}" for m in MEASURES]
        rows.append([v["name"], str(len(v["seeds"])), *rates, f"`{v['measures'][ALL]['setting']}`", again])
    return markdown(rows)
