"""Each paper's headline comparison with the host's time of vLLM in 2024, and of today's vLLM, on the same requests.

A part of each headline figure, by its own machinery and judge, with shorter runs and three seeds: SLOs-Serve's four
scenarios on OPT-13B without drafts (deadline rule), each system in the setting that the figure's tuning most often
finds; one of PolyServe's data sets on ten replicas, where each setting of a baseline is searched, AdaServe's two models
with unequal acceptance and, with one seed, Ascendra's Mistral, tuned with each host. 2024's is the host term of the
figures (PolyServe's: the constant that its paper's 15 ms imply); today's is the default of each profile, fitted to
measured points (figure `silicon`). SA's profile is of whole steps and has none. TTFTs that are multiples of an idle
replica's prefill follow the host; times in seconds stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from experiments import Found, adaserve_rate, ascendra_capacity, polyserve_goodput, slos_serve_capacity
from experiments._adaserve_runs import MODELS, REAL
from experiments._host import AS_STATED, TODAY
from experiments._polyserve_runs import BEFORE
from experiments._rate_search import geometric
from experiments._slos_serve_runs import FULL, OURS, SMALL_SEARCH
from rubato.latency import profiles
from rubato.measure.confidence import Estimate
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.planning.judge.search import MEASURES

SOURCE = "ours, on SLOs-Serve, Fig. 9; PolyServe, Fig. 9; AdaServe, Fig. 8; Ascendra, Fig. 9"
SECONDS = 1200.0

HOSTS = {"2024": AS_STATED, "today": TODAY}
CASES, PLAIN, PAPERS_TWO = slos_serve_capacity.OPT_ONE, slos_serve_capacity.PLAIN, slos_serve_capacity.PAPERS_TWO
SETTINGS = {
    PLAIN: f"{PLAIN}:max_batch_seconds=0.1",
    "prefill_first": "prefill_first:reserve_kv=true",
    "sarathi": "sarathi:budget=0,reserve_kv=true",
}
SEEDS = (1, 2, 3)
COUNT, COUNTS = 300, {"coder-13b": 400}  # of requests, for SLOs-Serve; more where bursts are long
DATA, REPLICAS = "mooncake-synthetic", 10
ALL, EACH = (list(MEASURES)[i] for i in (0, -1))
FLEET = (*polyserve_goodput.POLYSERVE, *polyserve_goodput.PAPERS)
RATES = {"llama": (5.0, 7.0, 9.0), "qwen": (6.0, 8.5, 11.0)}  # requests/s: the faster host holds more
PROFILES = ("opt-13b-2xa100-40g", "llama-3.1-8b-h200", "llama-3.1-70b-4xa100", "qwen2.5-32b-2xa100", "mistral-7b-a100")
SECONDS_OF = {"adaserve": 30.0, "ascendra": 300.0}  # arrivals of a run
MODEL, TUNED = "mistral", (ascendra_capacity.OURS, *ascendra_capacity.TUNED)


def jobs(small: bool) -> list[Job]:
    """One for each host, and system or model."""
    cases, models = (CASES[:1], ("llama",)) if small else (CASES, tuple(MODELS))
    fleet, seeds = polyserve_goodput.SMALL if small else FLEET, ascendra_capacity.SEEDS[:1]
    made = []
    for host in HOSTS:
        made += [
            Job(f"slos-serve {host} {case} {name}", slos_serve, (host, case, name, small))
            for case in cases for name in (PLAIN, *PAPERS_TWO)
        ]  # fmt: skip
        made += [Job(f"polyserve {host} {name}", polyserve, (host, name, small)) for name in fleet]
        made += [Job(f"adaserve {host} {model}", adaserve, (host, model, small)) for model in models]
        made += [
            Job(f"ascendra {host} {name} {seed}", ascendra, (host, name, seed, small))
            for name in TUNED
            for seed in seeds
        ]
    return made


def slos_serve(host: str, case: str, system: str, small: bool) -> dict[str, Any]:
    scale = (
        replace(SMALL_SEARCH, term=HOSTS[host])
        if small
        else replace(FULL, count=COUNTS.get(case, COUNT), term=HOSTS[host])
    )
    found = {OURS: (SETTINGS[system], 0.0)}
    return {
        "paper": "slos-serve", "host": host,
        "runs": [slos_serve_capacity.measured(case, system, found, seed, scale, "") for seed in scale.seeds],
    }  # fmt: skip


def polyserve(host: str, name: str, small: bool) -> dict[str, Any]:
    own = TODAY if HOSTS[host] == TODAY else polyserve_goodput.HOST
    replicas, seeds = (2, SEEDS[:1]) if small else (REPLICAS, SEEDS)
    settings = polyserve_goodput.settings(name, replicas)[: 1 if small else None]
    stays, fill = (1.0, 0.3) if small else (polyserve_goodput.stays(DATA, replicas, own), BEFORE)
    ran = polyserve_goodput.measured(
        DATA, name, settings, seeds, stays, replicas, fill, own, (ALL, EACH), every=not small
    )  # fmt: skip
    return {"paper": "polyserve", "host": host, **ran}


def adaserve(host: str, model: str, small: bool) -> dict[str, Any]:
    rates, seconds, seeds = ((4.0, 8.0), 2.0, SEEDS[:1]) if small else (RATES[model], SECONDS_OF["adaserve"], SEEDS)
    cells = adaserve_rate.measured(model, REAL, rates, seconds, seeds, None, None, HOSTS[host])
    return {"paper": "adaserve", "host": host, "model": model, "cells": cells}


def ascendra(host: str, name: str, seed: int, small: bool) -> dict[str, Any]:
    seconds, tolerance = (20.0, 0.5) if small else (SECONDS_OF["ascendra"], ascendra_capacity.TOLERANCE)
    ran = ascendra_capacity.measured(MODEL, seed, seconds, tolerance, name, HOSTS[host])
    return {"paper": "ascendra", "host": host, **ran}


# --------------------------------------------------------------------------- what was found


class Results:
    """Each paper's ratio with each host."""

    def __init__(self, values: Sequence[Mapping[str, Any]]) -> None:
        self.values = values

    def of(self, paper: str, host: str) -> list[Mapping[str, Any]]:
        return [v for v in self.values if (v["paper"], v["host"]) == (paper, host)]

    def ratio(self, paper: str, host: str) -> Estimate:
        of: Mapping[str, Callable[[str], Estimate]] = {
            "slos-serve": self._slos_serve, "polyserve": partial(self._polyserve, EACH),
            "polyserve-all": partial(self._polyserve, ALL), "ascendra": self._ascendra,
            **{f"adaserve-{model}": partial(self._adaserve, model) for model in MODELS},
        }  # fmt: skip
        return of[paper](host)

    def _slos_serve(self, host: str) -> Estimate:
        """Geometric mean of the scenarios', over the better of the paper's two baselines."""
        runs = [run for value in self.of("slos-serve", host) for run in value["runs"]]
        return slos_serve_capacity.Rates(runs).ratio(
            list(dict.fromkeys(r["case"] for r in runs)), PAPERS_TWO, OURS, PLAIN
        )

    def _polyserve(self, measure: str, host: str) -> Estimate:
        """The mode chosen on the tuning's seed, over the best baseline."""
        table = polyserve_goodput.Table(self.of("polyserve", host))
        ratios = table.ratio(DATA, table.chosen(DATA, measure), measure)
        return geometric(ratios)

    def _adaserve(self, model: str, host: str) -> Estimate:
        """Times fewer violations than the best of the paper's baselines, where that attains 0.41."""
        every = self.of("adaserve", host)
        cells = next((v["cells"] for v in every if v["model"] == model), every[0]["cells"])  # a small run has one
        return adaserve_rate.violations_at_point(cells)

    def _ascendra(self, host: str) -> Estimate:
        """Over the better of the tuned baselines."""
        return ascendra_capacity.ratio(self.of("ascendra", host), MODEL, ascendra_capacity.TUNED)


COMPARED = ("slos-serve", "polyserve", "polyserve-all", *(f"adaserve-{model}" for model in MODELS), "ascendra")


def found(values: Sequence[Any], small: bool) -> Found:
    results = Results(values)
    estimates = {f"{paper}-{host}": results.ratio(paper, host) for paper in COMPARED for host in HOSTS}
    terms = {profile: asdict(term) for profile in PROFILES if (term := profiles.load(profile).host_term) is not None}
    settings = {
        "hosts": HOSTS, "terms": terms, "systems": SETTINGS, "data": DATA, "replicas": REPLICAS,
        "counted": polyserve_goodput.COUNTED,
        "counts": {case: COUNTS.get(case, COUNT) for case in CASES}, "rates": RATES, "model": MODEL,
        "seconds": SECONDS_OF,
    }  # fmt: skip
    return Found(estimates, list(values), [1] if small else list(SEEDS), "each paper's", settings)


def tables(data: Sequence[Any]) -> str:
    """The largest loss first."""
    results = Results(data)
    rows = []
    ran = {measure for v in data if v["paper"] == "polyserve" for measure in v["measures"]}
    for paper in [name for name in COMPARED if name != "polyserve-all" or ALL in ran]:
        then, today = (results.ratio(paper, host) for host in HOSTS)
        shown = [then.shown(), today.shown()]
        rows.append((today.value / then.value, [paper, *shown, f"{today.value / then.value:.2f}"]))
    head = ["headline comparison", "vLLM of 2024", "vLLM of today", "today's over 2024's"]
    return markdown([head, *(row for _, row in sorted(rows))])
