"""`rubato plan`: the smallest fleet that attains a share of a workload's requests, and what binds it.

The fleet is sized on the busiest stretch. Each seed redraws the tiers (where the source draws them) and bootstraps
blocks of 60 s of that stretch. With n replicas the interval's lower end is at the target or above, with n - 1 the mean
is below: seeds are added until both hold. Then the whole workload is run once with n. What binds is found by
counterfactual: with n - 1 replicas and one thing relaxed, is the target attained?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from rubato import alone, cells
from rubato.capacity import estimate
from rubato.cells import Cell, Done
from rubato.fleetplan import RELAXED_SEEDS, Plan, Question, peak, whole
from rubato.intervals import Estimate, attainment_over_seeds
from rubato.sweep import percent
from rubato.workloads import Workload

MOST_REPLICAS = 1024
LEAST_RELAXED = 1.25  # by what a thing is relaxed, at least; else by the missing replica's part, n / (n - 1)


@dataclass
class _Search:
    """The answers so far, and how to get more: one pool of processes (None: here), one file."""

    question: Question
    how: Mapping[str, Any]
    pool: Executor | None
    found: dict[str, Any] = field(default_factory=dict)
    done: Done = field(default_factory=lambda: Done(()))

    def need(self, wanted: Sequence[Cell], about: str) -> None:
        new = [cell for cell in wanted if cell.key not in self.found]
        if new:
            done = cells.run(
                new, head={"plan": self.question.describe()}, workers=1, pool=self.pool, about=about, **self.how
            )
            self.done = self.done.plus(done)
            self.found |= {result.key: result.value for result in done.results}

    def peaks(self, replicas: Sequence[int], seeds: int, relaxed: str = "", by: float = 1.0) -> list[Cell]:
        return [
            Cell(_key(n, relaxed, seed), peak, (self.question, n, relaxed, by, seed))
            for n in replicas
            for seed in range(seeds)
        ]

    def attained(self, replicas: int, seeds: int, relaxed: str = "") -> Estimate:
        if replicas == 0:
            return Estimate.exact(0.0)
        values = [self.found[_key(replicas, relaxed, seed)] for seed in range(seeds)]
        return attainment_over_seeds([v["met"] for v in values], [v["offered"] for v in values])

    def first(self, workers: int) -> int:
        """The smallest fleet under seed 0, by cutting a bracket into `workers` + 1 parts at a time."""
        load = self.question.load(0, self.question.stretch(0))
        low, high = 0, max(1, ceil(load.rate / estimate(load, self.question.setting.with_replicas(1))))
        self.need(self.peaks([ceil(high * 1.5**i) for i in range(workers)], 1), "search")  # as many at a time
        while not self._enough(high):
            low, high = high, ceil(1.5 * high)
            self._within(high, MOST_REPLICAS, 1)
        while high - low > 1:
            parts = min(workers, high - low - 1)
            points = sorted({low + round((high - low) * (i + 1) / (parts + 1)) for i in range(parts)} - {low, high})
            self.need(self.peaks(points, 1), "search")
            enough = [n for n in points if self._enough(n)]
            high = min([high, *enough])
            low = max(n for n in [low, *points] if n < high)
        return high

    def _enough(self, replicas: int) -> bool:
        self.need(self.peaks([replicas], 1), "search")
        return self.attained(replicas, 1).value >= self.question.target

    def settle(self, replicas: int) -> tuple[int, int, bool]:
        """Replicas, seeds, and whether one fewer is known to be too few."""
        seeds, most = self.question.seeds
        target = self.question.target
        bound = 2 * replicas + 8
        while True:
            self._within(replicas, bound, seeds)
            self.need(self.peaks([n for n in (replicas, replicas - 1) if n], seeds), "confirm")
            here, below = (self.attained(n, seeds) for n in (replicas, replicas - 1))
            if below.value >= target:
                replicas -= 1
            elif here.value < target:
                replicas += 1
            elif here.low >= target:
                return replicas, seeds, True
            elif seeds < most:
                seeds = min(most, 2 * seeds)
            else:
                break
        offered = [self.found[_key(replicas, "", seed)]["offered"] for seed in range(seeds)]
        best = attainment_over_seeds(offered, offered)
        if best.low < target:
            raise ValueError(
                f"{sum(offered)} requests in {seeds} seeds are too few to show {100 * target:g} % with confidence: "
                f"were all of them attained, the interval would begin at {100 * best.low:.1f} %; give more requests, a "
                "longer --window or more --most-seeds"
            )
        while self.attained(replicas, seeds).low < target:
            replicas += 1
            self._within(replicas, bound, seeds)
            self.need(self.peaks([replicas], seeds), "confirm")
        return replicas, seeds, False

    def _within(self, replicas: int, bound: int, seeds: int) -> None:
        """More replicas help no more: what is lost is lost to something else."""
        if replicas > bound:
            tried = max(n for n in range(1, replicas) if _key(n, "", seeds - 1) in self.found)
            raise ValueError(
                f"{tried} replicas attain {percent(self.attained(tried, seeds))}, and more of them would not attain "
                f"{100 * self.question.target:g} %: another policy or router, or looser SLOs, might"
            )


def plan(question: Question, *, workers: int | None = None, **how: Any) -> Plan:
    """`how`: as `cells.run` takes it. Raises ValueError when no fleet of any size would do, and says why."""
    load = question.source.make(0)
    hardware = question.setting.hardware
    found = alone.alone(load, hardware, question.setting.rule)
    if not question.exclude:
        found.check(question.target)
    with cells.opened(workers) as pool:
        search = _Search(question, how, pool)
        replicas, seeds, decided = search.settle(search.first(workers or cells.cores()))
        wanted = [Cell(f"whole n={replicas}", whole, (question, replicas))]
        things = ["compute", "kv", *(n for n in ("ttft", "tpot", "e2e") if _promised(load, n))] if replicas > 1 else []
        by = max(LEAST_RELAXED, replicas / max(1, replicas - 1))
        for thing in things:
            wanted += search.peaks([replicas - 1], RELAXED_SEEDS, thing, by)
        search.need(wanted, "verify")
    return Plan(
        question,
        question.stretch(0),
        replicas,
        decided,
        seeds,
        with_n=search.attained(replicas, seeds),
        with_one_fewer=search.attained(replicas - 1, seeds),
        whole=search.found[f"whole n={replicas}"],
        relaxed={thing: search.attained(replicas - 1, RELAXED_SEEDS, thing).value for thing in things},
        relaxed_by=by,
        hopeless=found,
        done=search.done,
    )


def _key(replicas: int, relaxed: str, seed: int) -> str:
    return f"n={replicas}{f' {relaxed} relaxed' if relaxed else ''} seed={seed}"


def _promised(load: Workload, name: str) -> bool:
    return any(getattr(part.slo, name) is not None for one in load.arrivals for part in load.parts(one))
