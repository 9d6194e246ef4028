"""PolyServe's router, and ours: requests routed in a CPU second, by the size of the fleet (§5.6).

Splitwise's lengths at 0.85 of the optimum, each replica busy, through the real cluster: all that it does for a request
is counted (arrival, placement, first token, hand-off, end), the replicas' own steps are not. With prefill and decode
apart each request is placed twice. Systems take turns, in each round; the machine should have nothing else to do. p99:
of all times that the router was asked, its check included, in the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments._cluster_time import Inside, now
from experiments._polyserve_runs import OURS
from experiments._rate_search import share
from rubato.core.clock import process_cpu_time
from rubato.measure.confidence import over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job

SOURCE = "PolyServe, §5.6"
SECONDS = 223.0
ALONE = True

DATA, HOST, LOAD = "splitwise", "constant", 0.85
FLEETS, ROUNDS, COUNT = (5, 20, 100), 3, 4000
SYSTEMS = {
    "co": OURS["co"],
    "pd": OURS["pd"],
    "rubato": "rubato@rubato:mode=pd",
    "least_loaded": "sarathi:budget=2048@least_loaded",
}


def jobs(small: bool) -> list[Job]:
    if small:
        return [Job("round 0", measured, ((20,), 100, 0.02))]
    return [Job(f"round {n}", measured, (FLEETS, COUNT, 0.5)) for n in range(ROUNDS)]


def measured(fleets: Sequence[int], count: int, fill: float) -> list[dict[str, Any]]:
    found = []
    for fleet in fleets:
        load = runs.offered(DATA, HOST, count, 1, fleet, fill).rescaled(LOAD * fleet * runs.best_rate(DATA, HOST, "co"))
        first = runs.coming_in(DATA, HOST, fleet, fill)
        for name, choice in SYSTEMS.items():
            with Inside(after=first) as inside:
                records = runs.served(load, DATA, HOST, choice, fleet).records
            wall, cpu = now() - inside.began[0], process_cpu_time() - inside.began[1]
            found.append({
                "fleet": fleet, "name": name, "attained": share(records[first : first + count]),
                "requests": (inside.offered - first) / (inside.seconds / wall * cpu),  # others take wall and CPU alike
                "p99": float(np.quantile(inside.asked, 0.99)), "asked": len(inside.asked),
            })  # fmt: skip
    return found


def found(values: Sequence[Any], small: bool) -> Found:
    most = max(v["fleet"] for each in values for v in each)
    estimates = {
        f"{mode}-{name}": over_seeds(_requests(values, mode, fleet))
        for mode in ("co", "pd", "rubato") for name, fleet in (("20", 20), ("100", most))
    }  # fmt: skip
    settings = {"data": DATA, "load": LOAD, "systems": SYSTEMS, "requests": COUNT}
    return Found(estimates, list(values), list(range(len(values))), "deadline", settings)


def _requests(data: Any, name: str, fleet: int) -> list[float]:
    return [v["requests"] for each in data for v in each if (v["name"], v["fleet"]) == (name, fleet)]


def tables(data: Any) -> str:
    fleets = sorted({v["fleet"] for each in data for v in each})
    rows = [["requests a CPU second, (p99 of asking, ms)", *(f"{fleet} replicas" for fleet in fleets)]]
    for name in SYSTEMS:
        cells = []
        for fleet in fleets:
            own = [v for each in data for v in each if (v["name"], v["fleet"]) == (name, fleet)]
            p99 = np.median([1e3 * v["p99"] for v in own])
            cells.append(f"{np.median(_requests(data, name, fleet)):,.0f} ({p99:.2f})")
        rows.append([name, *cells])
    return markdown(rows)
