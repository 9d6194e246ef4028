"""Ascendra beyond one rate: looser and tighter SLOs, overload with drops, groups, and what each of its parts gives.

Three A100 as 2L1H, some 600 s, judged by TTFT and mean TBT; Mistral-7B serves `ascendra-sharegpt4-mistral`
where no model is named. Rates are multiples of `HELD`, what Ascendra holds at 90 %, it is configured as
docs/policies/ascendra.md says, beside it stands the paper's configuration. Baselines: prefill-first and Sarathi at 512,
round robin, and `edf`. SLO scale (Fig. 9, bottom): at 0.98 × that rate. Variants and overload (Fig. 10 to 13): at
1.25 ×; in overload all systems drop what waits beyond its TTFT, also Sarathi as it was tuned. Waits at an instance
(Fig. 10) end with the start of the prompt or its offloading. Tickets are taken away by a router that never finds one.
Group of two (1L1H, Fig. 13): Llama-3.1-8B, `ascendra-longbench-llama`. Capacities of the pairs of models and data sets
that Fig. 9 leaves out (Fig. 14) are searched as in `ascendra_capacity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import Found
from experiments._axes import name_axes
from experiments._rate_search import geometric
from experiments.ascendra_capacity import CASES, CONFIGURED, TOLERANCE, Case, Searched, hardware, offered, served, share
from rubato.core.events import Finished, HandedOff, Placed, Started, Stepped
from rubato.core.interfaces import View
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import BenchResult
from rubato.measure.tables import markdown
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.policies import ascendra
from rubato.simulation.run_spec import RunSpec, running_mean
from rubato.simulation.simulate import simulate_events
from rubato.workloads import Workload

SOURCE = "Ascendra, §8.2 to §8.7, Fig. 9 to 14"
SECONDS = 1900.0

CASE, GROUP = "mistral", "llama"
SEEDS = (31, 32, 33)
DURATION = 600.0
HELD = {"mistral": 9.0, "llama": 3.7, "qwen": 1.6}  # requests/s at 90 % in SLO, as configured, another seed (101)
SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of all SLOs
OVERLOAD = 1.25  # of what Ascendra holds
LIGHT, HIGH = 0.2, 0.7  # where use of the HP is compared (§6.1: under light load), and waits (Fig. 10: under high load)
WAITS_AT = (LIGHT, HIGH, 1.0)
OURS, PAPER, EDF = "ascendra", "paper's settings", "edf"
BASELINES = {"prefill_first": "prefill_first@round_robin", "sarathi, 512": "sarathi:budget=512@round_robin"}
TWO_L = "@ascendra:groups=2L1H"
SYSTEMS: Mapping[str, str] = {OURS: CONFIGURED + TWO_L, **BASELINES, EDF: "edf@least_loaded"}
VARIANTS: Mapping[str, str] = {
    OURS: CONFIGURED + TWO_L,
    PAPER: "ascendra" + TWO_L,
    "shortest first (sjf)": f"{CONFIGURED},value=sjf{TWO_L}",
    "longest first (ljf)": f"{CONFIGURED},value=ljf{TWO_L}",
    "paper's settings, fixed batch": f"ascendra:elastic=false{TWO_L}",
    "1L2H": f"{CONFIGURED}@ascendra:groups=1L2H",
    "without tickets": f"{CONFIGURED}@{__name__}:groups=2L1H",
    **BASELINES,
    EDF: SYSTEMS[EDF],
}
_DROPPING = "experiments._dropping:of"
DROPPING: Mapping[str, str] = {
    OURS: f"{CONFIGURED},drop=true{TWO_L}",
    PAPER: f"ascendra:drop=true{TWO_L}",
    "prefill_first": f"{_DROPPING}=prefill_first@round_robin",
    "sarathi, 512": f"{_DROPPING}=sarathi,budget=512@round_robin",
    "sarathi, 4096": f"{_DROPPING}=sarathi,budget=4096,reserve_kv=true@round_robin",
    EDF: f"{_DROPPING}=edf@least_loaded",
}
PAIRS = {  # Fig. 14
    "mistral, LongBench": Case("ascendra-longbench-mistral", 3.4),
    "llama, ShareGPT4": Case("ascendra-sharegpt4-llama", 8.0),
    "qwen, LongBench": Case("ascendra-longbench-qwen", 1.5, 48_000),
}


@dataclass
class Router(ascendra.Router):
    """Ascendra's router without tickets (§6.1)."""

    def _has_ticket(self, hp: View) -> bool:
        return False


def jobs(small: bool) -> list[Job]:
    """One for each seed, system and model, so that little is lost when a run is interrupted."""
    duration, tolerance = (20.0, 0.5) if small else (DURATION, TOLERANCE)
    scales = SCALES[1:4] if small else SCALES
    made = []
    for seed in SEEDS[:1] if small else SEEDS:
        for case in CASES:
            made += [
                Job(f"scales {case} seed={seed} {name}", scaled, (case, name, seed, duration, scales))
                for name in SYSTEMS
            ]
        made += [Job(f"variants seed={seed} {name}", varied, (name, seed, duration)) for name in VARIANTS]
        made += [Job(f"overload seed={seed} {name}", dropping, (name, seed, duration)) for name in DROPPING]
        made += [
            Job(f"waits seed={seed} {name} at={load}", waits, (name, seed, duration, load))
            for name in (OURS, "without tickets")
            for load in WAITS_AT
        ]
        made += [Job(f"group seed={seed} {name}", of_two, (name, seed, duration, tolerance)) for name in SYSTEMS]
        made += [
            Job(f"pair {pair} seed={seed} {name}", paired, (pair, name, seed, duration, tolerance))
            for pair in PAIRS
            for name in SYSTEMS
        ]
    return made


def with_slos(load: Workload, scale: float) -> Workload:
    """All SLOs so many times as long."""

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else scale * seconds

    tiers = {tier: SLO(longer(slo.ttft), longer(slo.tpot), longer(slo.e2e)) for tier, slo in load.tiers.items()}
    return replace(load, tiers=tiers)


def at(case: str, seed: int, duration: float, rate: float) -> Workload:
    """rate: of what Ascendra holds."""
    return offered(CASES[case], seed, duration).rescaled(rate * HELD[case])


def row(run: BenchResult) -> dict[str, float]:
    """Shares in SLO and dropped, the P99 of TTFT and the mean TBT of what was served (Fig. 10), requests/s served."""
    ttfts, tpots = (
        [value for r in run.records if (value := getattr(r.verdict, name)) is not None] for name in ("ttft", "tpot")
    )
    dropped = sum(r.outcome == "refused" for r in run.records)
    return {
        "met": share(run),
        "dropped": dropped / len(run.records),
        "p99_ttft": float(np.quantile(ttfts, 0.99)),
        "tbt": float(np.mean(tpots)),
        "e2e_p99": e2e_p99(run),
    }


def scaled(case: str, name: str, seed: int, duration: float, scales: Sequence[float]) -> dict[str, Any]:
    """Shares in SLO at the rate that Ascendra holds, by the scale of SLOs (Fig. 9, bottom)."""
    load = at(case, seed, duration, 0.98)
    shares = [share(served(CASES[case], SYSTEMS[name], with_slos(load, s), seed)) for s in scales]
    return {"what": "scales", "case": case, "name": name, "seed": seed, "scales": list(scales), "shares": shares}


def _overloaded(what: str, choice: str, name: str, seed: int, duration: float) -> dict[str, Any]:
    found = row(served(CASES[CASE], choice, at(CASE, seed, duration, OVERLOAD), seed))
    return {"what": what, "name": name, "seed": seed, "seconds": duration, **found}


def varied(name: str, seed: int, duration: float) -> dict[str, Any]:
    """One variant or baseline (Fig. 10, 11, 13 right)."""
    return _overloaded("variants", VARIANTS[name], name, seed, duration)


def dropping(name: str, seed: int, duration: float) -> dict[str, Any]:
    """One system that drops (Fig. 12)."""
    return _overloaded("overload", DROPPING[name], name, seed, duration)


def waits(name: str, seed: int, duration: float, rate: float) -> dict[str, Any]:
    """Mean seconds from a request's placement to its start or its offloading, on LPs and on the HP, and the share of
    time that the HP runs."""
    load = at(CASE, seed, duration, rate)
    spec = RunSpec(hardware(CASES[CASE]), PolicyChoice.parse(VARIANTS[name]), 3, slo_rule="mean", lengths=running_mean)
    came: dict[str, tuple[float, str]] = {}
    waited: dict[str, list[float]] = {"lp": [], "hp": []}
    busy = last = 0.0
    for event in simulate_events(list(load.requests()), load.truth(), spec, seed):
        if isinstance(event, Placed):
            came[event.id] = event.at, event.replica
        elif isinstance(event, Started | HandedOff) and event.id in came:
            placed, replica = came.pop(event.id)
            waited["hp" if replica == "r2" else "lp"].append(event.at - placed)
        elif isinstance(event, Stepped) and event.id == "r2":
            busy += event.seconds
        elif isinstance(event, Finished):
            last = event.at
    used = {**{kind: float(np.mean(own)) for kind, own in waited.items() if own}, "hp_busy": busy / last}
    return {"what": "waits", "name": name, "seed": seed, "rate": rate, "used": used}


def _capacity(case: Case, choice: str, seed: int, duration: float, tolerance: float, replicas: int) -> dict[str, Any]:
    search = Searched(case, seed, duration, tolerance, replicas)
    return {"capacity": search.capacity([choice])[0], "seconds": duration, "e2e_p99": search.longest}


def of_two(name: str, seed: int, duration: float, tolerance: float) -> dict[str, Any]:
    """Capacity of a group of two (Fig. 13, left)."""
    choice = f"{CONFIGURED}@ascendra:groups=1L1H" if name == OURS else SYSTEMS[name]
    found = _capacity(CASES[GROUP], choice, seed, duration, tolerance, 2)
    return {"what": "group", "name": name, "seed": seed, **found}


def paired(pair: str, name: str, seed: int, duration: float, tolerance: float) -> dict[str, Any]:
    """Capacity of three replicas with the other data set (Fig. 14)."""
    found = _capacity(PAIRS[pair], SYSTEMS[name], seed, duration, tolerance, 3)
    return {"what": "pair", "pair": pair, "name": name, "seed": seed, **found}


# --------------------------------------------------------------------------- what came out


def tightest(scales: Sequence[float], shares: Sequence[float], target: float = 0.9) -> float:
    """The scale of SLOs at which so many are in SLO, between those tried (logarithmic); the largest beyond them."""
    for low, high in zip(range(len(scales)), range(1, len(scales)), strict=False):
        if shares[low] < target <= shares[high]:
            part = (target - shares[low]) / (shares[high] - shares[low])
            return float(scales[low] * (scales[high] / scales[low]) ** part)
    return scales[0] if shares[0] >= target else scales[-1]


def by_seed(values: Sequence[Any], what: str, **same: Any) -> list[dict[str, Any]]:
    """Seed by seed, the values of one kind by system."""
    found: dict[int, dict[str, Any]] = {}
    for value in values:
        if value["what"] == what and all(value[key] == wanted for key, wanted in same.items()):
            found.setdefault(value["seed"], {})[value["name"]] = value
    return list(found.values())


def found(values: Sequence[Any], small: bool) -> Found:
    variants, overload = (by_seed(values, what) for what in ("variants", "overload"))

    def over(name: str, other: str) -> Estimate:
        return over_seeds([100 * (v[name]["met"] - v[other]["met"]) for v in variants])

    def strictness(case: str) -> Estimate:
        own = by_seed(values, "scales", case=case)
        least = [{name: tightest(v["scales"], v["shares"]) for name, v in systems.items()} for systems in own]
        return geometric([min(v[b] for b in BASELINES) / v[OURS] for v in least])

    def capacity(own: Sequence[Mapping[str, Any]], *names: str) -> Estimate:
        return geometric([v[OURS]["capacity"] / max(v[n]["capacity"] for n in names) for v in own])

    missed = [(1 - v[OURS]["met"]) / min(1 - v[b]["met"] for b in BASELINES) for v in overload]
    high, light = (by_seed(values, "waits", rate=rate) for rate in (HIGH, LIGHT))
    estimates = {f"slo-scale-{case}": strictness(case) for case in CASES}
    estimates |= {
        "overload-with-drops": geometric([v[OURS]["met"] / max(v[b]["met"] for b in BASELINES) for v in overload]),
        "overload-missed": geometric(missed),
        "edf-over-sjf": over(OURS, "shortest first (sjf)"),
        "elastic": over(PAPER, "paper's settings, fixed batch"),
        "2l1h-over-1l2h": over(OURS, "1L2H"),
        "1l1h-over-baselines": capacity(by_seed(values, "group"), *BASELINES),
        "hp-waits": over_seeds([v[OURS]["used"]["lp"] / v[OURS]["used"]["hp"] for v in high]),
        "tickets-hp-use": over_seeds(
            [v[OURS]["used"]["hp_busy"] - v["without tickets"]["used"]["hp_busy"] for v in light]
        ),
    }
    for pair, each in PAIRS.items():
        own = by_seed(values, "pair", pair=pair)
        name = each.scenario.removeprefix("ascendra-")
        estimates[f"{name}-over-default"] = capacity(own, *BASELINES)
        if name == "longbench-qwen":
            estimates[f"{name}-over-edf"] = capacity(own, EDF)
    settings = {
        "scenarios": {name: case.scenario for name, case in ({**CASES, **PAIRS}).items()}, "held": HELD,
        "variants": dict(VARIANTS), "dropping": dict(DROPPING),
    }  # fmt: skip
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", settings)


def draw(data: Any, axes: Any) -> None:
    """Share in SLO by the scale of SLOs, the mean of the seeds."""
    own = by_seed(data, "scales", case=CASE)
    for name, first in own[0].items():
        axes.plot(first["scales"], 100 * np.mean([v[name]["shares"] for v in own], axis=0), "o-", label=name)
    axes.axhline(90.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    name_axes(axes, "SLO scale", "in SLO (%)")


def tables(data: Any) -> str:
    parts = [_by_scale(data, case) for case in dict.fromkeys(v["case"] for v in data if v["what"] == "scales")]
    parts.append(_overload(by_seed(data, "variants"), f"at {OVERLOAD:g} × capacity"))
    parts.append(_overload(by_seed(data, "overload"), f"all drop, at {OVERLOAD:g} × capacity"))
    rows = [["× capacity", "", "wait at an LP, s", "at the HP, s", "HP runs"]]
    for rate in WAITS_AT:
        used = by_seed(data, "waits", rate=rate)
        for name in used[0]:
            mean = {key: np.mean([v[name]["used"].get(key, np.nan) for v in used]) for key in ("lp", "hp", "hp_busy")}
            busy = f"{100 * mean['hp_busy']:.0f} % of the time"
            rows.append([f"{rate:g}", name, f"{mean['lp']:.3f}", f"{mean['hp']:.3f}", busy])
    parts.append(markdown(rows))
    columns = {"llama, LongBench, two replicas": by_seed(data, "group")}
    columns |= {p: by_seed(data, "pair", pair=p) for p in dict.fromkeys(v["pair"] for v in data if "pair" in v)}
    rows = [["capacity, requests/s", *columns]]
    for name in SYSTEMS:
        rows.append([name, *(f"{np.mean([v[name]['capacity'] for v in own]):.2f}" for own in columns.values())])
    return "\n\n".join([*parts, markdown(rows)])


def _by_scale(data: Any, case: str) -> str:
    own = by_seed(data, "scales", case=case)
    rows = [[f"{case}, SLO scale", *(f"{s:g}" for s in next(iter(own[0].values()))["scales"])]]
    for name in own[0]:
        rows.append([name, *(f"{100 * s:.0f} %" for s in np.mean([v[name]["shares"] for v in own], axis=0))])
    return markdown(rows)


def _overload(own: Sequence[Mapping[str, Any]], head: str) -> str:
    rows = [[head, "in SLO", "dropped", "P99 of TTFT, s", "mean TBT, ms"]]
    for name in own[0]:
        mean = {key: np.mean([v[name][key] for v in own]) for key in ("met", "dropped", "p99_ttft", "tbt")}
        shares = (f"{100 * mean[key]:.1f} %" for key in ("met", "dropped"))
        rows.append([name, *shares, f"{mean['p99_ttft']:.2f}", f"{1000 * mean['tbt']:.0f}"])
    return markdown(rows)
