"""Our own policy on a fleet: PolyServe's eight data sets, beside all that `polyserve_goodput` measured.

20 replicas; KV moves at 50 GB/s. 90 % of all requests in SLO, 95 % of all, 90 % of each tier. On five data sets the
others' rates are those of the figure `polyserve-goodput`, which runs the same requests and seeds and tunes every system
for every measure; on two of `LARGE` that is 10 replicas and one seed, here as there. Baselines of today (`TODAY`) are
run here, on the same requests and seeds, tuned for every measure too. On the third, `WIDE`, tiers and
prefill of ours take too large a part of ten, and all are run here on 20, too: one seed, the 12,000 requests of one mean
stay, the others at the best of the settings that the other figure found best, splits scaled, on these same requests.
The means are of eight data sets, that one on 20; what is least is of all nine rows.
Ours is in mode pd, prefill and decode apart, in its default settings else. The rules of its router were chosen on seed
1 of the same data sets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._polyserve_runs import BEFORE, COUNTED, REPLICAS
from experiments._rate_search import MEASURES
from experiments._rubato_runs import recorded
from experiments.polyserve_goodput import FEWER, HOST, LARGE, LEAST, SEEDS, SETS, TUNING, UNTAUGHT, measured
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown

SOURCE = "ours; data sets and tiers of PolyServe, §5.1"
SECONDS = 1720.0

OURS, CHOICE = "rubato", "rubato@rubato:mode=pd"
OTHERS = "polyserve-goodput"
WIDE = LARGE[-1]
TODAY = {
    "scorpio": tuple(
        f"scorpio:mixed=true,budget=512,ttft_reserve=0,reserve_kv=true@{router}"
        for router in ("least_loaded", "lmetric")
    ),
    "qoserve": tuple(f"qoserve:reserve_kv=true@{router}" for router in ("least_loaded", "lmetric")),
    "lmetric": tuple(f"sarathi:budget={budget},reserve_kv=true@lmetric" for budget in (512, 1024)),
}


def jobs(small: bool) -> list[Job]:
    if small:
        return [Job("mooncake-synthetic", measured, ("mooncake-synthetic", OURS, (CHOICE,), (1,), 0.6, 4, 0.2))]
    systems = {OURS: (CHOICE,), **TODAY}
    made = [
        Job(f"{data} {name}", measured, (data, name, choices, SEEDS, 3.0, REPLICAS))
        for data in SETS if data not in LARGE for name, choices in systems.items()
    ]  # fmt: skip
    made += [
        Job(f"{data} {name}", measured, (data, name, choices, SEEDS[:1], 3.0, FEWER))
        for data in LARGE for name, choices in systems.items()
    ]  # fmt: skip
    return made + [
        Job(
            f"{WIDE} {name}, {REPLICAS} replicas",
            measured,
            (WIDE, name, own, (), COUNTED / TUNING, REPLICAS, 2 * BEFORE),
        )
        for name, own in {**systems, **found_best(WIDE)}.items()
    ]


def found_best(data: str) -> dict[str, tuple[str, ...]]:
    """By system, the settings that are best for some measure on half as many replicas."""
    best = {}
    for value in recorded(OTHERS):
        if value["data"] == data:
            settings = dict.fromkeys(value["measures"][measure]["setting"] for measure in MEASURES)
            best[value["name"]] = tuple(re.sub(r"(?<=[el]=)\d+", lambda n: str(2 * int(n[0])), one) for one in settings)
    return best


def label(value: Any) -> str:
    """Of a row: the data set, and the number of replicas if it is that of `LARGE` in the other figure."""
    return f"{value['data']}, {FEWER} replicas" if value["replicas"] == FEWER else str(value["data"])


class Table:
    """Goodput (requests/s) of ours and of the others, by data set and measure."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.ours = {label(v): v for v in values if v["name"] == OURS}
        others = [*recorded(OTHERS), *(v for v in values if v["name"] != OURS)]
        self.others = [v for v in others if UNTAUGHT not in v["name"]]

    def goodput(self, value: Any, measure: str) -> Any:
        """A replica's, by seed."""
        return np.maximum(value["measures"][measure]["goodput"], LEAST * value["optimum"]) / value["replicas"]

    def best(self, data: str, measure: str) -> Any:
        """Of the others the one whose mean over seeds is the largest, of those run on all seeds of ours."""
        seeds = self.ours[data]["seeds"]
        own = [v for v in self.others if label(v) == data and v["seeds"][: len(seeds)] == seeds]
        return max(own, key=lambda v: float(np.mean(self.goodput(v, measure))))

    def ratios(self, data: str, measure: str) -> Any:
        """By seed."""
        best = self.goodput(self.best(data, measure), measure)
        ours = self.goodput(self.ours[data], measure)
        return ours / best[: len(ours)]

    def mean(self, measure: str) -> Estimate:
        """Geometric mean over data sets, by seed: of those with one, that one in each."""
        besides = f"{WIDE}, {FEWER} replicas" if WIDE in self.ours else ""
        logs = np.broadcast_arrays(*[np.log(self.ratios(data, measure)) for data in self.ours if data != besides])
        return over_seeds([float(x) for x in np.mean(logs, axis=0)]).exp()

    def least(self, measure: str) -> Estimate:
        each = [over_seeds([float(x) for x in np.log(self.ratios(data, measure))]).exp() for data in self.ours]
        return min(each, key=lambda ratio: ratio.value)


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    estimates = {}
    for measure, name in zip(MEASURES, ("90", "95", "each"), strict=True):
        estimates[f"fleet-{name}"] = table.mean(measure)
        estimates[f"least-{name}"] = table.least(measure)
    given = {"replicas": REPLICAS, "measures": MEASURES, "host": HOST}
    return Found(estimates, list(values), SEEDS[:1] if small else SEEDS, "deadline", given)


def tables(data: Sequence[Any]) -> str:
    """Losses first: ours over the best of the others, ascending."""
    table = Table(data)
    parts = []
    for measure in MEASURES:
        rows = [
            ["data set", "over the best other", "which is", "ours, requests/s a replica", "worst tier of ours, of its"]
        ]
        for name in sorted(table.ours, key=lambda name: float(np.mean(np.log(table.ratios(name, measure))))):
            best, ratios = table.best(name, measure), table.ratios(name, measure)
            tiers = [min(v["measures"][measure]["tiers"].values(), default=0.0) for v in (table.ours[name], best)]
            rows.append([
                name, " ".join(f"{ratio:.2f}" for ratio in ratios), f"`{best['measures'][measure]['setting']}`",
                f"{float(np.mean(table.goodput(table.ours[name], measure))):.3g}",
                f"{100 * tiers[0]:.0f} %, {100 * tiers[1]:.0f} %",
            ])  # fmt: skip
        parts.append(f"{measure}, by seed:\n\n{markdown(rows)}")
    return "\n\n".join(parts)


def draw(data: Sequence[Any], axes: Any) -> None:
    """Ours over the best of the others, by data set and measure."""
    table = Table(data)
    names = list(table.ours)
    for at, measure in enumerate(MEASURES):
        axes.plot(
            [float(np.exp(np.mean(np.log(table.ratios(name, measure))))) for name in names],
            np.arange(len(names)) + 0.2 * (at - 1), "o", label=measure,
        )  # fmt: skip
    axes.axvline(1.0, color="gray")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("rubato's requests/s over the best other's")
    axes.legend()
