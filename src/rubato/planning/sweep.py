"""`rubato sweep`: every policy at every rate under every seed, each a job; sums of each run, and intervals over seeds.

A seed's workload is made once and rescaled to each rate, so that all policies and rates see the same requests; what
differs between two policies is therefore paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rubato.core.request import Request, Sampling, Stage
from rubato.measure import results
from rubato.measure.confidence import ALL, ONE_SEED, Estimate, attainment_over_seeds, over_seeds
from rubato.measure.pictures import Ink, Picture, lines_with_intervals
from rubato.measure.records import versions
from rubato.measure.result import Result, told_apart, with_interval
from rubato.measure.tables import Table, milliseconds, percent, points_of
from rubato.planning import jobs
from rubato.planning.jobs import Job, JobResults
from rubato.planning.request_source import RequestSource
from rubato.simulation.run_spec import RunSpec
from rubato.simulation.simulate import simulate, simulate_requests
from rubato.workloads.workload import check_rate

FORMAT = "rubato-sweep/3"
PROBE = Request("probe", (Stage(1),), 0.0, sampling=Sampling(max_tokens=1))


@dataclass(frozen=True)
class Sweep:
    """Asks what each policy attains at each rate.

    Args:
        specs: one for each policy, told apart by their labels.
        rates: requests/s offered to the whole fleet.
    """

    source: RequestSource
    specs: tuple[RunSpec, ...]
    rates: tuple[float, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        labels = [spec.choice.label for spec in self.specs]
        for name, values in (("policy", labels), ("rate", self.rates), ("seed", self.seeds)):
            if not values or len(set(values)) != len(values):
                raise ValueError(f"a sweep needs at least one {name}, and each once: got {', '.join(map(str, values))}")
        for rate in self.rates:
            check_rate(rate)

    def jobs(self) -> list[Job]:
        return [
            Job(f"{spec.choice.label} rate={rate:g} seed={seed}", simulate_point, (self.source, spec, rate, seed))
            for seed in self.seeds
            for rate in self.rates
            for spec in self.specs
        ]

    def describe(self) -> dict[str, Any]:
        return {"source": self.source.describe(), "settings": [spec.describe() for spec in self.specs]}


def simulate_point(source: RequestSource, spec: RunSpec, rate: float, seed: int) -> dict[str, Any]:
    """Simulate one policy at one rate under one seed, and sum up the run (`results.run_json`)."""
    run = simulate(source.make(seed).rescaled(rate), spec, seed, times=False)
    return {"policy": spec.choice.label, "rate": rate, "seed": seed} | results.run_json(run, requests=False)


def run(sweep: Sweep, **how: Any) -> SweepResult:
    """`how`: as `jobs.run` takes it (file, workers, progress). A policy that cannot run is left out; raises ValueError
    when none can."""
    specs, reasons = able(sweep.specs)
    head = {
        "results": FORMAT,
        "sweep": sweep.describe(),
    }  # of all, so that the file goes on when the one that is left out is mended
    ran = replace(sweep, specs=specs)
    return SweepResult(ran, jobs.run(ran.jobs(), head=head, about="sweep", **how), reasons)


# --------------------------------------------------------------------------- which policies can run


def able(specs: Sequence[RunSpec]) -> tuple[tuple[RunSpec, ...], dict[str, str]]:
    """Those that serve one request of one token, and of the others, by label, why not: a policy that is not there, too
    few replicas, a need that they do not meet, a router that does not go with it. Raises ValueError with all reasons
    when none can."""
    reasons: dict[str, str] = {}
    for spec in specs:
        try:
            simulate_requests([PROBE], {PROBE.id: (1,)}, spec, times=False)
        except (ValueError, RuntimeError) as error:
            reasons[spec.choice.label] = str(error)
    if len(reasons) == len(specs):
        raise ValueError("no policy can run: " + "; ".join(f"{label}: {why}" for label, why in reasons.items()))
    return tuple(one for one in specs if one.choice.label not in reasons), reasons


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """A note on each policy that cannot run (`able`)."""
    return [f"{label} is left out, as it cannot run: {why}" for label, why in reasons.items()]


# --------------------------------------------------------------------------- what was found


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One policy at one rate: means over all seeds, in seconds and requests/s; attainment per tier and for "all".

    Args:
        against: attainment minus that of the sweep's first policy, paired by seed, in [-1, 1].
        by_deadline, by_windows: attainment by these two rules, whichever rule judged.
        pause_p99, pause_max: of each request's longest pause between two tokens, mean and maximum over seeds; per tier
            and "all".
    """

    policy: str
    rate: float
    attainment: Mapping[str, Estimate]
    attained_rps: Estimate
    ttft_p99: float | None
    tpot_p99: float | None
    against: Estimate
    by_deadline: Mapping[str, float]
    by_windows: Mapping[str, float]
    pause_p99: Mapping[str, float | None]
    pause_max: Mapping[str, float | None]


@dataclass(frozen=True, repr=False)
class SweepResult(Result):
    """The points of a sweep.

    Args:
        sweep: as asked, with the policies that ran.
        skipped: why each other policy cannot run, by its label.
    """

    title = "Attainment by rate"
    sweep: Sweep
    job_results: JobResults
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Of the policies that ran, the one first that the others are compared with."""
        return [spec.choice.label for spec in self.sweep.specs]

    def points(self) -> list[SweepPoint]:
        labels = self.labels
        by_point: dict[tuple[str, float], list[_Tiers]] = {}  # an entry for each seed, in one order
        for value in self.job_results.values:
            tiers = {row["tier"]: row for row in value["tiers"]}
            by_point.setdefault((value["policy"], value["rate"]), []).append(tiers)
        return [
            _point(label, rate, by_point[label, rate], by_point[labels[0], rate])
            for label in labels
            for rate in self.sweep.rates
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.sweep.describe(),
            "rates": self.sweep.rates,
            "seeds": self.sweep.seeds,
            "slo_rule": self.sweep.specs[0].slo_rule,
            "interval": "95 %, Student's t over seeds, at least Wilson's of all requests; one seed: of that run",
            "skipped": dict(self.skipped),
            "points": [asdict(point) for point in self.points()],
            "jobs": self.job_results.costed(),
            "wall": self.job_results.wall,
            "cpu": self.job_results.cpu,
            "notes": self.notes,
            "versions": versions("numpy"),
        }  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        one = [ONE_SEED] if len(self.sweep.seeds) < 2 else []
        return (*self.job_results.notes, *self.sweep.source.notes, *left_out(self.skipped), *one)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.sweep.describe() | {"rates": self.sweep.rates, "seeds": self.sweep.seeds}

    @property
    def answer(self) -> str:
        top = max(self.sweep.rates)
        best = max((p for p in self.points() if p.rate == top), key=lambda p: p.attainment[ALL].value)
        among = f" of {len(self.labels)} policies" if len(self.labels) > 1 else ""
        return f"At {top:g} requests/s {best.policy} attains most{among}: {percent(best.attainment[ALL])}."

    @property
    def findings(self) -> tuple[str, ...]:
        """At each rate, which policies attain more than the first one, by differences paired by seed; how requests were
        judged."""
        first, *others = self.labels
        judged = f"Judged by the {self.sweep.specs[0].slo_rule} rule; {results.RULES}."
        if not others or len(self.sweep.seeds) < 2:
            return (judged,)
        points = {(p.policy, p.rate): p.against for p in self.points()}
        lines = []
        for rate in self.sweep.rates:
            against = {label: points[label, rate] for label in others}
            shown = {label: f"{points_of(one)} points" for label, one in against.items()}
            lines.append(f"At {rate:g} requests/s {told_apart(against, first, 'attains', shown)}.")
        return (*lines, judged)

    def tables(self) -> list[Table]:
        tiers = [tier for tier in self.points()[0].attainment if tier != ALL]
        several = len(self.labels) > 1
        head = ["policy", "rate (req/s)", "attainment", *tiers, "by deadline / windows", "attained/s", "TTFT p99"]
        head += ["TPOT p99", "pause p99 / max", *([f"against {self.labels[0]}"] if several else [])]
        rows = []
        for point in self.points():
            row = [
                point.policy, f"{point.rate:g}", percent(point.attainment[ALL]),
                *(f"{100 * point.attainment[tier].value:.1f} %" for tier in tiers),
                f"{100 * point.by_deadline[ALL]:.1f} % / {100 * point.by_windows[ALL]:.1f} %",
                f"{point.attained_rps.value:.3g}", milliseconds(point.ttft_p99), milliseconds(point.tpot_p99),
                f"{milliseconds(point.pause_p99[ALL])} / {milliseconds(point.pause_max[ALL])}",
            ]  # fmt: skip
            rows.append((*row, points_of(point.against)) if several else tuple(row))
        return [Table(tuple(head), tuple(rows))]

    def rows(self) -> list[dict[str, Any]]:
        """One for each policy, rate and tier, "all" among them; `attained_rps` and what follows are of all tiers."""
        return [
            {"policy": p.policy, "rate": p.rate, "tier": tier}
            | with_interval("attainment", attainment)
            | {"by_deadline": p.by_deadline[tier], "by_windows": p.by_windows[tier]}
            | {"pause_p99": p.pause_p99[tier], "pause_max": p.pause_max[tier]}
            | (with_interval("against_first", p.against) if tier == ALL else {})
            | ({"attained_rps": p.attained_rps.value} if tier == ALL else {})
            | ({"ttft_p99": p.ttft_p99, "tpot_p99": p.tpot_p99} if tier == ALL else {})
            for p in self.points()
            for tier, attainment in p.attainment.items()
        ]

    def picture(self) -> Picture:
        """Attainment over the rate with intervals, a line a policy; below, each tier's."""
        attainment = {(p.policy, p.rate): p.attainment for p in self.points()}
        tiers = [tier for tier in attainment[self.labels[0], self.sweep.rates[0]] if tier != ALL]
        panels = [ALL, *(tiers if len(tiers) > 1 else [])]
        lines, across, rates = -(-(len(panels) - 1) // 4), max(1, min(len(panels) - 1, 4)), sorted(self.sweep.rates)

        def draw(figure: Any, ink: Ink) -> None:
            grid = figure.add_gridspec(1 + lines, across, height_ratios=[1.5] + [1.0] * lines)
            for number, tier in enumerate(panels, start=-1):
                axes = figure.add_subplot(grid[0, :] if tier == ALL else grid[1 + number // across, number % across])
                own = {label: [attainment[label, rate][tier] for rate in rates] for label in self.labels}
                lines_with_intervals(axes, own, rates, 90, ink)
                axes.set_xlabel("requests/s offered")
                axes.set_title("all requests" if tier == ALL else tier)
                if tier == ALL:
                    axes.set_ylabel("SLO attainment (%, of offered)")
                    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=3.2)

        return Picture("Attainment by rate with 95 % intervals; line at 90 %", draw, (9.0, 3.9 + 2.4 * lines))


_Tiers = Mapping[str, Mapping[str, Any]]  # of one run: a row of its results for each tier


def _point(policy: str, rate: float, own: Sequence[_Tiers], first: Sequence[_Tiers]) -> SweepPoint:
    by_tier = {tier: [tiers[tier] for tiers in own if tier in tiers] for tier in own[0]}
    longest = {tier: [row["pause_max"] for row in rows] for tier, rows in by_tier.items()}
    return SweepPoint(
        policy,
        rate,
        {tier: _attainment(rows) for tier, rows in by_tier.items()},
        over_seeds([tiers[ALL]["attained_rps"] for tiers in own]),
        _mean([tiers[ALL]["ttft_p99"] for tiers in own]),
        _mean([tiers[ALL]["tpot_p99"] for tiers in own]),
        over_seeds([a[ALL]["attainment"] - b[ALL]["attainment"] for a, b in zip(own, first, strict=True)]),
        {tier: _share(rows, "met_by_deadline") for tier, rows in by_tier.items()},
        {tier: _share(rows, "met_by_windows") for tier, rows in by_tier.items()},
        {tier: _mean([row["pause_p99"] for row in rows]) for tier, rows in by_tier.items()},
        {tier: max([s for s in of if s is not None], default=None) for tier, of in longest.items()},
    )


def _attainment(rows: Sequence[Mapping[str, Any]]) -> Estimate:
    if len(rows) == 1:
        row = rows[0]
        return Estimate(row["attainment"], row["attainment_low"], row["attainment_high"])
    return attainment_over_seeds([row["met"] for row in rows], [row["offered"] for row in rows])


def _share(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """As `attainment_over_seeds` has it: the mean of each seed's."""
    shares: list[float] = [row[column] / row["offered"] for row in rows]
    return sum(shares) / len(shares)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
