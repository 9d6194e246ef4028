"""`rubato plan`: the smallest fleet that attains a share of a workload's requests, and what binds it.

The fleet is sized on the busiest stretch. Each seed redraws the tiers (where the source draws them) and bootstraps
blocks of 60 s of that stretch. With n replicas the interval's lower end is at the target or above, with n - 1 the mean
is below: seeds are added until both hold. Then the whole workload is run once with n. What binds is found by
counterfactual: with n - 1 replicas and one thing relaxed, is the target attained?

The search begins at what a sample of the stretch suggests, goes to where seed 0 is on either side of the target, and
every run of it counts among the seeds. What the answer will need next runs early where a core would be idle.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from statistics import fmean
from typing import Any, TypeVar

from rubato.measure.confidence import Estimate, attainment_over_seeds
from rubato.planning import feasibility, jobs
from rubato.planning.capacity import estimate
from rubato.planning.fleet_size_model import FleetPlan, FleetQuestion, counted, effect, peak, survey, whole
from rubato.planning.jobs import Job, JobBatch, Program
from rubato.planning.sweep import percent
from rubato.simulation.simulate import uncollected
from rubato.workloads.resample import bootstrapped, sampled

MOST_REPLICAS = 1024
SAMPLE = 5000  # requests that a guess is made with
NO_HELP = 0.001  # of attainment, from half as many replicas again
LEAST_RELAXED = 1.25  # by what a thing is relaxed, at least; else by the missing replica's part, n / (n - 1)
RELAXED_SEEDS = 2  # at most; one where that is far from the target:
CLEAR = (0.005, 0.05)  # by at least and at most so much attainment, between them by half of what one fewer lacks

T = TypeVar("T")
Asking = Generator[JobBatch, None, T]


def plan(question: FleetQuestion, **how: Any) -> FleetPlan:
    """The smallest fleet that attains the question's target. `how`: as `jobs.follow` takes it. Raises ValueError, with
    the reason, when no number of replicas attains the target."""
    head = {"plan": question.describe()}
    found, done = jobs.follow(lambda values: _Search(question, values).program(), head=head, **how)
    return replace(found, done=done)


@uncollected()
def guess(question: FleetQuestion) -> dict[str, Any]:
    """About how many replicas attain the target, by simulating the beginning of each minute of the busiest stretch."""
    load = bootstrapped(question.load(0, question.stretch(0)), 0)
    if len(load.arrivals) > SAMPLE:
        load = sampled(load, SAMPLE / len(load.arrivals))
    tried = {0: 0.0}

    def attains(replicas: int) -> bool:
        records = question.setting.with_replicas(replicas).run(load, times=False, causes=False).records
        tried[replicas] = sum(record.verdict.met for record in records) / len(records)
        return tried[replicas] >= question.target

    # step times alone would allow twice what is attained, often
    low, high = 0, ceil(1.5 * load.rate / estimate(load, question.setting.with_replicas(1)))
    while not attains(high) and high < MOST_REPLICAS:
        if question.target / 2 < tried[high] < tried[low] + NO_HELP:
            return {"replicas": high, "tried": sorted(tried.items())}  # the whole stretch may attain more
        low, high = high, min(MOST_REPLICAS, ceil(1.5 * high))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attains(middle) else (middle, high)
    return {"replicas": high, "tried": sorted(tried.items())}


@dataclass(frozen=True)
class _Search:
    """The search for the smallest fleet. values: results of the jobs that have finished, by key; it grows."""

    question: FleetQuestion
    values: Mapping[str, Any]

    def program(self) -> Program[FleetPlan]:
        question = self.question
        about, began = Job("survey", survey, (question,)), Job("guess", guess, (question,))
        yield JobBatch([about], "search", lambda: [began])
        infeasible = feasibility.Feasibility(**self.values["survey"]["infeasible"])
        if not question.exclude:
            infeasible.check(question.target)
        yield JobBatch([began], "search")
        replicas, seeds, decided = yield from self.settle((yield from self.first()))
        things = yield from self.verify(replicas, seeds)
        start, end = self.values["survey"]["stretch"]
        return FleetPlan(
            question,
            (start, end),
            replicas,
            decided,
            seeds,
            with_n=self.attained(replicas, seeds),
            with_one_fewer=self.attained(replicas - 1, seeds),
            whole=self.values[_whole(replicas)],
            relaxed={thing: self.relaxed(replicas, seeds, thing, count) for thing, count in things.items()},
            relaxed_by=_by(replicas),
            relaxed_seeds=things,
            infeasible=infeasible,
        )

    # ----------------------------------------------------------------- jobs, and what they say together

    def peaks(self, fleets: Sequence[int], seeds: int, relaxed: str = "", by: float = 1.0) -> list[Job]:
        return [
            Job(_key(n, relaxed, seed), peak, (self.question, n, relaxed, by, seed))
            for seed in range(seeds)
            for n in fleets
            if n
        ]

    def verification(self, replicas: int, seeds: Mapping[str, int]) -> list[Job]:
        """Cells that verify a fleet: the whole workload, which takes longest, and one replica fewer with each thing
        relaxed, under so many seeds."""
        relaxed = [self.peaks([replicas - 1], count, thing, _by(replicas)) for thing, count in seeds.items()]
        return [Job(_whole(replicas), whole, (self.question, replicas)), *(job for each in relaxed for job in each)]

    def things(self, replicas: int) -> list[str]:
        """What can be relaxed: compute, KV, and the SLO times that some request states."""
        return ["compute", "kv", *self.values["survey"]["promised"]] if replicas > 1 else []

    def attained(self, replicas: int, seeds: int) -> Estimate:
        if replicas == 0:
            return Estimate.exact(0.0)
        values = self.seen(replicas, seeds)
        return attainment_over_seeds([v["met"] for v in values], [v["offered"] for v in values])

    def relaxed(self, replicas: int, seeds: int, thing: str, count: int) -> float:
        n = replicas - 1
        return effect(self.attained(n, seeds), self.seen(n, count), self.seen(n, count, thing))

    def seen(self, replicas: int, seeds: int, relaxed: str = "") -> list[Mapping[str, Any]]:
        return [self.values[_key(replicas, relaxed, seed)] for seed in range(seeds)]

    # ----------------------------------------------------------------- the search

    def first(self) -> Asking[int]:
        """The least replicas that attain the target under seed 0, searched from the guess in doubling steps."""
        n: int = self.values["guess"]["replicas"]
        bound, step = 2 * n + 8, max(1, n // 32)
        low, high = 0, inf
        while high - low > 1:
            yield JobBatch(self.peaks([n], 1), "search", partial(self.around, n))
            low, high = (low, n) if self.attained(n, 1).value >= self.question.target else (n, high)
            if high == inf:
                n = self._more(low, step, bound, 1)
            else:
                n = (low + int(high)) // 2 if low else max(1, int(high) - step)
            step *= 2
        return int(high)

    def around(self, n: int) -> list[Job]:
        """Cells of this fleet, and of one replica fewer and more, under the seeds that will confirm the answer."""
        seeds = self.question.seeds[0]
        return [*self.peaks([n], seeds), *self.peaks([n - 1, n + 1], seeds)]

    def settle(self, replicas: int) -> Asking[tuple[int, int, bool]]:
        """The answer: replicas, seeds, and whether one replica fewer is known to miss the target."""
        seeds, most = self.question.seeds
        target = self.question.target
        bound = 2 * replicas + 8
        while True:
            wanted = self.peaks([replicas - 1, replicas], seeds)
            yield JobBatch(wanted, "confirm", partial(self.likely, replicas, seeds))
            here, below = (self.attained(n, seeds) for n in (replicas, replicas - 1))
            if below.value >= target:
                replicas -= 1
            elif here.value < target:
                replicas = self._more(replicas, 1, bound, seeds)
            elif here.low >= target:
                return replicas, seeds, True
            elif seeds < most:
                seeds = min(most, 2 * seeds)
            else:
                break
        offered = [value["offered"] for value in self.seen(replicas, seeds)]
        best = attainment_over_seeds(offered, offered)
        if best.low < target:
            raise ValueError(
                f"{sum(offered)} requests in {seeds} seeds are too few to show {100 * target:g} % with confidence: "
                f"were all of them attained, the interval would begin at {100 * best.low:.1f} %; give more requests, a "
                "longer --window or more --most-seeds"
            )
        while self.attained(replicas, seeds).low < target:
            replicas = self._more(replicas, 1, bound, seeds)
            yield JobBatch(self.peaks([replicas], seeds), "confirm")
        return replicas, seeds, False

    def _more(self, replicas: int, step: int, bound: int, seeds: int) -> int:
        """The next larger fleet to try. Raises ValueError where more replicas raise attainment no further."""
        if replicas + step > bound:
            tried = f"{counted(replicas, 'replica')} attain {percent(self.attained(replicas, seeds))}"
            raise ValueError(
                f"{tried}, and more of them would not attain {100 * self.question.target:g} %: another policy or "
                "router, or looser SLOs, might"
            )
        return replicas + step

    def likely(self, replicas: int, seeds: int) -> list[Job]:
        """Cells that verify this many replicas, if the seeds run so far agree on the number."""
        for n, enough in ((replicas, True), (replicas - 1, False)):
            known = [v for seed in range(seeds) if n and (v := self.values.get(_key(n, "", seed)))]
            if known and (fmean(v["met"] / v["offered"] for v in known) >= self.question.target) is not enough:
                return []
        return self.verification(replicas, dict.fromkeys(self.things(replicas), 1))

    def verify(self, replicas: int, seeds: int) -> Asking[dict[str, int]]:
        """Run the verification; returns what was relaxed, and under how many seeds each."""
        lacking = self.attained(replicas - 1, seeds).value < self.question.target  # else there is nothing to tell
        once = dict.fromkeys(self.things(replicas) if lacking else [], 1)

        def enough() -> dict[str, int]:
            return {thing: RELAXED_SEEDS if self.unclear(replicas, seeds, thing) else 1 for thing in once}

        yield JobBatch(self.verification(replicas, once), "verify", lambda: self.verification(replicas, enough()))
        counts = enough()
        yield JobBatch(self.verification(replicas, counts), "verify")
        return counts

    def unclear(self, replicas: int, seeds: int, thing: str) -> bool:
        """Whether seed 0 alone, if it has run, leaves open whether this fleet attains the target."""
        if _key(replicas - 1, thing, 0) not in self.values:
            return False
        lacking = abs(self.question.target - self.attained(replicas - 1, seeds).value)
        near = abs(self.question.target - self.relaxed(replicas, seeds, thing, 1))
        return near < min(max(lacking / 2, CLEAR[0]), CLEAR[1])


def _key(replicas: int, relaxed: str, seed: int) -> str:
    return f"n={replicas}{f' {relaxed} relaxed' if relaxed else ''} seed={seed}"


def _whole(replicas: int) -> str:
    return f"whole n={replicas}"


def _by(replicas: int) -> float:
    """Factor by which one thing is relaxed for this many replicas."""
    return max(LEAST_RELAXED, replicas / max(1, replicas - 1))
