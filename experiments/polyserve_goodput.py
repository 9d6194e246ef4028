"""PolyServe's goodput beside tuned baselines: six data sets, 20 replicas, 90 % in SLO (Fig. 6).

Each system is tuned on 5,000 requests of one seed, and measured at the setting found on 20,000 of each of three others,
one for what `ONCE` names, after the fleet has filled (`_polyserve_runs.BEFORE`; half that for tuning). Baselines:
co_chunk with its budget swept behind `least_loaded`, the largest also behind `minimal` and `random`, and prefill and
decode apart with the split swept behind `minimal`; the best of them is the one of each data set. All predict lengths by
the conditional mean and see `max_tokens` of 2,048.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import Found
from experiments import _polyserve_runs as runs
from experiments._guest import beside
from experiments._polyserve_runs import BASELINES, HOSTS, OURS, REPLICAS, TARGET, Tried
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.jobs import Job
from rubato.planning.optimum import Mode
from rubato.planning.sweep import markdown

SOURCE = "PolyServe, §5.2 and Fig. 6"
SECONDS = 18000.0

SETS = ("uniform-4096-1024", "uniform-512-512", "mooncake-conversation", "splitwise", "sharegpt", "lmsys")
SEEDS, TUNED_ON = (1, 2, 3), 0
COUNT, TUNING = 20_000, 5000
LEAST = 0.05
SYSTEMS = {
    "polyserve co": (OURS["co"],),
    "polyserve pd": (OURS["pd"],),
    "baseline co": BASELINES["co"],
    "baseline pd": BASELINES["pd"],
    "edf": ("edf@least_loaded",),
}
POLYSERVE, PAPERS = ("polyserve co", "polyserve pd"), ("baseline co", "baseline pd")
SMALL = (*POLYSERVE, "baseline co")
# Measured on one seed, since a run takes minutes.
ONCE = {*(("polyserve pd", data) for data in SETS[3:]), *(("edf", data) for data in SETS)}


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    if small:
        return [
            Job(f"splitwise constant {name}", measured,
                ("splitwise", "constant", name, settings(name)[:2], 200, 0, (), 4, 0.25))
            for name in beside(SMALL, policy)
        ]  # fmt: skip
    guests = beside(tuple(SYSTEMS), policy)[len(SYSTEMS) :]
    more = [(next(iter(HOSTS)), name, data) for data in SETS for name in guests]
    return [
        Job(f"{data} {host} {name}", measured,
            (data, host, name, settings(name), TUNING, COUNT, SEEDS[:1] if (name, data) in ONCE else SEEDS))
        for host, name, data in (*of_table(), *more)
    ]  # fmt: skip


def settings(name: str) -> Sequence[str]:
    """What a system is tuned over."""
    return SYSTEMS.get(name, (name,))


def of_table() -> list[tuple[str, str, str]]:
    """Host, system and data set of each value. What takes hours is left out: `edf` where requests are short and many,
    and some sets, and prefill and decode apart, with the second host."""
    first, second = HOSTS
    return [
        *((first, name, data) for data in SETS for name in (*POLYSERVE, *PAPERS)),
        *((first, "edf", data) for data in (SETS[0], *SETS[2:4])),
        *((second, name, data) for data in (SETS[0], *SETS[2:4]) for name in ("polyserve co", "baseline co")),
    ]


def measured(
    data: str, host: str, name: str, choices: Sequence[str], tuning: int, count: int, seeds: Sequence[int],
    replicas: int = REPLICAS, fill: float = runs.BEFORE,
) -> dict[str, Any]:  # fmt: skip
    """The setting with the largest goodput, that of each seed (of the tuning's requests if there is none) and the
    shares there by tier."""
    best = replicas * runs.best_rate(data, host, mode_of(name))
    tried = [Tried(data, host, tuning, TUNED_ON, replicas, fill / 2.0)]
    tuned, choice = tried[0].best(choices, 0.4 * best)
    if seeds:
        tried += [Tried(data, host, count, seed, replicas, fill) for seed in seeds]
    used = tried[1:] or tried
    rates = [each.goodput(choice, tuned) if tuned else 0.0 for each in used]
    shares = [each.near(choice, rate) for each, rate in zip(used, rates, strict=True) if rate]
    return {
        "data": data, "host": host, "name": name, "seeds": list(seeds) or [TUNED_ON], "setting": choice,
        "goodput": rates, "tuned": tuned, "optimum": best,
        "tiers": {tier: float(np.mean([s[tier] for s in shares])) for tier in (shares[0] if shares else ())},
        "tried": [each.listed() for each in tried],
    }  # fmt: skip


def mode_of(name: str) -> Mode:
    return "pd" if name.endswith(" pd") else "co"


class Table:
    """Goodput of each system by data set, host and seed."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = {(v["host"], v["data"], v["name"]): v for v in values}
        self.sets = list(dict.fromkeys(v["data"] for v in values))
        self.names = list(dict.fromkeys(v["name"] for v in values))
        self.hosts = list(dict.fromkeys(v["host"] for v in values))

    def sets_of(self, host: str, name: str) -> list[str]:
        """The data sets on which it was measured."""
        return [data for data in self.sets if (host, data, name) in self.values]

    def best(self, host: str, data: str, names: Sequence[str]) -> str:
        """Whose mean over seeds is the largest."""
        known = [name for name in names if (host, data, name) in self.values]
        best: str = max(known, key=lambda name: float(np.mean(self.values[host, data, name]["goodput"])))
        return best

    def ratios(self, host: str, ours: str, others: Sequence[str]) -> Estimate:
        """Our goodput over the best of the others', geometric mean over data sets, seed by seed."""
        logs = []
        for data in self.sets_of(host, ours):
            own, other = (self._counted(host, data, name) for name in (ours, self.best(host, data, others)))
            logs.append(np.log(own / other))
        return over_seeds([float(x) for x in np.mean(np.broadcast_arrays(*logs), axis=0)]).exp()

    def _counted(self, host: str, data: str, name: str) -> Any:
        """Goodput of each seed; none at all counts as `LEAST` of the optimum."""
        value = self.values[host, data, name]
        return np.maximum(value["goodput"], LEAST * value["optimum"])

    def of_optimum(self, host: str, name: str) -> Estimate:
        """Geometric mean over data sets of the share of its mode's optimum."""
        sets = self.sets_of(host, name)
        own = [np.log(self._counted(host, data, name) / self.values[host, data, name]["optimum"]) for data in sets]
        return over_seeds([float(x) for x in np.mean(np.broadcast_arrays(*own), axis=0)]).exp()

    def spread(self, host: str, name: str) -> float:
        """The largest difference between tiers of any data set, in points."""
        found: list[float] = []
        for data in self.sets_of(host, name):
            tiers = [share for tier, share in self.values[host, data, name]["tiers"].items() if tier != "all"]
            found.append(100.0 * (max(tiers) - min(tiers)))
        return max(found)


def found(values: Sequence[Any], small: bool) -> Found:
    table = Table(values)
    first = table.hosts[0]
    apart = "baseline pd" if "baseline pd" in table.names else "baseline co"
    better = max(POLYSERVE, key=lambda name: table.ratios(first, name, PAPERS).value)
    estimates = {
        "co-over-baselines": table.ratios(first, "polyserve co", PAPERS),
        "pd-over-baselines": table.ratios(first, "polyserve pd", PAPERS),
        "over-baselines": table.ratios(first, better, PAPERS),
        "co-over-co": table.ratios(first, "polyserve co", ["baseline co"]),
        "pd-over-pd": table.ratios(first, "polyserve pd", [apart]),
        "co-of-optimum": table.of_optimum(first, "polyserve co"),
        "pd-of-optimum": table.of_optimum(first, "polyserve pd"),
        "co-spread": Estimate.exact(table.spread(first, "polyserve co")),
        "pd-spread": Estimate.exact(table.spread(first, "polyserve pd")),
        "co-second-host": table.ratios(table.hosts[-1], "polyserve co", ["baseline co"]),
    }
    seeds = sorted({seed for v in values for seed in v["seeds"]})
    given = {
        "replicas": REPLICAS,
        "target": TARGET,
        "hosts": HOSTS,
        "systems": {k: list(v) for k, v in SYSTEMS.items()},
    }
    return Found(estimates, list(values), seeds, "deadline", given)


def draw(data: Any, axes: Any) -> None:
    """Goodput over the optimum of its mode, by data set."""
    table = Table(data)
    host = table.hosts[0]
    for nth, name in enumerate(table.names):
        own = {place: table.values.get((host, each, name)) for place, each in enumerate(table.sets)}
        shares = [np.mean(v["goodput"]) / v["optimum"] for v in own.values() if v]
        at = np.array([place for place, v in own.items() if v]) + 0.85 * (nth / len(table.names) - 0.5)
        axes.bar(at, shares, 0.85 / len(table.names), label=name)
    axes.set_xticks(range(len(table.sets)), table.sets, fontsize=7)
    axes.set_ylabel("goodput at 90 % over the optimum")
    axes.legend(fontsize=7)


def tables(data: Any) -> str:
    """A table for each host: goodput, its share of the optimum, and which systems are better. The optimum is of mean
    cost: no bound, where a tenth may miss and those that cost most do."""
    table, parts = Table(data), []
    for host in table.hosts:
        head = ["data set", "optimum over 90 % of the best baseline", *table.names]
        rows = [[*head, "best baseline", "better than polyserve"]]
        for each in table.sets_of(host, POLYSERVE[0]):
            own = {n: table.values[host, each, n] for n in table.names if (host, each, n) in table.values}
            mean = {name: float(np.mean(v["goodput"])) for name, v in own.items()}
            best = table.best(host, each, PAPERS)
            most = max(v["optimum"] for v in own.values()) / (TARGET * mean[best])
            ours = max(mean[name] for name in POLYSERVE if name in mean)
            once = {n: ", one seed" if len(v["seeds"]) == 1 else "" for n, v in own.items()}
            cells = {n: f"{mean[n]:.1f} ({100 * mean[n] / own[n]['optimum']:.0f} %{once[n]})" for n in own}
            rows.append([
                each, f"{most:.2f}×", *(cells.get(n, "") for n in table.names),
                f"`{own[best]['setting']}`", ", ".join(n for n in own if mean[n] > ours) or "none",
            ])  # fmt: skip
        parts.append(f"Host {host}; requests/s (share of the mode's optimum):\n\n{markdown(rows)}")
        tiers = [["data set", "system", *(t for t in next(iter(own.values()))["tiers"] if t != "all")]]
        for each, name in ((each, name) for each in table.sets_of(host, POLYSERVE[0]) for name in table.names):
            if (host, each, name) in table.values:
                shares = table.values[host, each, name]["tiers"]
                cells = {tier: f"{100 * s:.0f} %" for tier, s in shares.items()}
                tiers.append([each, name, *(cells.get(tier, "") for tier in tiers[0][2:])])
        parts.append(f"Attained by tier, at that rate:\n\n{markdown(tiers)}")
    return "\n\n".join(parts)
