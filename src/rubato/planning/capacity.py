"""`rubato capacity`: the largest rate at which a fleet attains a share of its requests.

Per seed one workload, offered at one rate after another: the same requests, all times scaled by one factor. Doubling or
halving the rate brackets the target; the bracket is then bisected (geometrically) to a relative tolerance. A seed's
capacity is where attainment crosses the target; the interval is over seeds, and policies are compared seed by seed.
Attainment need not fall everywhere as the rate rises: of several crossings one is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from typing import Any

import numpy as np

from rubato.core.plan import Shape
from rubato.measure.confidence import ONE_SEED, Estimate, over_seeds
from rubato.measure.pictures import COLOURS, Ink, Picture, bars_with_intervals
from rubato.measure.records import BenchResult, versions
from rubato.measure.result import Result, told_apart, with_interval
from rubato.measure.tables import Table, number
from rubato.planning import feasibility, jobs
from rubato.planning.jobs import Job, JobResults
from rubato.planning.request_source import RequestSource
from rubato.planning.sweep import able, left_out
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate
from rubato.workloads import Workload
from rubato.workloads.workload import check_rate

FORMAT = "rubato-capacity/1"
TARGETS = (0.9, 0.98)
BRACKET_FACTOR = 2.0  # of the bracket's steps
MAX_BRACKET_STEPS = 12  # steps of the bracket, with `BRACKET_FACTOR` 4096 times the rate, before giving up
MIN_RUN_IN_E2ES = 5.0  # a run should last so many times as long as a request takes (p99)


@dataclass(frozen=True)
class CapacityQuestion:
    """Asks for the highest rate that each policy serves at each target.

    Args:
        source: makes the requests of a seed.
        specs: one for each policy.
        tolerance: relative width of the final bracket.
        targets: shares of requests to attain.
        start: the first rate tried, requests/s; None: what step times alone allow.
    """

    source: RequestSource
    specs: tuple[RunSpec, ...]
    seeds: tuple[int, ...]
    targets: tuple[float, ...] = TARGETS
    tolerance: float = 0.02
    start: float | None = None

    def __post_init__(self) -> None:
        if not self.specs or not self.seeds or not self.targets:
            raise ValueError("a capacity needs at least one policy, one seed and one target")
        if not all(0.0 < target <= 1.0 for target in self.targets):
            raise ValueError(f"targets are {self.targets}: give shares above 0 and at most 1, such as 0.9")
        if not 0.0 < self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}: give a relative width in (0, 1), such as 0.02")
        if self.start is not None:
            check_rate(self.start)

    def jobs(self) -> list[Job]:
        return [
            Job(
                f"{spec.choice.label} seed={seed}",
                search,
                (self.source, spec, seed, self.targets, self.tolerance, self.start),
            )
            for spec in self.specs
            for seed in self.seeds
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source.describe(),
            "settings": [spec.describe() for spec in self.specs],
            "targets": self.targets,
            "tolerance": self.tolerance,
            "start": self.start,
        }


def run(question: CapacityQuestion, **how: Any) -> CapacityResult:
    """`how`: as `jobs.run` takes it. A policy that cannot run is left out. Raises ValueError when no policy can run, or
    an idle replica misses the targets."""
    specs, reasons = able(question.specs)
    head = {"capacity": question.describe()}
    ran = replace(question, specs=specs)
    return CapacityResult(ran, jobs.run(ran.jobs(), head=head, about="capacity", **how), reasons)


def search(
    source: RequestSource, spec: RunSpec, seed: int, targets: Sequence[float], tolerance: float, start: float | None
) -> dict[str, Any]:
    """One policy under one seed: the capacity at each target (requests/s), and every rate tried with its attainment."""
    load = source.make(seed)
    feasibility.assess(load, spec.hardware, spec.slo_rule).check(max(targets))
    runs: dict[float, tuple[float, float, float]] = {}  # rate -> attainment, seconds of arrivals, p99 of e2e

    def attained(rate: float) -> float:
        if rate not in runs:
            run = simulate(load.rescaled(rate), spec, seed, times=False, causes=False)
            share = sum(record.verdict.met for record in run.records) / len(run.records)
            runs[rate] = (share, run.workload.duration, e2e_p99(run))
        return runs[rate][0]

    first = start or estimate(load, spec)
    rates = {str(target): crossing(attained, target, first, tolerance) for target in targets}
    _, duration, p99 = runs[min(runs, key=lambda rate: abs(rate - rates[str(targets[0])]))]
    return {
        "policy": spec.choice.label,
        "seed": seed,
        "requests": len(load.arrivals),
        "capacity": rates,
        "tried": sorted((rate, share) for rate, (share, *_) in runs.items()),
        "seconds": duration,
        "e2e_p99": p99,
    }


def e2e_p99(run: BenchResult) -> float:
    """Seconds, of the requests that have an end-to-end latency; 0 where none has."""
    measured = [r.verdict.e2e for r in run.records if r.verdict.e2e is not None]
    return float(np.quantile(measured, 0.99)) if measured else 0.0


class NoCapacity(ValueError):
    """The target is attained at no rate tried."""


class AlwaysAttained(ValueError):
    """The target is attained at all rates tried."""


def crossing(
    attained: Callable[[float], float], target: float, start: float, tolerance: float, factor: float = BRACKET_FACTOR
) -> float:
    """Finds the rate at which `attained` (of a rate) falls below `target`: the middle of a bracket no wider than
    `tolerance`.

    Args:
        factor: between rates tried until one holds and one does not; small where runs far beyond the capacity take
            long.

    Raises:
        AlwaysAttained: all `MAX_BRACKET_STEPS` rates attain the target.
        NoCapacity: none of them does.
    """
    low = high = start
    up = attained(start) >= target
    for _ in range(MAX_BRACKET_STEPS):
        low, high = (high, high * factor) if up else (low / factor, low)
        if (attained(high if up else low) >= target) is not up:
            break
    else:
        rate = high if up else low
        kind = AlwaysAttained if up else NoCapacity
        raise kind(
            f"attainment is {100 * attained(rate):.1f} % at {rate:.4g} requests/s and {100 * attained(start):.1f} % at "
            f"{start:.4g}: no capacity at {100 * target:g} % between them; offer more requests, or give another --start"
        )
    low, high = narrowed(lambda rate: attained(rate) >= target, low, high, tolerance)
    return sqrt(low * high)


def rate_or_zero(search: Callable[[], float]) -> float:
    """The rate (requests/s) that a search finds, 0 where the target is attained at no rate."""
    try:
        return search()
    except NoCapacity:
        return 0.0


def narrowed(enough: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """A bracket, good at `low` and not at `high`, halved (geometrically) until it is no wider than `tolerance`."""
    while high / low > 1.0 + tolerance:
        middle = sqrt(low * high)
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low, high


def estimate(load: Workload, spec: RunSpec) -> float:
    """Requests/s that step times would allow, were every batch full of tokens: where a search begins."""
    tokens = sum(a.prompt_tokens + a.output_tokens for a in load.arrivals) / len(load.arrivals)
    limits = spec.hardware.limits
    batch, kv = limits.max_num_batched_tokens, limits.kv_blocks * limits.block_size
    full = spec.hardware.model.step_time(Shape(batch, min(batch, limits.max_num_seqs), kv // 2))
    return spec.replicas * batch / full / tokens


def too_short(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a warning if arrivals (`seconds`) lasted less than `MIN_RUN_IN_E2ES` times the `e2e_p99`, else "".

    Args:
        runs: results by key; those without both keys are skipped.
    """
    measured = [run for run in runs if "seconds" in run and "e2e_p99" in run]
    short = [run for run in measured if run["seconds"] < MIN_RUN_IN_E2ES * run["e2e_p99"]]
    if not short:
        return ""
    worst = min(short, key=lambda run: run["seconds"] / run["e2e_p99"])
    return (
        f"{len(short)} of {len(measured)} runs are too short for their requests (arrivals for less than "
        f"{MIN_RUN_IN_E2ES:g} times the p99 of e2e; worst: {worst['seconds']:.0f} s of arrivals, "
        f"p99 {worst['e2e_p99']:.0f} s): queues had no time to grow, what is held is overestimated"
    )


# --------------------------------------------------------------------------- what was found


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one policy at one target, in requests/s over all seeds: of the fleet, per replica and per GPU.

    Args:
        ratio: of the rate to the first policy's, paired by seed.
    """

    policy: str
    target: float
    fleet: Estimate
    replica: Estimate
    gpu: Estimate
    ratio: Estimate


@dataclass(frozen=True, repr=False)
class CapacityResult(Result):
    """The capacities that were found.

    Args:
        question: as asked, with the policies that ran.
        skipped: why each other policy cannot run, by its label.
    """

    title = "Capacity"
    question: CapacityQuestion
    job_results: JobResults
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Of the policies that ran, the one first that the others are compared with."""
        return [spec.choice.label for spec in self.question.specs]

    def capacities(self) -> list[Capacity]:
        specs = self.question.specs
        by_policy: dict[str, list[Mapping[str, float]]] = {}  # by policy, an entry for each seed, in one order
        for value in self.job_results.values:
            by_policy.setdefault(value["policy"], []).append(value["capacity"])
        first = by_policy[specs[0].choice.label]
        return [
            _capacity(
                spec, target, *([own[str(target)] for own in runs] for runs in (by_policy[spec.choice.label], first))
            )
            for spec in specs
            for target in self.question.targets
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons to doubt the numbers, and how they came about."""
        notes = [*self.job_results.notes, *self.question.source.notes, *left_out(self.skipped)]
        if short := too_short(self.job_results.values):
            notes.append(f"{short}; offer more requests (--count)")
        if len(self.question.seeds) < 2:
            notes.append(ONE_SEED)
        return tuple(notes)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.question.describe(),
            "seeds": self.question.seeds,
            "slo_rule": self.question.specs[0].slo_rule,
            "interval": "95 %, Student's t over seeds; each seed's capacity is within the tolerance",
            "skipped": dict(self.skipped),
            "capacities": [asdict(capacity) for capacity in self.capacities()],
            "searches": self.job_results.costed(),
            "wall": self.job_results.wall,
            "cpu": self.job_results.cpu,
            "notes": self.notes,
            "versions": versions("numpy"),
        }  # fmt: skip

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.question.describe() | {"seeds": self.question.seeds}

    @property
    def answer(self) -> str:
        target = self.question.targets[0]
        best = max((c for c in self.capacities() if c.target == target), key=lambda c: c.fleet.value)
        among = f"; of {len(self.labels)} policies that is most" if len(self.labels) > 1 else ""
        return f"{best.policy} holds {number(best.fleet)} requests/s with {100 * target:g} % attained{among}."

    @property
    def findings(self) -> tuple[str, ...]:
        """At each target, which policies hold more than the first one, by ratios paired by seed."""
        first, *others = self.labels
        if not others or len(self.question.seeds) < 2:
            return ()
        ratios = {(c.policy, c.target): c.ratio for c in self.capacities()}
        lines = []
        for target in self.question.targets:
            own = {label: ratios[label, target] for label in others}
            shown = {label: number(one, " ×") for label, one in own.items()}
            lines.append(f"With {100 * target:g} % attained {told_apart(own, first, 'holds', shown, 1.0)}.")
        return tuple(lines)

    def tables(self) -> list[Table]:
        several = len(self.labels) > 1
        head = ("policy", "attained", "req/s", "per replica", "per GPU")
        rows = []
        for c in self.capacities():
            own = (c.policy, f"{100 * c.target:g} %", *(number(e) for e in (c.fleet, c.replica, c.gpu)))
            rows.append((*own, number(c.ratio, "×")) if several else own)
        return [Table((*head, f"against {self.labels[0]}") if several else head, tuple(rows))]

    def rows(self) -> list[dict[str, Any]]:
        """One for each policy and target; rates in requests/s, `against_first` a ratio."""
        return [
            {"policy": c.policy, "target": c.target}
            | with_interval("rate", c.fleet)
            | with_interval("per_replica", c.replica)
            | with_interval("per_gpu", c.gpu)
            | with_interval("against_first", c.ratio)
            for c in self.capacities()
        ]

    def picture(self) -> Picture:
        """The rate of each policy at each target, with its interval."""
        targets, rows = self.question.targets, self.capacities()

        def draw(figure: Any, ink: Ink) -> None:
            panels = figure.subplots(1, len(targets), squeeze=False)[0]
            for axes, target in zip(panels, targets, strict=True):
                own = [(c.policy, c.fleet) for c in rows if c.target == target]
                bars = [(name, e, number(e), COLOURS[i % len(COLOURS)]) for i, (name, e) in enumerate(own)]
                bars_with_intervals(axes, bars, ink)
                axes.set_xlabel("requests/s of the fleet")
                axes.set_title(f"{100 * target:g} % attained")

        return Picture("Capacity with 95 % intervals", draw, (9.0, 1.6 + 0.42 * len(self.labels)))


def _capacity(spec: RunSpec, target: float, own: Sequence[float], first: Sequence[float]) -> Capacity:
    def per(parts: int) -> Estimate:
        found = over_seeds([rate / parts for rate in own])
        return replace(found, low=max(0.0, found.low))  # no rate is negative

    logs = over_seeds([float(np.log(a / b)) for a, b in zip(own, first, strict=True)])
    gpus = spec.replicas * spec.hardware.gpus
    return Capacity(spec.choice.label, target, per(1), per(spec.replicas), per(gpus), logs.exp())
