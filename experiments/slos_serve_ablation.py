"""Capacity gain of each part of SLOs-Serve: four replicas at 90 % attainment as parts are removed (Fig. 14).

Parts are removed in this order: SLO-aware routing (requests are then placed in turn, and none is handed on),
speculative decoding, and burst-resilient admission; what is left is prefill-first, the paper's baseline. A part's gain
is the capacity with it over that without, all others as they were, paired by seed; "mean" is the geometric mean over
scenarios. The paper removes "multi-replica serving with request routing" (§6.3), and its rates are per GPU: that gain
is the capacity of a replica of four over that of one alone, with as many bursts offered to both. Output lengths
are known, the judge is the paper's; a drafted token is right with a probability of 0.7 (our assumption).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments import Found
from experiments import _slos_serve_runs as runs
from experiments._axes import bars
from experiments._slos_serve_runs import ALPHA, FULL, PAPERS, SMALL_SEARCH, CapacitySearch, Scale, drafter
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.tables import markdown
from rubato.planning.jobs import Job
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload, scenarios

SOURCE = "SLOs-Serve, Fig. 14 and §6.3"
SECONDS = 2970.0

REPLICAS = 4
# requests/s of a replica at which a search begins
STARTS = {"chatbot": 4.0, "coder": 1.5, "summarizer": 2.5, "mixed": 3.0}
# requests of a run, for each replica: arrivals last 5 times the p99 of end-to-end latency
COUNTS = {"chatbot": 500, "coder": 300, "summarizer": 500, "mixed": 500}
WHOLE, IN_TURN, PLAIN, BASELINE = STEPS = (
    "slos_serve",
    "slos_serve:max_hops=-1@round_robin",
    "slos_serve:max_hops=-1,max_draft=0@round_robin",
    "prefill_first:reserve_kv=true@round_robin",
)
SINGLE = "one replica"  # of the whole
UNUSED = ("coder", "drafts")  # drafted hardly ever there, where no memory is short: a ratio of 1 that says nothing
PARTS = {"routing": (WHOLE, IN_TURN), "drafts": (IN_TURN, PLAIN), "admission": (PLAIN, BASELINE)}


def jobs(small: bool) -> list[Job]:
    scale = SMALL_SEARCH if small else FULL
    return [
        Job("same", same, (scale,)),
        *(Job(f"{scenario} {step} seed={seed}", search, (scenario, step, seed, scale))
          for scenario in STARTS for step in (*STEPS, SINGLE) for seed in scale.seeds),
    ]  # fmt: skip


def same(scale: Scale) -> dict[str, int]:
    """Requests whose tokens come at other times where a drafter is there and not asked than where there is none."""
    tokens = []
    load = runs.load("chatbot", 0, scale, count=100).rescaled(STARTS["chatbot"] * REPLICAS)
    for drafts in (drafter(), None):
        spec = RunSpec(
            runs.hardware("chatbot", scale), PolicyChoice.parse(PLAIN), REPLICAS, lengths=oracle_lengths, drafter=drafts
        )
        tokens.append([(r.id, r.times, r.verdict.met) for r in simulate(load, spec, causes=False).records])
    return {"differ": sum(a != b for a, b in zip(*tokens, strict=True))}


def search(scenario: str, step: str, seed: int, scale: Scale) -> dict[str, Any]:
    """The capacity of the replicas, requests/s."""
    machine = runs.hardware(scenario, scale)
    choice, replicas = (WHOLE, 1) if step == SINGLE else (step, REPLICAS)
    tried = CapacitySearch(_load(scenario, seed, scale, replicas), machine, seed, replicas, drafts=step != BASELINE)
    rate = tried.capacity(choice, PAPERS, STARTS[scenario], runs.FAR if scale.count else runs.COARSE)
    seconds, p99 = tried.lasted(choice, rate)
    return {
        "scenario": scenario, "step": step, "seed": seed, "capacity": rate * replicas, "tried": tried.shares_tried(),
        "seconds": seconds, "e2e_p99": p99,
    }  # fmt: skip


def _load(scenario: str, seed: int, scale: Scale, replicas: int) -> Workload:
    bursts = runs.stand_in(scenario)
    count = COUNTS[scenario] * (replicas if bursts is None else REPLICAS)
    return runs.load(scenario, seed, scale, count=count, arrivals=bursts)


@dataclass(frozen=True)
class Rates:
    """Requests/s of the replicas together, by scenario, step and seed."""

    values: Sequence[Mapping[str, Any]]

    def of(self, scenario: str, step: str) -> list[float]:
        return [v["capacity"] for v in self.values if (v.get("scenario"), v.get("step")) == (scenario, step)]

    def logs(self, scenario: str, one: str, other: str) -> list[float]:
        """By seed, logarithms of one step's over another's."""
        pairs = zip(self.of(scenario, one), self.of(scenario, other), strict=True)
        return [float(np.log(a / b)) for a, b in pairs]

    def ratio(self, one: str, other: str, scenario: str = "", times: float = 1.0) -> Estimate:
        """In a scenario, or the geometric mean of all; over so many times the other."""
        each = [self.logs(name, one, other) for name in ([scenario] if scenario else STARTS)]
        return over_seeds([float(np.mean(seed) - np.log(times)) for seed in zip(*each, strict=True)]).exp()


def found(values: Sequence[Any], small: bool) -> Found:
    scale = SMALL_SEARCH if small else FULL
    rates = Rates(values)
    estimates = {"unasked-drafter": Estimate.exact(sum(v.get("differ", 0) for v in values))}
    for part, (with_it, without) in PARTS.items():
        estimates[f"mean-{part}"] = rates.ratio(with_it, without)
        own = [scenario for scenario in STARTS if (scenario, part) != UNUSED]
        estimates |= {f"{scenario}-{part}": rates.ratio(with_it, without, scenario) for scenario in own}
    for name in ("", *STARTS):
        estimates[f"{name or 'mean'}-replicas"] = rates.ratio(WHOLE, SINGLE, name, REPLICAS)
    estimates |= {f"{scenario}-all": rates.ratio(WHOLE, BASELINE, scenario) for scenario in STARTS}
    settings = {
        "target": PAPERS, "replicas": REPLICAS, "lengths": "oracle",
        "counts": {name: scale.count or count * REPLICAS for name, count in COUNTS.items()},
        "profiles": {name: scenarios.get(f"slos-serve-{name}").profile for name in STARTS}, "alpha": ALPHA,
    }  # fmt: skip
    return Found(estimates, list(values), scale.seeds, "windowed", settings)


def tables(data: Sequence[Mapping[str, Any]]) -> str:
    """Requests/s of the replicas together, mean over seeds."""
    steps = (*STEPS, SINGLE)
    rows = [["scenario", *(f"`{step}`" for step in STEPS), SINGLE]]
    for name in STARTS:
        held = [Rates(data).of(name, step) for step in steps]
        rows.append([name, *(f"{np.mean(own):.3g}" if own else "" for own in held)])
    return f"Requests/s of {REPLICAS} replicas at 90 %, and of one:\n\n{markdown(rows)}"


def draw(data: Sequence[Mapping[str, Any]], axes: Any) -> None:
    rates = Rates(data)
    means = {step: [float(np.mean(rates.of(name, step))) for name in STARTS] for step in (*STEPS, BASELINE)}
    heights = {step: [a / b for a, b in zip(means[step], means[BASELINE], strict=True)] for step in STEPS}
    bars(axes, list(STARTS), heights, "capacity, of the baseline's")
