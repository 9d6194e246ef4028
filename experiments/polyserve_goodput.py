"""PolyServe's goodput beside tuned baselines: 90 % of all requests in SLO (Fig. 6), 95 % of all, 90 % of each tier.

20 replicas. Each system is tuned for each measure on requests of one seed once the fleet has half filled, and measured
at the setting found on three others (on `LARGE`, data sets of short prompts, on one other, and on 10 replicas) once it
has filled (`_polyserve_runs.BEFORE`). Windows are a mean stay, and longer where the seeds would count less than
`COUNTED` requests together, 500 of the rarest tier. polyserve has no setting but its mode: of a data set and measure
the one that holds more on the tuning's seed. TTFTs are drawn so that an idle replica computes the prompt in time; in
`pd` the KV's way and a step come before the second token, and 1 % of Mooncake's requests cannot be in time.

Baselines: CO-Chunk (`sarathi` with a budget, which is swept) behind `least_loaded`, the largest also behind `minimal`
and `random`, and prefill and decode apart with the split swept behind `minimal`, two splits also behind `random`; the
best of them is the one of each data set and measure. All predict lengths by the conditional mean and see `max_tokens`
of 2,048.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments._axes import bars
from experiments._guest import beside
from experiments._polyserve_runs import CHUNKS, OURS, REPLICAS, Tried, splits
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.capacity import rate_or_zero
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES
from rubato.planning.optimum import Mode

SOURCE = "PolyServe, §5.2 and Fig. 6"
SECONDS = 6300.0

HOST = "constant"
SETS = (
    "lmsys", "sharegpt", "uniform-512-512", "splitwise", "uniform-4096-1024", "mooncake-conversation",
    "mooncake-toolagent", "mooncake-synthetic",
)  # fmt: skip
LARGE, FEWER = SETS[:3], 10
# Of other requests than those on which the margin of `polyserve` (4 to 6) and what it corrects (1 to 3) were found; how
# long a prefill replica stays one was found on `LARGE` and one of Mooncake's, of 7 and 8.
SEEDS, TUNED_ON = (7, 8, 9), 0
COUNTED = 5400  # requests, of all seeds together: about 500 of the rarest tier
LEAST = 0.05
ALL, *_ = MEASURES
SYSTEMS = ("polyserve co", "polyserve pd", "baseline co", "baseline pd", "edf")
UNTAUGHT = "untaught"  # after the name of a system: lengths are learnt from the start of the run only
POLYSERVE, PAPERS = ("polyserve co", "polyserve pd"), ("baseline co", "baseline pd")
SMALL = (*POLYSERVE, "baseline co")
ONCE = {"edf", *(f"{name} {UNTAUGHT}" for name in POLYSERVE)}  # measured on one seed


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        return [
            Job(f"splitwise {name}", measured, ("splitwise", name, settings(name)[:2], (), 0.2, 3, 0.2))
            for name in beside(SMALL, policy)
        ]
    names = beside((*SYSTEMS, *(f"{name} {UNTAUGHT}" for name in POLYSERVE)), policy)
    made: list[tuple[str, str, Sequence[int], int]] = [
        (data, name, SEEDS[:1], FEWER) for data in LARGE for name in names if name in (*POLYSERVE, *PAPERS)
    ]
    made += [
        (data, name, SEEDS[: 1 if name in ONCE else 3], REPLICAS)
        for data in SETS[3:] for name in names if data != "splitwise" or not name.endswith(UNTAUGHT)
    ]  # fmt: skip
    return [
        Job(f"{data} {name}", measured, (data, name, settings(name, replicas), seeds, stays(data, replicas), replicas))
        for data, name, seeds, replicas in made
    ]


def stays(data: str, replicas: int, host: str = HOST) -> float:
    """Mean stays of a window that is counted."""
    seeds = 1 if data in LARGE else len(SEEDS)
    return max(1.0, COUNTED / seeds / runs.coming_in(data, host, replicas, 1.0))


def settings(name: str, replicas: int = REPLICAS) -> Sequence[str]:
    """What a system is tuned over."""
    name = name.removesuffix(f" {UNTAUGHT}")
    known = {
        **dict(zip(POLYSERVE, ((OURS[mode],) for mode in runs.MODES), strict=True)),
        "baseline co": CHUNKS, "baseline pd": splits(replicas), "edf": ("edf@least_loaded",),
    }  # fmt: skip
    return known.get(name, (name,))


def measured(
    data: str, name: str, choices: Sequence[str], seeds: Sequence[int], stays: float = runs.COUNTED,
    replicas: int = REPLICAS, fill: float = runs.BEFORE, host: str = HOST, measures: Sequence[str] = tuple(MEASURES),
    every: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """By measure: the setting with the largest goodput on the tuning's requests, what it holds there and on each seed
    (the tuning's if none is given), and the shares there by tier. every: each setting is searched."""
    best, taught = replicas * runs.best_rate(data, host, mode_of(name)), not name.endswith(UNTAUGHT)
    tuning = Tried(data, host, TUNED_ON, stays, replicas, fill / 2.0, taught)
    used = [Tried(data, host, seed, stays, replicas, fill, taught) for seed in seeds] or [tuning]
    found: dict[str, Any] = {}
    start = 0.6 * best
    for measure in measures:
        tuned, choice = tuning.best(choices, start, measure, every=every)
        start = tuned or start
        rates, at = [], start / runs.STEP**2  # a short window holds more
        for each in used:
            rates.append(rate_or_zero(partial(each.goodput, choice, at, measure)) if tuned else 0.0)
            at = rates[-1] or at
        shares = [each.near(choice, rate) for each, rate in zip(used, rates, strict=True) if rate]
        tiers = [tier for tier in (shares[0] if shares else ()) if tier not in ("all", "worst")]
        found[measure] = {
            "setting": choice, "tuned": tuned, "goodput": rates,
            "tiers": {tier: float(np.mean([s[tier] for s in shares])) for tier in tiers},
        }  # fmt: skip
    return {
        "data": data, "name": name, "replicas": replicas, "seeds": list(seeds) or [TUNED_ON], "optimum": best,
        "measures": found,
        "tried": [each.listed() for each in (tuning, *(used if seeds else ()))],
    }  # fmt: skip


def mode_of(name: str) -> Mode:
    return "pd" if " pd" in name else "co"


class Table:
    """Goodput of each system by data set, measure and seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = {(v["data"], v["name"]): v for v in values}
        self.sets = list(dict.fromkeys(v["data"] for v in values))
        self.names = list(dict.fromkeys(v["name"] for v in values))

    def best(self, data: str, measure: str, names: Sequence[str] = PAPERS) -> str:
        """Whose mean over seeds is the largest."""
        known = [name for name in names if (data, name) in self.values]
        best: str = max(known, key=lambda name: float(np.mean(self.goodput(data, name, measure))))
        return best

    def chosen(self, data: str, measure: str = ALL) -> str:
        """Of polyserve's modes the one that holds more on the tuning's seed."""
        known = [name for name in POLYSERVE if (data, name) in self.values]
        return max(known, key=lambda name: float(self.values[data, name]["measures"][measure]["tuned"]))

    def goodput(self, data: str, name: str, measure: str) -> Any:
        """Of each seed; none at all counts as `LEAST` of the optimum."""
        value = self.values[data, name]
        return np.maximum(value["measures"][measure]["goodput"], LEAST * value["optimum"])

    def ratio(self, data: str, ours: str, measure: str, others: Sequence[str] = PAPERS) -> Any:
        """Our goodput over the best of the others', seed by seed."""
        return self.goodput(data, ours, measure) / self.goodput(data, self.best(data, measure, others), measure)

    def at_baseline(self, data: str, ours: str, measure: str) -> str:
        """Our share of what the measure asks for, at the rate of the best baseline: on the line between the rates tried
        on either side of it, mean of the seeds; where none is lower or higher, that at the nearest."""
        rate = float(np.mean(self.goodput(data, self.best(data, measure), measure)))
        value, at = self.values[data, ours], 3 if MEASURES[measure][0] == "worst" else 2
        shares = []
        for tried in value["tried"][1:] or value["tried"]:
            points = sorted((row[1], row[at]) for row in tried)
            shares.append(float(np.interp(np.log(rate), np.log([p[0] for p in points]), [p[1] for p in points])))
        return f"{100.0 * np.mean(shares):.1f} %"

    def mean(self, measure: str, ours: Mapping[str, str], others: Sequence[str] = PAPERS) -> Estimate:
        """That, geometric mean over data sets. ours: the system of each."""
        return self.over_sets([self.ratio(data, name, measure, others) for data, name in ours.items()])

    def all_of(self, name: str) -> dict[str, str]:
        """The data sets on which a system was measured, with its name."""
        return {data: name for data in self.sets if (data, name) in self.values}

    def of_optimum(self, name: str) -> Estimate:
        """Geometric mean over data sets of the share of its mode's optimum."""
        sets = self.all_of(name)
        return self.over_sets([self.goodput(data, name, ALL) / self.values[data, name]["optimum"] for data in sets])

    @staticmethod
    def over_sets(ratios: Sequence[Any]) -> Estimate:
        logs = [np.log(ratio) for ratio in ratios]
        return over_seeds([float(x) for x in np.mean(np.broadcast_arrays(*logs), axis=0)]).exp()

    def spread(self, name: str) -> float:
        """The largest difference between tiers of any data set at 90 % of all, in points."""
        shares = [list(self.values[data, name]["measures"][ALL]["tiers"].values()) for data in self.all_of(name)]
        return max([100.0 * (max(tiers) - min(tiers)) for tiers in shares if tiers], default=0.0)


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    estimates = {
        f"chosen-{name}": table.mean(measure, {data: table.chosen(data, measure) for data in table.sets})
        for name, measure in zip(("90", "95", "each"), MEASURES, strict=True)
    }
    for mode, name in zip(runs.MODES, POLYSERVE, strict=True):
        estimates[f"{mode}-over-baselines"] = table.mean(ALL, table.all_of(name))
        estimates[f"{mode}-of-optimum"] = table.of_optimum(name)
        estimates[f"{mode}-spread"] = Estimate.exact(table.spread(name))
    estimates["pd-gain"] = estimates["pd-over-baselines"]
    given = {
        "replicas": REPLICAS, "measures": MEASURES, "host": runs.HOSTS[HOST], "noise": runs.NOISE,
        "kv_bytes_per_second": runs.LINK.bandwidth, "systems": {k: list(settings(k)) for k in SYSTEMS},
    }  # fmt: skip
    return Found(estimates, list(values), sorted({s for v in values for s in v["seeds"]}), "deadline", given)


def draw(data: Any, axes: Any) -> None:
    """Polyserve's goodput over that of the best baseline, by data set and measure."""
    table = Table(data)
    heights = {m: [float(np.mean(table.ratio(s, table.chosen(s, m), m))) for s in table.sets] for m in MEASURES}
    axes.axhline(1.0, color="black", linewidth=1)
    bars(axes, table.sets, heights, "goodput over the best baseline's")


def tables(data: Any) -> str:
    """For each measure: goodput by system, polyserve's over the best baseline's, and that one's setting; by tier."""
    table, parts = Table(data), []
    for measure in MEASURES:
        rows = [["data set", *table.names, "polyserve's mode", "over the best baseline", "best baseline's setting",
                 *(f"{name} at the best baseline's rate" for name in POLYSERVE)]]  # fmt: skip
        for each in table.sets:
            chosen, best = table.chosen(each, measure), table.best(each, measure)
            cells = []
            for name in table.names:
                value = table.values.get((each, name))
                once = "" if value is None or len(value["seeds"]) > 1 else " (one seed)"
                cells.append(f"{np.mean(value['measures'][measure]['goodput']):.1f}{once}" if value else "")
            ratio = over_seeds(table.ratio(each, chosen, measure).tolist())
            setting = table.values[each, best]["measures"][measure]["setting"]
            fleet = table.values[each, best]["replicas"]
            at = [table.at_baseline(each, n, measure) if (each, n) in table.values else "" for n in POLYSERVE]
            where = each if fleet == REPLICAS else f"{each}, {fleet} replicas"
            rows.append([where, *cells, mode_of(chosen), f"{ratio.value:.2f}×", f"`{setting}`", *at])
        parts.append(f"Requests/s at {measure}:\n\n{markdown(rows)}")
    rows = [["data set", "system", *(tier for tier in next(iter(table.values.values()))["measures"][ALL]["tiers"])]]
    for (each, name), value in table.values.items():
        rows.append([each, name, *(f"{100 * s:.0f} %" for s in value["measures"][ALL]["tiers"].values())])
    parts.append(f"Attained by tier, at 90 % of all:\n\n{markdown(rows)}")
    return "\n\n".join(parts)
