"""`rubato bound`: shares of requests, and rates, that no policy without drafts can exceed, whatever it knows.

A linear programme over the share x of each request that is attained (0 or 1 in one run; what is between is a
relaxation). Its rows follow from the times of steps alone: nothing is assumed of the policy, its batches, its order,
its chunks, preemption, or what is known of the future. Why each holds:

1. A step takes at least a fixed part and a sum over its entries (`minorant.py`).
2. Each step pays the fixed part, and holds the KV of all its entries: at most `kv_blocks` blocks, of at most
   `max_num_seqs` sequences. So an entry may be charged its blocks (or itself) over that many of it (`work.py`).
3. Steps can be counted in a second way. Output tokens of one request, and of pieces whose windows do not overlap, come
   from different steps: steps between two moments are at least the tokens of any such sequence of pieces (`rows.py`).
   Tokens may be ahead of their deadlines, so "a step per TPOT" would not be valid; this is.
4. A prompt's steps lie between its arrival and its TTFT; those of later tokens between the earliest moment that the
   token before could be there and the deadline (deadline rule). Steps of what lies in [a, b] fill at most b - a.
   Requests that are not attained, and work done twice, only take more.
5. No edges: requests of a short run can all be put off beyond its last arrival. So they repeat without end, x being the
   mean over the copies (rows are linear in it), and all that is attained in a period takes at most the period.
   `endless` False is the bound of one run, which is much looser for a short one.
6. Alike: requests are in k groups by cost, and what is made largest is the least mean x of a group. With k = 1 that is
   the share of all, anybody may be dropped; with 10 it is what the decile of cost that attains least can attain
   (requests of equal cost are in one); with a group for each request it is the chance that each can have, as in a
   lottery that knows nothing of the moment. A policy that serves some better than others may attain more of all than
   the last two say, and no more of those that it serves worst.

A fleet of n replicas: each step runs on one of them, which has the same limits, so 1 to 3 hold for it, and the rows
hold summed over replicas with n times the seconds. So the bound is any router's, also where KV moves, and where roles
only restrict what a replica does.

Not covered, and refused: drafts, several stages, requests that wait for others to end, prompts that begin alike where
there is a prefix cache, step times with noise, other rules than the deadline rule. To stop the programme early only
raises the bound. That shares fall as rates rise is not proved; rates are searched as if they did, and tests see that
they do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rubato.measure.confidence import ONE_SEED, Estimate, over_seeds
from rubato.measure.pictures import COLOURS, WIDTH, Ink, Picture, bars_with_intervals
from rubato.measure.records import versions
from rubato.measure.result import Result, with_interval
from rubato.measure.tables import Table, number
from rubato.planning import jobs
from rubato.planning.bound.programme import ALIKE, Alike, Share, largest_share
from rubato.planning.bound.work import RequestWork, work_of
from rubato.planning.capacity import narrowed
from rubato.planning.jobs import Job, JobResults
from rubato.planning.request_source import RequestSource
from rubato.simulation.run_spec import Hardware
from rubato.workloads import Workload
from rubato.workloads.workload import check_rate

FORMAT = "rubato-bound/1"
NAMES: Mapping[Alike, str] = {  # of whom the share is
    "anybody": "all, whoever is dropped", "deciles": "the worst decile of cost", "lottery": "everybody, by lot",
}  # fmt: skip
BINDS = {
    "period": "work of a whole period", "window": "work between two moments", "sequence": "steps one after the other",
}  # fmt: skip
FACTOR, TRIES = 1.3, 24  # of a search's first bracket
SHORT = (
    "deadlines are {:.2g} of a period away in the mean: a run in which the requests come a few times may hold more "
    "than the stream, since what is late is served after its end; offer more requests to compare it with policies"
)
DRAINS = 0.5  # of a period: with deadlines longer than that in the mean, a short run is not as the stream is


@dataclass(frozen=True)
class OfferedWork:
    """What a bound is computed for: the requests of a workload, at any rate, on `replicas` replicas.

    Args:
        endless: whether the requests repeat end to end. Then a rate is requests over the period; else it is the rate
            that the workload was made for, as in `rubato capacity`.
        prefix_cache: whether replicas keep the KV of prompts' beginnings.

    Raises:
        ValueError: no replicas, or prompts that begin alike where there is a prefix cache.
    """

    load: Workload
    machine: Hardware
    replicas: int = 1
    endless: bool = True
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"{self.replicas} replicas: give 1 or more")
        if self.prefix_cache:
            _check_apart(self.load)

    def at(self, rate: float) -> Workload:
        """The requests of one period at `rate` requests/s."""
        if not self.endless or self.load.paced_by_ends:  # the second is refused where work is reckoned
            return self.load.rescaled(rate)
        times = [a.at for a in self.load.arrivals]
        if len(times) < 2 or times[-1] <= times[0]:
            raise ValueError("requests that all come at one instant make no stream: bound them as they come once")
        return replace(self.load, rate=(len(times) - 1) / (times[-1] - times[0])).rescaled(rate)

    def work(self, rate: float) -> RequestWork:
        """At `rate` requests/s. Raises ValueError for requests that are not covered."""
        return work_of(self.at(rate), self.machine, endless=self.endless)

    def share(self, rate: float, alike: Alike, target: float | None = None) -> Share:
        """At `rate` requests/s; where it is below `target` it need not be the least that could be shown."""
        return largest_share(self.work(rate), self.replicas, alike, target)

    def rate(self, target: float, alike: Alike, tolerance: float, start: float | None = None) -> float:
        """Returns the rate, requests/s, at which no policy attains `target`: the upper end of a bracket of relative
        width `tolerance`; 0 where it is out of reach at all rates tried.

        Args:
            start: the first rate tried, requests/s.

        Raises:
            ValueError: the target is in reach at all rates.
        """
        attains = partial(self._attains, target, alike)
        low = high = start or self.replicas / float(self.work(1.0).cost.mean())
        up = attains(low)
        for _ in range(TRIES):
            low, high = (high, high * FACTOR) if up else (low / FACTOR, low)
            if attains(high if up else low) is not up:
                return narrowed(attains, low, high, tolerance)[1]
        if not up:
            return 0.0
        raise ValueError(
            f"{100 * target:g} % of these requests could be in time at any rate ({high:.3g}/s): offer more requests"
        )

    def drains(self, rate: float) -> float:
        """Seconds from a request's arrival to its last deadline, in the mean, over the period at `rate`; 0 for requests
        that come once."""
        work = self.work(rate)
        last = np.zeros(work.requests)
        np.maximum.at(last, work.request[: work.once], work.due[: work.once])
        return float(np.mean(last - work.arrivals)) / work.period

    def _attains(self, target: float, alike: Alike, rate: float) -> bool:
        return self.share(rate, alike, target).share >= target


def _check_apart(load: Workload) -> None:
    """Raises ValueError for two requests whose prompts begin alike."""
    first: dict[int, str] = {}
    for a in load.arrivals:
        if a.blocks and (other := first.setdefault(a.blocks[0], a.id)) != a.id:
            raise ValueError(
                f"the prompts of {other!r} and {a.id!r} begin alike, and a prefix cache may hold what they share: a "
                "bound is worked out without one (--set prefix_cache=false)"
            )


# --------------------------------------------------------------------------- `rubato bound`


@dataclass(frozen=True)
class BoundQuestion:
    """Asks what no policy can exceed.

    Args:
        rate: requests/s at which the largest shares are asked for; None: the largest rates at which `target` can be
            attained are.
        endless, prefix_cache: as in `OfferedWork`.
        tolerance: relative width of a search's bracket.
    """

    source: RequestSource
    machine: Hardware
    seeds: tuple[int, ...]
    replicas: int = 1
    rate: float | None = None
    target: float = 0.9
    endless: bool = True
    tolerance: float = 0.01
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("a bound needs at least one seed")
        if self.rate is not None:
            check_rate(self.rate)
        if not 0.0 < self.target <= 1.0:
            raise ValueError(f"target is {self.target}: give a share above 0 and at most 1, such as 0.9")
        if not 0.0 < self.tolerance < 1.0:
            raise ValueError(f"tolerance is {self.tolerance}: give a relative width in (0, 1), such as 0.01")

    def jobs(self) -> list[Job]:
        return [Job(f"{alike} seed={seed}", bounded, (self, seed, alike)) for seed in self.seeds for alike in ALIKE]

    def describe(self) -> dict[str, Any]:
        return {
            "source": self.source.describe(), "hardware": self.machine.describe(), "replicas": self.replicas,
            "rate": self.rate, "target": self.target, "endless": self.endless, "tolerance": self.tolerance,
            "prefix_cache": self.prefix_cache,
        }  # fmt: skip


def bounded(question: BoundQuestion, seed: int, alike: Alike) -> dict[str, Any]:
    """Of one seed's requests: the rate (0: none), the share there, and what binds."""
    own = (question.replicas, question.endless, question.prefix_cache)
    offered = OfferedWork(question.source.make(seed), question.machine, *own)
    rate = question.rate or offered.rate(question.target, alike, question.tolerance)
    of = {"alike": alike, "seed": seed, "rate": rate, "requests": len(offered.load.arrivals)}
    if not rate:
        return of | {"share": 0.0, "binds": {}, "steps": 0.0, "drains": 0.0}
    found = offered.share(rate, alike)
    drains = offered.drains(rate)
    return of | {"share": found.share, "binds": dict(found.binds), "steps": found.steps, "drains": drains}


@dataclass(frozen=True, repr=False)
class BoundResult(Result):
    """What no policy without drafts exceeds: a rate, or a share at the rate asked for."""

    title = "Bound"
    question: BoundQuestion
    job_results: JobResults

    def estimates(self) -> dict[Alike, Estimate]:
        """Over seeds: of the share at the rate asked for, else of the rate."""
        what = "rate" if self.question.rate is None else "share"
        return {alike: over_seeds([v[what] for v in self._of(alike)]) for alike in ALIKE}

    @property
    def notes(self) -> tuple[str, ...]:
        alone = (ONE_SEED,) if len(self.question.seeds) < 2 else ()
        drains = max(v["drains"] for v in self.job_results.values)
        short = (SHORT.format(drains),) if drains > DRAINS else ()
        return (*self.job_results.notes, *self.question.source.notes, *short, *alone)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT, **self.question.describe(), "seeds": self.question.seeds, "slo_rule": "deadline",
            "bounds": {alike: asdict(e) for alike, e in self.estimates().items()}, "found": self.job_results.costed(),
            "wall": self.job_results.wall, "cpu": self.job_results.cpu, "notes": self.notes,
            "versions": versions("numpy"),
        }  # fmt: skip

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.question.describe() | {"seeds": self.question.seeds}

    @property
    def answer(self) -> str:
        asked, most = self.question, self.estimates()["anybody"]
        if asked.rate:
            return f"No policy without drafts attains more than {_share(most)} at {asked.rate:g} requests/s."
        goal = f"{100 * asked.target:g} % of requests"
        if not most.value:
            return f"No policy attains {goal} at any rate."
        return f"No policy without drafts attains {goal} above {number(most)} requests/s."

    def tables(self) -> list[Table]:
        question, replicas = self.question, self.question.replicas
        head = f"attained at {question.rate:g} req/s" if question.rate else "req/s"
        rows = []
        for alike, found in self.estimates().items():
            rate = number(found) if found.value else "at no rate"
            rows.append((NAMES[alike], _share(found) if question.rate else rate, *self._reasons(alike)))
        stream = "repeated end to end" if question.endless else "once"
        what = f"{replicas} replica{'s' * (replicas > 1)} of {question.machine.name}, requests {stream}, deadline rule"
        goal = "" if question.rate else f", {100 * question.target:g} % of these attained"
        return [Table(
            ("of whom", head, "what binds", "of it steps as such"), tuple(rows),
            f"What no policy without drafts exceeds ({what}{goal})",
        )]  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """One for each way to count: `bound` is a share at the rate asked for, else requests/s."""
        return [{"of": alike, "rate": self.question.rate} | with_interval("bound", e) for alike, e in self._each()]

    def picture(self) -> Picture:
        """The bound for each way to count, with its interval."""
        question, estimates = self.question, self._each()

        def draw(figure: Any, ink: Ink) -> None:
            axes = figure.add_subplot()
            said = _share if question.rate else number
            bars_with_intervals(axes, [(NAMES[alike], e, said(e), COLOURS[0]) for alike, e in estimates], ink)
            axes.set_xlabel("share of requests attained" if question.rate else "requests/s of the fleet")

        goal = (
            f"at {question.rate:g} requests/s"
            if question.rate
            else f"with {100 * question.target:g} % of requests attained"
        )
        return Picture(f"What no policy without drafts exceeds {goal}", draw, (WIDTH, 2.6))

    def _each(self) -> list[tuple[Alike, Estimate]]:
        return list(self.estimates().items())

    def _of(self, alike: Alike) -> list[dict[str, Any]]:
        return [v for v in self.job_results.values if v["alike"] == alike]

    def _reasons(self, alike: Alike) -> list[str]:
        """Means over the seeds in which something binds."""
        bound = [v for v in self._of(alike) if v["binds"]]
        if not bound:
            return [
                "nothing: all can be attained" if any(v["rate"] for v in self._of(alike)) else "some never can be",
                "",
            ]
        parts = {kind: sum(v["binds"].get(kind, 0.0) for v in bound) / len(bound) for kind in BINDS}
        said = [f"{BINDS[kind]} {100 * part:.0f} %" for kind, part in parts.items() if part >= 0.005]
        return [", ".join(said), f"{100 * sum(v['steps'] for v in bound) / len(bound):.0f} %"]


def _share(found: Estimate) -> str:
    return f"{100 * found.value:.1f} % {found.interval(lambda end: f'{100 * end:.1f}')}"


def run(question: BoundQuestion, **how: Any) -> BoundResult:
    """`how`: as `jobs.run` takes it. Raises ValueError for requests or step times that are not covered."""
    return BoundResult(question, jobs.run(question.jobs(), head={"bound": question.describe()}, about="bound", **how))
