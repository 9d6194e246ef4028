"""Ascendra beyond one rate: looser and tighter SLOs, overload with drops, and what each of its parts gives.

Mistral-7B, `ascendra-sharegpt4-mistral`, three A100 as 2L1H, some 600 s, judged by TTFT and mean TBT, except one group
of two (1L1H), for which Llama-3.1-8B serves `ascendra-longbench-llama`. Rates are multiples of what Ascendra holds at
90 %, searched first under each seed; baselines are prefill-first and Sarathi at 512, round robin. Overload: 1.25 × that
rate; the baselines, which drop nothing, serve all in turn. Tickets are taken away by a router that never finds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import Found
from experiments.ascendra_capacity import CASES, Searched, hardware, offered, served, share
from rubato.core.events import Finished, Placed, Started, Stepped
from rubato.core.interfaces import View
from rubato.core.request import SLO
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning.capacity import e2e_p99
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.policies import ascendra
from rubato.simulation.run_spec import RunSpec, running_mean
from rubato.simulation.simulate import simulate_events
from rubato.workloads import Workload

SOURCE = "Ascendra, §8.2 to §8.7, Fig. 9 to 13"
SECONDS = 9000.0

CASE, PAIR = "mistral", "llama"
DURATION = 600.0
SEEDS = (1, 2)
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of all SLOs
RATES = (1.0, 1.25)  # of Ascendra's capacity
OVERLOAD = 1.25
BASELINES = {"prefill_first": "prefill_first@round_robin", "sarathi, 512": "sarathi:budget=512@round_robin"}
OURS = "ascendra@ascendra:groups=2L1H"
VARIANTS: Mapping[str, str] = {
    "ascendra": OURS,
    "shortest first (sjf)": "ascendra:value=sjf@ascendra:groups=2L1H",
    "longest first (ljf)": "ascendra:value=ljf@ascendra:groups=2L1H",
    "first come (fcfs)": "ascendra:value=fcfs@ascendra:groups=2L1H",
    "plain deadlines (edf_plain)": "ascendra:value=edf_plain@ascendra:groups=2L1H",
    "fixed batch at the HP": "ascendra:elastic=false@ascendra:groups=2L1H",
    "1L2H": "ascendra@ascendra:groups=1L2H",
    "with drops": "ascendra:drop=true@ascendra:groups=2L1H",
    "without tickets": f"ascendra@{__name__}:groups=2L1H",
}


@dataclass
class Router(ascendra.Router):
    """Ascendra's router without tickets (§6.1)."""

    def _ticket(self, hp: View) -> bool:
        return False


def jobs(small: bool) -> list[Job]:
    seeds, duration, tolerance = (SEEDS[:1], 20.0, 0.5) if small else (SEEDS, DURATION, 0.04)
    made = []
    for seed in seeds:
        made.append(Job(f"scales seed={seed}", scaled, (seed, duration, tolerance, SCALES[2:5] if small else SCALES)))
        made.append(Job(f"variants seed={seed}", varied, (seed, duration, tolerance, RATES[-1:] if small else RATES)))
        made.append(Job(f"pair seed={seed}", paired, (seed, duration, tolerance)))
    return made


def with_slos(load: Workload, scale: float) -> Workload:
    """All SLOs so many times as long."""

    def longer(seconds: float | None) -> float | None:
        return None if seconds is None else scale * seconds

    tiers = {tier: SLO(longer(slo.ttft), longer(slo.tpot), longer(slo.e2e)) for tier, slo in load.tiers.items()}
    return replace(load, tiers=tiers)


def _found(seed: int, duration: float, tolerance: float) -> float:
    return Searched(CASE, seed, duration, tolerance).capacity([OURS])[0]


def scaled(seed: int, duration: float, tolerance: float, scales: Sequence[float]) -> dict[str, Any]:
    """Shares in SLO at the rate that Ascendra holds, by the scale of SLOs (Fig. 9, bottom)."""
    load = offered(CASE, seed, duration).rescaled(0.98 * _found(seed, duration, tolerance))
    shares = {}
    for name, choice in {"ascendra": OURS, **BASELINES}.items():
        shares[name] = [share(served(CASE, choice, with_slos(load, s), seed)) for s in scales]
    return {"what": "scales", "seed": seed, "scales": list(scales), "shares": shares}


def varied(seed: int, duration: float, tolerance: float, rates: Sequence[float]) -> dict[str, Any]:
    """Of each variant and baseline, by rate: shares in SLO, what was dropped; of some, waits by kind of replica."""
    held = _found(seed, duration, tolerance)
    rows: dict[str, list[dict[str, float]]] = {}
    longest = 0.0
    for name, choice in {**VARIANTS, **BASELINES}.items():
        rows[name] = []
        for rate in rates:
            run = served(CASE, choice, offered(CASE, seed, duration).rescaled(rate * held), seed)
            longest = max(longest, e2e_p99(run))
            refused = sum(r.outcome == "refused" for r in run.records)
            rows[name].append({"met": share(run), "refused": refused / len(run.records)})
    at = offered(CASE, seed, duration).rescaled(0.7 * held)
    used = {name: waits(VARIANTS[name], at, seed) for name in ("ascendra", "without tickets")}
    return {
        "what": "variants", "seed": seed, "capacity": held, "rates": list(rates), "rows": rows, "used": used,
        "seconds": duration, "e2e_p99": longest,
    }  # fmt: skip


def waits(choice: str, load: Workload, seed: int) -> dict[str, float]:
    """Mean seconds from a request's placement to its start on LPs and on the HP, and the share of time that the HP
    runs."""
    spec = RunSpec(hardware(CASE), PolicyChoice.parse(choice), 3, slo_rule="mean", lengths=running_mean)
    came: dict[str, tuple[float, str]] = {}
    waited: dict[str, list[float]] = {"lp": [], "hp": []}
    busy = last = 0.0
    for event in simulate_events(list(load.requests()), load.truth(), spec, seed):
        if isinstance(event, Placed):
            came[event.id] = event.at, event.replica
        elif isinstance(event, Started) and event.id in came:
            at, replica = came.pop(event.id)
            waited["hp" if replica == "r2" else "lp"].append(event.at - at)
        elif isinstance(event, Stepped) and event.id == "r2":
            busy += event.seconds
        elif isinstance(event, Finished):
            last = event.at
    return {**{kind: float(np.mean(own)) for kind, own in waited.items() if own}, "hp_busy": busy / last}


def paired(seed: int, duration: float, tolerance: float) -> dict[str, Any]:
    """Capacities of a group of two (Fig. 13, left)."""
    search = Searched(PAIR, seed, duration, tolerance, replicas=2)
    systems = {"1L1H": "ascendra@ascendra:groups=1L1H", **BASELINES}
    return {"what": "pair", "seed": seed, "capacity": {n: search.capacity([c])[0] for n, c in systems.items()}}


# --------------------------------------------------------------------------- what came out


def tightest(scales: Sequence[float], shares: Sequence[float], target: float = 0.9) -> float:
    """The scale of SLOs at which so many are in SLO, between those tried (logarithmic); the largest beyond them."""
    for low, high in zip(range(len(scales)), range(1, len(scales)), strict=False):
        if shares[low] < target <= shares[high]:
            part = (target - shares[low]) / (shares[high] - shares[low])
            return float(scales[low] * (scales[high] / scales[low]) ** part)
    return scales[0] if shares[0] >= target else scales[-1]


def found(values: Sequence[Any], small: bool) -> Found:
    of = {what: [v for v in values if v["what"] == what] for what in ("scales", "variants", "pair")}

    def met(name: str, v: Any, rate: float = OVERLOAD) -> float:
        return float(v["rows"][name][v["rates"].index(rate)]["met"])

    def over(name: str, other: str) -> Estimate:
        return over_seeds([100 * (met(name, v) - met(other, v)) for v in of["variants"]])

    strictness = [
        min(tightest(v["scales"], v["shares"][b]) for b in BASELINES) / tightest(v["scales"], v["shares"]["ascendra"])
        for v in of["scales"]
    ]
    estimates = {
        "slo-scale": over_seeds(strictness),
        "overload-with-drops": over_seeds(
            [met("with drops", v) / max(met(b, v) for b in BASELINES) for v in of["variants"]]
        ),
        "edf-over-sjf": over("ascendra", "shortest first (sjf)"),
        "elastic": over("ascendra", "fixed batch at the HP"),
        "2l1h-over-1l2h": over("ascendra", "1L2H"),
        "1l1h-over-baselines": over_seeds(
            [v["capacity"]["1L1H"] / max(v["capacity"][b] for b in BASELINES) for v in of["pair"]]
        ),
        "hp-waits": over_seeds([v["used"]["ascendra"]["lp"] / v["used"]["ascendra"]["hp"] for v in of["variants"]]),
        "tickets-hp-use": over_seeds(
            [v["used"]["ascendra"]["hp_busy"] - v["used"]["without tickets"]["hp_busy"] for v in of["variants"]]
        ),
    }
    settings = {"case": CASES[CASE].scenario, "pair": CASES[PAIR].scenario, "variants": dict(VARIANTS)}
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", settings)


def draw(data: Any, axes: Any) -> None:
    """Share in SLO by the scale of SLOs, the mean of the seeds."""
    own = [v for v in data if v["what"] == "scales"]
    for name in own[0]["shares"]:
        axes.plot(own[0]["scales"], 100 * np.mean([v["shares"][name] for v in own], axis=0), "o-", label=name)
    axes.axhline(90.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("SLO scale")
    axes.set_ylabel("in SLO (%)")
    axes.legend()


def tables(data: Any) -> str:
    own = [v for v in data if v["what"] == "variants"]
    rates = own[0]["rates"]
    rows = [["in SLO (refused)", *(f"{rate:g} × capacity" for rate in rates)]]
    for name in own[0]["rows"]:
        cells = []
        for i in range(len(rates)):
            met, refused = (100 * np.mean([v["rows"][name][i][key] for v in own]) for key in ("met", "refused"))
            cells.append(f"{met:.1f} %" + (f" ({refused:.0f} %)" if refused else ""))
        rows.append([name, *cells])
    used = [["at 0.7 × capacity", "wait at an LP, s", "at the HP, s", "HP runs"]]
    for name in own[0]["used"]:
        mean = {key: np.mean([v["used"][name].get(key, np.nan) for v in own]) for key in ("lp", "hp", "hp_busy")}
        used.append([name, f"{mean['lp']:.3f}", f"{mean['hp']:.3f}", f"{100 * mean['hp_busy']:.0f} % of the time"])
    return f"{markdown(rows)}\n\n{markdown(used)}"
