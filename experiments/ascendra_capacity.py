"""Capacity of Ascendra beside baselines, three A100, three models (Fig. 9): the rate at which 90 % are in SLO.

Mistral-7B and Qwen-14B (48,000 tokens of KV, as the paper has it) serve `ascendra-sharegpt4-*`, Llama-3.1-8B serves
`ascendra-longbench-llama`, for some 600 s of Poisson arrivals, judged by TTFT and mean TBT. A baseline that is beyond
its capacity is unstable, so its share in SLO there falls with the length of a run. Baselines go round robin, as in the
paper, in one setting (vLLM's 2,048 tokens, Sarathi's 512) and tuned seed by seed; beside them stand `sarathi` tuned
behind `least_loaded`, `edf` and `slos_serve`. All know output lengths by the mean of finished requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from experiments import Found
from experiments._guest import beside, held
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import BenchResult
from rubato.planning.capacity import crossing, e2e_p99
from rubato.planning.jobs import Job
from rubato.planning.sweep import markdown
from rubato.simulation.run_spec import Hardware, RunSpec, packaged_hardware, running_mean
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios

SOURCE = "Ascendra, §8.2 and Fig. 9"
SECONDS = 7000.0

REPLICAS, TARGET, DURATION = 3, 0.9, 600.0
SEEDS = (1, 2, 3)
OURS = "ascendra"
STEP = 1.2  # of rates tried: far beyond its capacity thousands wait, and policies look at each of them in every step


@dataclass(frozen=True)
class Case:
    """start: requests/s of the fleet at which searches begin. kv_tokens: of a replica, where not the profile's."""

    scenario: str
    start: float
    kv_tokens: int | None = None


CASES = {
    "mistral": Case("ascendra-sharegpt4-mistral", 7.5),
    "llama": Case("ascendra-longbench-llama", 2.5),
    "qwen": Case("ascendra-sharegpt4-qwen", 2.8, 48_000),
}
# each is tuned over its settings, with the seed that it is measured with: none of them can be said to be worse by that
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    OURS: ("ascendra@ascendra:groups=2L1H",),
    "ascendra, shortest first": ("ascendra:value=sjf@ascendra:groups=2L1H",),
    "prefill_first": ("prefill_first@round_robin",),
    "sarathi, 512": ("sarathi:budget=512@round_robin",),
    "prefill_first, tuned": tuple(
        f"prefill_first:budget={b},reserve_kv={w}@round_robin" for b in (2048, 8192) for w in ("false", "true")
    ),
    "sarathi, tuned": tuple(
        f"sarathi:budget={b},reserve_kv={w}@round_robin" for b in (0, 1024, 2048, 4096) for w in ("false", "true")
    ),
    "sarathi, tuned, least_loaded": tuple(
        f"sarathi:budget={b},reserve_kv=true@least_loaded" for b in (0, 1024, 2048, 4096)
    ),
    "edf": ("edf@least_loaded",),
    "slos_serve": ("slos_serve",),
}
DEFAULT, TUNED = ("prefill_first", "sarathi, 512"), ("prefill_first, tuned", "sarathi, tuned")
SMALL = (OURS, *DEFAULT, *TUNED)


def jobs(small: bool, policy: str | None = None) -> list[Job]:
    duration, tolerance, names = (20.0, 0.5, SMALL) if small else (DURATION, 0.04, tuple(SYSTEMS))
    names = beside(names, policy)
    return [
        Job(f"{case} seed={seed}", measured, (case, seed, duration, tolerance, names))
        for case in CASES
        for seed in (SEEDS[:1] if small else SEEDS)
    ]


@lru_cache
def hardware(case: str) -> Hardware:
    asked = CASES[case]
    return packaged_hardware(scenarios.get(asked.scenario).profile, kv_tokens=asked.kv_tokens)


@lru_cache(maxsize=4)
def offered(case: str, seed: int, duration: float) -> Workload:
    """As many requests as come in that time at the rate where searches begin."""
    asked = CASES[case]
    return scenarios.make(asked.scenario, asked.start, count=round(asked.start * duration), seed=seed)


def served(case: str, choice: str, load: Workload, seed: int, replicas: int = REPLICAS) -> BenchResult:
    spec = RunSpec(hardware(case), PolicyChoice.parse(choice), replicas, slo_rule="mean", lengths=running_mean)
    return simulate(load, spec, seed, times=False, causes=False)


def share(run: BenchResult) -> float:
    return sum(r.verdict.met for r in run.records) / len(run.records)


class Searched:
    """Capacities of one case under one seed: a rate is run once for each setting."""

    def __init__(self, case: str, seed: int, duration: float, tolerance: float, replicas: int = REPLICAS) -> None:
        self.case, self.seed, self.duration, self.tolerance, self.replicas = case, seed, duration, tolerance, replicas
        self.known: dict[tuple[str, float], float] = {}
        self.longest = 0.0  # seconds, the p99 of e2e of any run

    def attained(self, choice: str, rate: float) -> float:
        if (choice, rate) not in self.known:
            load = offered(self.case, self.seed, self.duration).rescaled(rate)
            run = served(self.case, choice, load, self.seed, self.replicas)
            self.known[choice, rate] = share(run)
            self.longest = max(self.longest, e2e_p99(run))
        return self.known[choice, rate]

    def capacity(self, choices: Sequence[str]) -> tuple[float, str]:
        """The largest rate of these settings, and which one's it is. One is searched only if it attains the target at
        the rate of the best before it."""
        best, found = choices[0], 0.0
        for choice in choices:
            if found and self.attained(choice, found) < TARGET:
                continue
            start = found or CASES[self.case].start * self.replicas / REPLICAS
            rate = held(partial(crossing, partial(self.attained, choice), TARGET, start, self.tolerance, STEP))
            best, found = max((best, found), (choice, rate), key=lambda pair: pair[1])
        return found, best


def measured(case: str, seed: int, duration: float, tolerance: float, names: Sequence[str]) -> dict[str, Any]:
    """Capacities, and the share in SLO at 1.1 × the better tuned baseline's capacity."""
    search = Searched(case, seed, duration, tolerance)
    found = {name: search.capacity(SYSTEMS.get(name, (name,))) for name in names}
    beyond = 1.1 * max(found[name][0] for name in TUNED)
    return {
        "case": case, "seed": seed,
        "capacity": {name: rate for name, (rate, _) in found.items()},
        "setting": {name: setting for name, (_, setting) in found.items()},
        "beyond": {name: search.attained(found[name][1], beyond) for name in names},
        "tried": sorted([choice, rate, attained] for (choice, rate), attained in search.known.items()),
        "seconds": duration, "e2e_p99": search.longest,
    }  # fmt: skip


def ratio(values: Sequence[Any], case: str, systems: Sequence[str], ours: str = OURS) -> Estimate:
    """Our capacity over the best of some systems', seed by seed; the geometric mean."""
    own = [v["capacity"] for v in values if v["case"] == case]
    return over_seeds([float(np.log(c[ours] / max(c[name] for name in systems))) for c in own]).exp()


def beyond(values: Sequence[Any], case: str) -> Estimate:
    """Share in SLO at 1.1 × the better tuned baseline's capacity, less the better of theirs: points."""
    own = [v["beyond"] for v in values if v["case"] == case]
    return over_seeds([100 * (b[OURS] - max(b[name] for name in TUNED)) for b in own])


def found(values: Sequence[Any], small: bool) -> Found:
    estimates: dict[str, Estimate] = {}
    for case in CASES:
        estimates[f"{case}-over-default"] = ratio(values, case, DEFAULT)
        estimates[f"{case}-over-sarathi-512"] = ratio(values, case, ["sarathi, 512"])
        estimates[f"{case}-over-tuned"] = ratio(values, case, TUNED)
        estimates[f"{case}-beyond"] = beyond(values, case)
    settings = {"replicas": REPLICAS, "target": TARGET, "systems": {k: list(v) for k, v in SYSTEMS.items()}}
    return Found(estimates, list(values), sorted({v["seed"] for v in values}), "mean", settings)


def draw(data: Any, axes: Any) -> None:
    """Capacity of each system by model, the mean of the seeds."""
    cases = list(dict.fromkeys(v["case"] for v in data))
    names = list(data[0]["capacity"])
    for place, name in enumerate(names):
        means = [np.mean([v["capacity"][name] for v in data if v["case"] == case]) for case in cases]
        axes.bar(np.arange(len(cases)) + 0.85 * (place / len(names) - 0.5), means, 0.85 / len(names), label=name)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel("requests/s of three replicas at 90 % in SLO")
    axes.legend(fontsize=7)


def tables(data: Any) -> str:
    cases = list(dict.fromkeys(v["case"] for v in data))
    rows = [["system", *(f"{case}, requests/s" for case in cases), *(f"{case}, in SLO beyond" for case in cases)]]
    for name in data[0]["capacity"]:
        own = {case: [v for v in data if v["case"] == case] for case in cases}
        rows.append(
            [
                name,
                *(f"{np.mean([v['capacity'][name] for v in own[case]]):.2f}" for case in cases),
                *(f"{100 * np.mean([v['beyond'][name] for v in own[case]]):.0f} %" for case in cases),
            ]
        )
    return markdown(rows)
