"""Capacity of one to four replicas under SLOs-Serve and its router, at 90 % attainment (Fig. 13).

The paper's model for it, OPT-7B, one A100-40G a replica; ToolLLM has its own. Beside it, on four replicas: `slos_serve`
under routers that are not SLO-aware, and `sarathi`. Output lengths are known, as in the paper. Ratios are
paired by seed. Coder and ToolLLM come in bursts that a higher rate makes shorter: the same requests for every fleet, so
that all see as many bursts. Chat comes evenly: as many requests a replica, so that runs last as long.

Why four replicas hold more than four times as much as one: a burst that one replica must decline in part is shared by
several, whose queues are seldom full at once. Any router that spreads requests does most of that; SLO-aware routing
adds a few per cent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import Found
from experiments.slos_serve_capacity import with_outputs
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.planning import capacity
from rubato.planning.feasibility import feasible_only
from rubato.planning.jobs import Job
from rubato.planning.request_source import ScenarioSource
from rubato.simulation.run_spec import Hardware, RunSpec, oracle_lengths, packaged_hardware
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload
from rubato.workloads.resample import Stretch

SOURCE = "SLOs-Serve, Fig. 13 and §6.2"
SECONDS = 2800.0

TARGET = 0.9
REPLICAS = (1, 2, 3, 4)
MOST = REPLICAS[-1]
OURS, TURNS, SARATHI = "slos_serve", "slos_serve@round_robin", "sarathi@least_loaded"
BESIDE = (TURNS, "slos_serve@least_loaded", SARATHI)


@dataclass(frozen=True)
class Case:
    """count: requests of a run; each: of each replica, else in all. start: requests/s of a replica to begin with."""

    profile: str
    count: int
    each: bool
    start: float


OPT = "opt-6.7b-a100-40g"
CASES = {
    "chatbot": Case(OPT, 200, True, 3.0),
    "coder": Case(OPT, 700, False, 2.5),
    "toolllm": Case("llama-2-7b-a100-40g", 250, False, 0.25),
}


@dataclass(frozen=True)
class Scale:
    """count: requests of a run, where not the case's. output: of a stage at most. limits: of the engine, where not the
    profile's."""

    seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    tolerance: float = 0.1
    count: int = 0
    output: int = 1 << 20
    limits: tuple[tuple[str, int], ...] = ()


FULL = Scale()
SMALL = Scale((1,), 0.9, 20, 2, (("max_num_seqs", 1),))


def jobs(small: bool) -> list[Job]:
    scale = SMALL if small else FULL
    fleets = [*((OURS, n) for n in REPLICAS), *((system, MOST) for system in BESIDE)]
    return [
        *(Job(f"{case} same", same, (case, scale)) for case in CASES),
        *(
            Job(f"{case} {system} replicas={n} seed={seed}", search, (case, system, n, seed, scale))
            for case in CASES
            for system, n in fleets
            for seed in scale.seeds
        ),
    ]


@dataclass(frozen=True)
class Able:
    """The scenario's requests, each stage's output cut, without those that the model's context does not hold."""

    scenario: ScenarioSource
    output: int

    def make(self, seed: int, stretch: Stretch | None = None) -> Workload:
        made = with_outputs(self.scenario.make(seed, stretch), lambda output: min(output, self.output))
        return feasible_only(made, self.scenario.hardware)

    def busiest(self, seed: int, seconds: float) -> Stretch:
        return self.scenario.busiest(seed, seconds)

    def describe(self) -> dict[str, Any]:
        return {**self.scenario.describe(), "output": self.output}


def search(case: str, system: str, replicas: int, seed: int, scale: Scale) -> dict[str, Any]:
    """The capacity of so many replicas, requests/s."""
    source, setting = _asked(case, system, replicas, scale)
    start = CASES[case].start * replicas
    found = capacity.search(source, setting, seed, (TARGET,), scale.tolerance, start)
    bracketed = found["capacity"][str(TARGET)]
    return {"case": case, "system": system, "replicas": replicas, **found, "capacity": bracketed}


def crossed(tried: Sequence[tuple[float, float]], bracketed: float) -> float:
    """Where attainment crosses the target in the last bracket, whose middle the search gives, taken as a line there:
    else rates of one sequence of brackets would be equal, or a whole step apart."""
    low, above = max((rate, share) for rate, share in tried if rate <= bracketed)
    high, below = min((rate, share) for rate, share in tried if rate > bracketed)
    return float(low * (high / low) ** ((above - TARGET) / (above - below)))


def same(case: str, scale: Scale) -> dict[str, Any]:
    """Requests that one replica does not serve alike under every router, at the rate where searches begin."""
    runs = []
    for system in (OURS, *BESIDE[:2]):
        source, setting = _asked(case, system, 1, scale)
        load = source.make(0).rescaled(CASES[case].start)
        runs.append([(r.id, r.times, r.verdict.met) for r in simulate(load, setting, causes=False).records])
    return {"case": case, "differ": sum(len(set(each)) > 1 for each in zip(*runs, strict=True))}


def _asked(case: str, system: str, replicas: int, scale: Scale) -> tuple[Able, RunSpec]:
    own = CASES[case]
    machine: Hardware = packaged_hardware(own.profile, **dict(scale.limits))
    count = scale.count or own.count * (replicas if own.each else 1)
    source = Able(ScenarioSource(f"slos-serve-{case}", machine, count=count), scale.output)
    return source, RunSpec(machine, PolicyChoice.parse(system), replicas, lengths=oracle_lengths)


def found(values: Sequence[Any], small: bool) -> Found:
    scale = SMALL if small else FULL
    rates = {
        (v["case"], v["system"], v["replicas"], v["seed"]): crossed(v["tried"], v["capacity"])
        for v in values
        if "capacity" in v
    }

    def over(case: str, system: str, replicas: int, other: str, others: int) -> Estimate:
        pairs = [(rates[case, system, replicas, seed], rates[case, other, others, seed]) for seed in scale.seeds]
        return over_seeds([float(np.log(a / b)) for a, b in pairs]).exp()

    estimates = {"one-replica-any-router": Estimate.exact(sum(v.get("differ", 0) for v in values))}
    for case in CASES:
        estimates |= {f"{case}-{n}": over(case, OURS, n, OURS, 1) for n in REPLICAS[1:]}
        for system in BESIDE:
            name = system.replace("slos_serve@", "").replace("@least_loaded", "").replace("_", "-")
            estimates[f"{case}-over-{name}"] = over(case, OURS, MOST, system, MOST)
    settings = {
        "target": TARGET, "tolerance": scale.tolerance, "lengths": "oracle",
        "counts": {name: scale.count or case.count for name, case in CASES.items()},
        "profiles": {name: case.profile for name, case in CASES.items()},
    }  # fmt: skip
    return Found(estimates, list(values), scale.seeds, "deadline", settings)


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    for case in CASES:
        rates = {
            n: [
                crossed(v["tried"], v["capacity"])
                for v in data
                if (v["case"], v.get("system"), v.get("replicas")) == (case, OURS, n)
            ]
            for n in REPLICAS
        }
        axes.plot(REPLICAS, [np.mean(rates[n]) / np.mean(rates[1]) for n in REPLICAS], "o-", label=case)
    axes.plot(REPLICAS, REPLICAS, ":", color="grey", label="linear")
    axes.set_xticks(REPLICAS)
    axes.set_xlabel("replicas")
    axes.set_ylabel("capacity, of one replica's")
    axes.legend()
