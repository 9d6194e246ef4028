"""`rubato plan`: the smallest fleet that attains a share of a workload's requests, and what binds it.

The fleet is sized on the busiest stretch. Each seed redraws tiers (where the source draws them) and bootstraps 60 s
blocks of the busiest stretch. With n replicas the interval's lower end is at the target or above, with n - 1 the mean
is below: seeds are added until both hold. Then the whole workload is run once with n. What binds is found by
counterfactual: with n - 1 replicas and one constraint relaxed, is the target attained?

The search begins at what a sample of the stretch suggests, goes to where seed 0 is on either side of the target, and
every run of it counts among the seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf
from typing import Any

from rubato.measure.confidence import Estimate, attainment_over_seeds, over_seeds
from rubato.measure.tables import percent
from rubato.planning import feasibility, jobs
from rubato.planning.capacity import estimate
from rubato.planning.fleet_size_model import FleetPlan, FleetQuestion, counted, effect, peak, whole
from rubato.planning.jobs import Job, JobRunner
from rubato.simulation.simulate import gc_paused, simulate
from rubato.workloads.resample import bootstrapped, sampled

MAX_REPLICAS = 1024
SAMPLE_REQUESTS = 5000  # requests that a guess is made with
MIN_GAIN = 0.001  # of attainment, from half as many replicas again
MIN_RELAXATION = 1.25  # by what a constraint is relaxed, at least; else by the missing replica's part, n / (n - 1)
MAX_RELAXED_SEEDS = 2  # at most; one where that is far from the target:
CLEAR_MARGINS = (
    0.005,
    0.05,
)  # by at least and at most so much attainment, between them by half of what one fewer lacks


def plan(question: FleetQuestion, **how: Any) -> FleetPlan:
    """Finds the smallest fleet that attains the question's target. `how`: options of `jobs.open_runner`. Raises
    ValueError, with the reason, when no number of replicas attains the target."""
    with jobs.open_runner(head={"plan": question.describe()}, **how) as runner:
        found = _Search(question, runner).plan()
        return replace(found, job_results=runner.job_results())


@gc_paused()
def survey(question: FleetQuestion) -> dict[str, Any]:
    """The busiest stretch, the SLO times stated, infeasible requests, and how many replicas to begin with. Raises
    ValueError where infeasible requests put the target out of reach."""
    load = question.source.make(0)
    alike = {(one.tier, one.slo, one.parts): one for one in load.arrivals}
    slos = {part.slo for one in alike.values() for part in load.parts(one)}
    infeasible = feasibility.assess(load, question.spec.hardware, question.spec.slo_rule)
    if not question.exclude:
        infeasible.check(question.target)
    return {
        "stretch": question.stretch(0),
        "stated": [name for name in ("ttft", "tpot", "e2e") if any(getattr(s, name) is not None for s in slos)],
        "infeasible": asdict(infeasible),
        "replicas": guess(question),
    }


def guess(question: FleetQuestion) -> int:
    """About how many replicas attain the target, by simulating the beginning of each minute of the busiest stretch."""
    load = bootstrapped(question.load(0, question.stretch(0)), 0)
    if len(load.arrivals) > SAMPLE_REQUESTS:
        load = sampled(load, SAMPLE_REQUESTS / len(load.arrivals))

    def attained(replicas: int) -> float:
        records = simulate(load, replace(question.spec, replicas=replicas), times=False, causes=False).records
        return sum(record.verdict.met for record in records) / len(records)

    # step times alone would allow twice what is attained, often
    low, high = 0, ceil(1.5 * load.rate / estimate(load, replace(question.spec, replicas=1)))
    before = 0.0
    while (share := attained(high)) < question.target and high < MAX_REPLICAS:
        if question.target / 2 < share < before + MIN_GAIN:
            return high  # the whole stretch may attain more
        low, high, before = high, min(MAX_REPLICAS, ceil(1.5 * high)), share
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attained(middle) >= question.target else (middle, high)
    return high


@dataclass(frozen=True)
class _Search:
    """The search for the smallest fleet. What it asks for twice runs once."""

    question: FleetQuestion
    runner: JobRunner
    tried: dict[int, int] = field(default_factory=dict)  # replicas -> most seeds that ran

    def plan(self) -> FleetPlan:
        self.runner.about = "search"
        [survey_result] = self.runner.run([Job("survey", survey, (self.question,))])
        first = self.first(survey_result["replicas"])
        self.runner.about = "confirm"
        replicas, seeds, decided = self.settle(first)
        self.runner.about = "verify"
        attained, relaxed_seeds = self.verify(replicas, seeds, survey_result["stated"])
        start, end = survey_result["stretch"]
        return FleetPlan(
            self.question,
            (start, end),
            replicas,
            decided,
            seeds,
            with_n=self.attained(replicas, seeds),
            with_one_fewer=self.attained(replicas - 1, seeds),
            whole=attained,
            relaxed={what: self.relaxed(replicas, seeds, what, count) for what, count in relaxed_seeds.items()},
            relaxed_by=_factor(replicas),
            relaxed_seeds=relaxed_seeds,
            infeasible=feasibility.Feasibility(**survey_result["infeasible"]),
            tried={n: self.estimate_of(n, count) for n, count in sorted(self.tried.items())},
        )

    # ----------------------------------------------------------------- jobs, and what they say together

    def peaks(self, replicas: int, seeds: int, relaxed: str = "") -> list[Job]:
        """Simulates the busiest stretch on so many replicas under each seed.

        Args:
            relaxed: the constraint to relax, "" for none.
        """
        factor = _factor(replicas + 1) if relaxed else 1.0
        what = f" {relaxed} relaxed" if relaxed else ""
        return [
            Job(f"n={replicas}{what} seed={seed}", peak, (self.question, replicas, relaxed, factor, seed))
            for seed in range(seeds)
        ]

    def attained(self, replicas: int, seeds: int) -> Estimate:
        if replicas == 0:
            return Estimate.exact(0.0)
        self.tried[replicas] = max(seeds, self.tried.get(replicas, 0))
        values = self.runner.run(self.peaks(replicas, seeds))
        return attainment_over_seeds([v["met"] for v in values], [v["offered"] for v in values])

    def estimate_of(self, replicas: int, seeds: int) -> Estimate:
        """As `attained`; of one seed without an interval."""
        found = self.attained(replicas, seeds)
        return found if seeds > 1 else over_seeds([found.value])

    def relaxed(self, replicas: int, seeds: int, constraint: str, count: int) -> float:
        """Attainment of one replica fewer with a constraint relaxed, by `count` of the seeds."""
        fewer = replicas - 1
        same, relaxed = (self.runner.run(self.peaks(fewer, count, what)) for what in ("", constraint))
        return effect(self.attained(fewer, seeds), same, relaxed)

    # ----------------------------------------------------------------- the search

    def first(self, n: int) -> int:
        """The least replicas that attain the target under seed 0, searched from n on in doubling steps."""
        bound, step = 2 * n + 8, max(1, n // 32)
        low, high = 0, inf
        while high - low > 1:
            low, high = (low, n) if self.attained(n, 1).value >= self.question.target else (n, high)
            if high == inf:
                n = self.more(low, step, bound, 1)
            else:
                n = (low + int(high)) // 2 if low else max(1, int(high) - step)
            step *= 2
        return int(high)

    def settle(self, replicas: int) -> tuple[int, int, bool]:
        """The answer: replicas, seeds, and whether one replica fewer is known to miss the target."""
        seeds, most = self.question.seeds
        target = self.question.target
        bound = 2 * replicas + 8
        while True:
            fewer = self.peaks(replicas - 1, seeds) if replicas > 1 else []
            self.runner.run([*fewer, *self.peaks(replicas, seeds)])  # beside each other
            here, below = (self.attained(n, seeds) for n in (replicas, replicas - 1))
            if below.value >= target:
                replicas -= 1
            elif here.value < target:
                replicas = self.more(replicas, 1, bound, seeds)
            elif here.low >= target:
                return replicas, seeds, True
            elif seeds < most:
                seeds = min(most, 2 * seeds)
            else:
                break
        offered = [value["offered"] for value in self.runner.run(self.peaks(replicas, seeds))]
        best = attainment_over_seeds(offered, offered)
        if best.low < target:
            raise ValueError(
                f"{sum(offered)} requests in {seeds} seeds are too few to show {100 * target:g} % with confidence: "
                f"were all of them attained, the interval would begin at {100 * best.low:.1f} %; give more requests, a "
                "longer --window or more --most-seeds"
            )
        while self.attained(replicas, seeds).low < target:
            replicas = self.more(replicas, 1, bound, seeds)
        return replicas, seeds, False

    def more(self, replicas: int, step: int, bound: int, seeds: int) -> int:
        """The next larger fleet to try. Raises ValueError where more replicas raise attainment no further."""
        if replicas + step > bound:
            tried = f"{counted(replicas, 'replica')} attain {percent(self.attained(replicas, seeds))}"
            raise ValueError(
                f"{tried}, and more of them would not attain {100 * self.question.target:g} %: another policy or "
                "router, or looser SLOs, might"
            )
        return replicas + step

    def verify(self, replicas: int, seeds: int, stated: Sequence[str]) -> tuple[Any, dict[str, int]]:
        """What the whole workload attains, and with one replica fewer, how many seeds ran with each constraint relaxed:
        compute, KV, and the SLO times that some request states. None where one fewer attains the target."""
        fewer = replicas - 1
        lacking = self.question.target - self.attained(fewer, seeds).value
        relaxed = ["compute", "kv", *stated] if fewer and lacking > 0 else []
        once = [job for constraint in relaxed for job in self.peaks(fewer, 1, constraint)]
        attained, *_ = self.runner.run([Job(f"whole n={replicas}", whole, (self.question, replicas)), *once])
        clear = min(max(lacking / 2, CLEAR_MARGINS[0]), CLEAR_MARGINS[1])  # by so much seed 0 alone tells
        counts = dict.fromkeys(relaxed, 1)
        for constraint in relaxed:
            if abs(self.question.target - self.relaxed(replicas, seeds, constraint, 1)) < clear:
                counts[constraint] = MAX_RELAXED_SEEDS
        self.runner.run([job for constraint, count in counts.items() for job in self.peaks(fewer, count, constraint)])
        return attained, counts


def _factor(replicas: int) -> float:
    """By which a constraint is relaxed where one of so many replicas is missing."""
    return max(MIN_RELAXATION, replicas / max(1, replicas - 1))
