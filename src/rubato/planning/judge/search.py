"""The capacities of one policy on one load under one seed, by several measures that share runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rubato.planning import feasibility
from rubato.planning.capacity import AlwaysAttained, crossing, e2e_p99, estimate, rate_or_zero
from rubato.planning.judge.loads import LoadSource
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload

# What is asked of a run: a share of the requests offered, of all or of those of the worst tier.
MEASURES: Mapping[str, tuple[str, float]] = {
    "90 % of all": ("all", 0.9), "95 % of all": ("all", 0.95), "90 % of each tier": ("worst", 0.9)
}  # fmt: skip
TOLERANCE = 0.02  # relative width of a search's last bracket
FIRST, SECOND, EACH = MEASURES
AS_STATED = f"{FIRST}, no TTFT bound"
# Why a load has no capacity by a measure:
INFEASIBLE = "beyond any fleet, by requests that an idle replica would miss"
ALWAYS = "attained at every rate tried: too few requests to fill the replicas"


@dataclass(frozen=True, slots=True)
class _Run:
    """Requests offered and met by tier; seconds of arrivals, and the p99 of e2e (s)."""

    offered: Counter[str]
    met: Counter[str]
    seconds: float
    e2e_p99: float

    def share(self, of: str) -> float:
        """That attained of what was offered: of "all", or of the "worst" tier."""
        if of == "worst":
            return min(self.met[tier] / count for tier, count in self.offered.items())
        return self.met.total() / self.offered.total()


class _Runs:
    """Runs of one load at several rates, each done once."""

    def __init__(self, load: Workload, spec: RunSpec, seed: int) -> None:
        self.load, self.spec, self.seed = load, spec, seed
        self.by_rate: dict[float, _Run] = {}

    def at(self, rate: float) -> _Run:
        if rate not in self.by_rate:
            run = simulate(self.load.rescaled(rate), self.spec, self.seed, times=False, causes=False)
            offered = Counter(record.tier for record in run.records)
            met = Counter(record.tier for record in run.records if record.verdict.met)
            self.by_rate[rate] = _Run(offered, met, run.workload.duration, e2e_p99(run))
        return self.by_rate[rate]

    def capacity(self, of: str, target: float) -> float | str:
        """Requests/s, 0 where it is attained at no rate tried; or why there is none (`INFEASIBLE`, `ALWAYS`). Drafts
        may be faster than a token a step, so with a drafter it is tried whatever an idle replica does without."""
        if self.spec.drafter is None and self._feasible(of) < target:
            return INFEASIBLE
        first = estimate(self.load, self.spec)
        try:
            return rate_or_zero(lambda: crossing(lambda rate: self.at(rate).share(of), target, first, TOLERANCE))
        except AlwaysAttained:
            return ALWAYS

    def _feasible(self, of: str) -> float:
        """The largest share that any fleet attains."""
        assessment = feasibility.assess(self.load, self.spec.hardware, self.spec.slo_rule)
        if of == "all":
            return 1.0 - assessment.share
        offered = Counter(one.tier for one in self.load.arrivals)
        return min(1.0 - assessment.infeasible.get(tier, 0) / count for tier, count in offered.items())


def search(name: str, source: LoadSource, spec: RunSpec, seed: int) -> dict[str, Any]:
    """Capacities (requests/s of the fleet, or why there is none) by measure, what is attained at the load's own rate,
    and every run made; `seconds` and `e2e_p99` as `capacity.too_short` takes them."""
    load = source.make(seed)
    runs = _Runs(load, spec, seed)
    rates_found = {measure: runs.capacity(*asked) for measure, asked in MEASURES.items()}
    if source.ttft is not None:
        plain = _Runs(replace(source, ttft=None).make(seed), spec, seed)
        rates_found[AS_STATED] = plain.capacity(*MEASURES[FIRST])
    own = runs.at(load.rate)
    about = first if isinstance(first := rates_found[FIRST], float) and first else load.rate
    near = runs.by_rate[min(runs.by_rate, key=lambda rate: abs(rate - about))]
    return {
        "load": name,
        "policy": spec.choice.label,
        "seed": seed,
        "requests": len(load.arrivals),
        "rate": load.rate,
        "capacity": rates_found,
        "own_rate": {"offered": dict(own.offered), "met": dict(own.met), "worst": own.share("worst")},
        "tried": sorted((rate, run.share("all"), run.share("worst")) for rate, run in runs.by_rate.items()),
        "seconds": near.seconds,
        "e2e_p99": near.e2e_p99,
    }
