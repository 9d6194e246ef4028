"""Capacity of one to four replicas under SLOs-Serve and its router, at 90 % attainment (Fig. 13).

The paper's model for it, OPT-7B, one A100-40G a replica; ToolLLM has its own. Beside it `sarathi`. Output lengths are
known and the judge is the paper's; ratios are paired by seed. Chat comes evenly: as many requests a replica, so that
runs last as long. Coder and ToolLLM come in bursts that a higher rate makes shorter, as the paper's traces do: the same
requests for every fleet, so that all see as many bursts. At four times the rate a burst is over in a quarter of the
time, so four replicas hold more than four times as much, whatever schedules them (`sarathi`'s row). A service that
grows has bursts as long as before with more requests in each: that is "coder, as long", and what to plan with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments import Found
from experiments import _slos_serve_runs as runs
from experiments._axes import name_axes
from experiments._rate_search import geometric
from experiments._slos_serve_runs import FULL, PAPERS, SMALL_SEARCH, CapacitySearch, Scale
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload
from rubato.workloads.arrivals import Bursts

SOURCE = "SLOs-Serve, Fig. 13 and §6.2"
SECONDS = 2652.0

REPLICAS = (1, 2, 3, 4)
MOST = REPLICAS[-1]
OURS, SARATHI = "slos_serve", "sarathi@least_loaded"
TURNS, LEAST_LOADED = (f"slos_serve:max_hops=-1@{router}" for router in ("round_robin", "least_loaded"))
FLEETS = (*((OURS, n) for n in REPLICAS), (SARATHI, 1), (SARATHI, MOST))


@dataclass(frozen=True)
class Case:
    """count: requests of a run, of each replica (`each`) or in all. start: requests/s of a replica to begin with.
    as_long: bursts hold as many times the requests as there are replicas. fleets: systems, and how many replicas."""

    scenario: str
    profile: str
    count: int
    each: bool
    start: float
    as_long: bool = False
    fleets: Sequence[tuple[str, int]] = FLEETS


OPT = "opt-6.7b-a100-40g@vllm-2024"
AS_LONG = "coder-as-long"
CASES = {
    "chatbot": Case("chatbot", OPT, 500, True, 3.0),
    "coder": Case("coder", OPT, 1200, False, 1.5),
    AS_LONG: Case("coder", OPT, 1200, True, 1.5, as_long=True),
    "toolllm": Case(  # a run takes ten times as long as another
        "toolllm", "llama-2-7b-a100-40g@vllm-2024", 600, False, 0.15,
        fleets=((OURS, 1), (OURS, MOST), (SARATHI, 1), (SARATHI, MOST)),
    ),
}  # fmt: skip


def jobs(small: bool) -> list[Job]:
    scale = SMALL_SEARCH if small else FULL
    return [
        *(Job(f"{case} same", same, (case, scale)) for case in CASES),
        *(Job(f"{case} {system} replicas={n} seed={seed}", search, (case, system, n, seed, scale))
          for case in CASES for system, n in CASES[case].fleets for seed in scale.seeds),
    ]  # fmt: skip


def search(case: str, system: str, replicas: int, seed: int, scale: Scale) -> dict[str, Any]:
    """The capacity of so many replicas, requests/s."""
    own = CASES[case]
    machine = runs.hardware(own.scenario, scale, own.profile)
    tried = CapacitySearch(_load(case, replicas, seed, scale), machine, seed, replicas)
    rate = tried.capacity(system, PAPERS, own.start, runs.FAR if scale.count else runs.NEAR)
    seconds, p99 = tried.lasted(system, rate)
    return {
        "case": case, "system": system, "replicas": replicas, "seed": seed, "capacity": rate * replicas,
        "tried": tried.shares_tried(), "seconds": seconds, "e2e_p99": p99,
    }  # fmt: skip


def _load(case: str, replicas: int, seed: int, scale: Scale) -> Workload:
    own, bursts = CASES[case], runs.stand_in(CASES[case].scenario)
    if own.as_long:
        assert isinstance(bursts, Bursts)
        bursts = replace(bursts, size=bursts.size * replicas, hold=bursts.hold * replicas)
    return runs.load(own.scenario, seed, scale, own.profile, own.count * (replicas if own.each else 1), bursts)


def same(case: str, scale: Scale) -> dict[str, Any]:
    """Requests that one replica does not serve alike under both other routers, at the rate where searches begin."""
    tokens = []
    load = _load(case, 1, 0, scale).rescaled(CASES[case].start)
    machine = runs.hardware(CASES[case].scenario, scale, CASES[case].profile)
    for system in (TURNS, LEAST_LOADED):
        spec = RunSpec(machine, PolicyChoice.parse(system), lengths=oracle_lengths)
        tokens.append([(r.id, r.times, r.verdict.met) for r in simulate(load, spec, causes=False).records])
    return {"case": case, "differ": sum(len(set(each)) > 1 for each in zip(*tokens, strict=True))}


def found(values: Sequence[Any], small: bool) -> Found:
    scale = SMALL_SEARCH if small else FULL
    rates = {(v["case"], v["system"], v["replicas"], v["seed"]): v["capacity"] for v in values if "capacity" in v}

    def over_one(case: str, system: str, replicas: int) -> Estimate:
        return geometric([rates[case, system, replicas, s] / rates[case, system, 1, s] for s in scale.seeds])

    estimates = {"one-replica-any-router": Estimate.exact(sum(v.get("differ", 0) for v in values))}
    for name, case in CASES.items():
        for system, n in case.fleets:
            if n > 1:
                estimates[f"{name}-{n}{'' if system == OURS else '-sarathi'}"] = over_one(name, system, n)
    settings = {
        "target": PAPERS, "lengths": "oracle",
        "counts": {name: scale.count or case.count for name, case in CASES.items()},
        "profiles": {name: case.profile for name, case in CASES.items()},
    }  # fmt: skip
    return Found(estimates, list(values), scale.seeds, "windowed", settings)


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    for case in CASES:
        rates = {
            n: [v["capacity"] for v in data if (v["case"], v.get("system"), v.get("replicas")) == (case, OURS, n)]
            for n in REPLICAS
        }
        ran = [n for n in REPLICAS if rates[n]]
        axes.plot(ran, [np.mean(rates[n]) / np.mean(rates[1]) for n in ran], "o-", label=case)
    axes.plot(REPLICAS, REPLICAS, ":", color="grey", label="linear")
    axes.set_xticks(REPLICAS)
    name_axes(axes, "replicas", "capacity, of one replica's")
