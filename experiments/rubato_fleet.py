"""Our own policy on a fleet: PolyServe's eight data sets, beside all that `polyserve_goodput` measured.

20 replicas, 10 on three data sets of short prompts (`LARGE`); KV moves at 50 GB/s. 90 % of all requests in SLO, 95 % of
all, 90 % of each tier. The others' rates are those of the figure `polyserve-goodput`, which runs the same requests and
seeds and tunes every system for every measure. Ours is in mode pd, prefill and decode apart, in its default settings
else; the rules of its router were chosen on seed 1 of the same data sets. On few replicas its modes stand beside each
other and beside `least_loaded`, at one rate: `auto`, the default, divides replicas by TPOT where requests gain by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments._gate_loads import SETS as GATE_SETS
from experiments._polyserve_runs import BEFORE, REPLICAS, Tried
from experiments._rubato_runs import recorded
from experiments.polyserve_goodput import FEWER, HOST, LARGE, LEAST, SEEDS, SETS, UNTAUGHT, measured, stays
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES

SOURCE = "ours; data sets and tiers of PolyServe, §5.1"
SECONDS = 985.0

OURS, CHOICE = "rubato", "rubato@rubato:mode=pd"
OTHERS = "polyserve-goodput"
LONG = ("splitwise",)  # one seed there: a run takes a minute
AUTO, MODES = "auto", {"auto": "rubato", "co": "rubato@rubato:mode=co", "pd": CHOICE, "alike": "rubato@least_loaded"}
FEW = (("mooncake-conversation", 4), ("mooncake-conversation", 8), ("uniform-4096-1024", 4))
FEW_SEEDS = (1, 2)


def jobs(small: bool) -> list[Job]:
    if small:
        return [
            Job("mooncake-synthetic", measured, ("mooncake-synthetic", OURS, (CHOICE,), SEEDS[:1], 0.6, 4, 0.2)),
            *(Job(mode, on_few, (*FEW[0], mode, 1, 0.3)) for mode in (AUTO, "alike")),
        ]
    return [
        Job(data, measured, (data, OURS, (CHOICE,), SEEDS[:seeds], stays(data, replicas), replicas))
        for data in SETS
        for seeds in (1 if data in (*LARGE, *LONG) else 2,)
        for replicas in (FEWER if data in LARGE else REPLICAS,)
    ] + [
        Job(f"{data} on {replicas}, {mode}, seed {seed}", on_few, (data, replicas, mode, seed, BEFORE))
        for data, replicas in FEW for mode in MODES for seed in FEW_SEEDS
    ]  # fmt: skip


def on_few(data: str, replicas: int, mode: str, seed: int, stays: float) -> dict[str, Any]:
    """Shares of all and of the worst tier, at the gate's rate of four replicas."""
    shares = Tried(data, HOST, seed, stays, replicas, stays / 2).run(MODES[mode], GATE_SETS[data][1] * replicas)
    return {
        "data": data, "few": replicas, "mode": mode, "seed": seed, "attained": shares["all"], "worst": shares["worst"],
    }  # fmt: skip


class Table:
    """Goodput (requests/s) of ours and of the others, by data set and measure."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.ours = {v["data"]: v for v in values if "measures" in v}
        self.others = [v for v in recorded(OTHERS) if UNTAUGHT not in v["name"]]

    def goodput(self, value: Any, measure: str) -> Any:
        """A replica's, by seed."""
        return np.maximum(value["measures"][measure]["goodput"], LEAST * value["optimum"]) / value["replicas"]

    def best(self, data: str, measure: str) -> Any:
        """Of the others the one whose mean over seeds is the largest, of those run on all seeds of ours."""
        seeds = self.ours[data]["seeds"]
        own = [v for v in self.others if v["data"] == data and v["seeds"][: len(seeds)] == seeds]
        return max(own, key=lambda v: float(np.mean(self.goodput(v, measure))))

    def ratios(self, data: str, measure: str) -> Any:
        """By seed."""
        best = self.goodput(self.best(data, measure), measure)
        ours = self.goodput(self.ours[data], measure)
        return ours / best[: len(ours)]

    def mean(self, measure: str) -> Estimate:
        """Geometric mean over data sets, by seed: of those with one, that one in each."""
        logs = np.broadcast_arrays(*[np.log(self.ratios(data, measure)) for data in self.ours])
        return over_seeds([float(x) for x in np.mean(logs, axis=0)]).exp()


class Modes:
    """Shares on few replicas, in percent, by case and mode, seed by seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.own: dict[tuple[str, int], dict[str, list[Any]]] = {}
        for v in (v for v in values if "few" in v):
            shares = 100.0 * np.array([v["attained"], v["worst"]])
            self.own.setdefault((v["data"], v["few"]), {}).setdefault(v["mode"], []).append(shares)

    def ahead(self, case: tuple[str, int]) -> Estimate:
        """Points, of the mean of all and the worst tier, by which auto is ahead of the best other mode."""
        both = {mode: np.mean(shares, axis=1) for mode, shares in self.own[case].items()}
        best = max((mode for mode in both if mode != AUTO), key=lambda mode: float(np.mean(both[mode])))
        return over_seeds((both[AUTO] - both[best]).tolist())


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    estimates = {}
    for measure, name in zip(MEASURES, ("90", "95", "each"), strict=True):
        estimates[f"fleet-{name}"] = table.mean(measure)
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
                f"{name}, {FEWER} replicas" if name in LARGE else name,
                " ".join(f"{ratio:.2f}" for ratio in ratios), f"`{best['measures'][measure]['setting']}`",
                f"{float(np.mean(table.goodput(table.ours[name], measure))):.3g}",
                f"{100 * tiers[0]:.0f} %, {100 * tiers[1]:.0f} %",
            ])  # fmt: skip
        parts.append(f"{measure}, by seed:\n\n{markdown(rows)}")
    modes = Modes(data)
    rows = [["data set, replicas", *MODES, "auto ahead of the best other, points of both"]]
    for case in sorted(modes.own, key=lambda case: modes.ahead(case).value):
        shares = [np.mean(modes.own[case][mode], axis=0) for mode in MODES]
        rows.append([
            f"{case[0]}, {case[1]}", *(f"{every:.1f}, {worst:.1f}" for every, worst in shares),
            modes.ahead(case).shown("+.1f"),
        ])  # fmt: skip
    parts.append(f"Attained on few replicas at one rate, worst tier, %:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
