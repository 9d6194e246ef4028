"""`rubato sweep`: every policy at every rate under every seed, each a job; sums of each run, and intervals over seeds.

A seed's workload is made once and rescaled to each rate, so that all policies and rates see the same requests; what
differs between two policies is therefore paired by seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rubato.core.request import Request, Sampling, Stage
from rubato.measure import results
from rubato.measure.confidence import ALL, ONE_SEED, Estimate, attainment_over_seeds, over_seeds
from rubato.measure.plot import COLOURS, STYLES, picture
from rubato.measure.records import versions
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
    """What to run. specs: one for each policy, told apart by their labels; rates: requests/s of the whole fleet."""

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


def run(asked: Sweep, **how: Any) -> SweepResult:
    """`how`: as `jobs.run` takes it (file, workers, progress). A policy that cannot run is left out; raises ValueError
    when none can."""
    specs, reasons = able(asked.specs)
    head = {
        "results": FORMAT,
        "sweep": asked.describe(),
    }  # of all, so that the file goes on when the one that is left out is mended
    ran = replace(asked, specs=specs)
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
class Point:
    """One policy at one rate, over all seeds. attainment per tier and "all"; the rest are means over seeds, in seconds
    and requests/s; against: attainment minus that of the sweep's first policy, paired by seed, in [-1, 1]. by_deadline,
    by_windows: attainment by these two rules, whichever judged; pause_p99, pause_max: of each request's longest pause
    between two tokens, mean and maximum over seeds; per tier and "all"."""

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


@dataclass(frozen=True)
class SweepResult:
    """sweep: with the policies that ran; skipped: of the others, by label, why they cannot run."""

    sweep: Sweep
    done: JobResults
    skipped: Mapping[str, str] = field(default_factory=dict)

    def points(self) -> list[Point]:
        labels = [spec.choice.label for spec in self.sweep.specs]
        found: dict[tuple[str, float], list[_Tiers]] = {}  # an entry for each seed, in one order
        for value in self.done.values:
            tiers = {row["tier"]: row for row in value["tiers"]}
            found.setdefault((value["policy"], value["rate"]), []).append(tiers)
        return [
            _point(label, rate, found[label, rate], found[labels[0], rate])
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
            "jobs": self.done.costed(),
            "wall": self.done.wall,
            "cpu": self.done.cpu,
            "notes": self.notes,
            "versions": versions("numpy"),
        }  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        one = [ONE_SEED] if len(self.sweep.seeds) < 2 else []
        return (*self.done.notes, *self.sweep.source.notes, *left_out(self.skipped), *one)

    def text(self) -> str:
        """A table for the terminal; Markdown as well."""
        tiers = [tier for tier in self.points()[0].attainment if tier != ALL]
        several = len(self.sweep.specs) > 1
        head = ["policy", "rate (req/s)", "attainment", *tiers, "by deadline / windows", "attained/s", "TTFT p99"]
        head += ["TPOT p99", "pause p99 / max"]
        rows = [[*head, f"against {self.sweep.specs[0].choice.label}"] if several else head]
        for point in self.points():
            row = [
                point.policy, f"{point.rate:g}", percent(point.attainment[ALL]),
                *(f"{100 * point.attainment[tier].value:.1f} %" for tier in tiers),
                f"{100 * point.by_deadline[ALL]:.1f} % / {100 * point.by_windows[ALL]:.1f} %",
                f"{point.attained_rps.value:.3g}", milliseconds(point.ttft_p99), milliseconds(point.tpot_p99),
                f"{milliseconds(point.pause_p99[ALL])} / {milliseconds(point.pause_max[ALL])}",
            ]  # fmt: skip
            rows.append([*row, points_of(point.against)] if several else row)
        return markdown(rows)


_Tiers = Mapping[str, Mapping[str, Any]]  # of one run: a row of its results for each tier


def _point(policy: str, rate: float, own: Sequence[_Tiers], first: Sequence[_Tiers]) -> Point:
    by_tier = {tier: [tiers[tier] for tiers in own if tier in tiers] for tier in own[0]}
    longest = {tier: [row["pause_max"] for row in rows] for tier, rows in by_tier.items()}
    return Point(
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


def plot(path: str | Path, points: Sequence[Point]) -> None:
    """A PNG: attainment of all requests by rate, a line a policy. Raises ImportError without matplotlib."""
    policies = list(dict.fromkeys(point.policy for point in points))

    def draw(axes: Any) -> None:
        for index, policy in enumerate(policies):
            own = sorted((p for p in points if p.policy == policy), key=lambda p: p.rate)
            rates, all_ = [p.rate for p in own], [p.attainment[ALL] for p in own]
            colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
            axes.plot(rates, [100 * e.value for e in all_], color=colour, linestyle=style, marker="o", label=policy)
            axes.fill_between(
                rates, [100 * e.low for e in all_], [100 * e.high for e in all_], color=colour, alpha=0.15, linewidth=0
            )
        axes.axhline(90, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylim(0, 103)
        axes.set_xlabel("requests/s offered")
        axes.set_ylabel("SLO attainment (%, of offered)")
        axes.legend(frameon=False)

    picture(path, draw, "Attainment by rate with 95 % intervals; line at 90 %")


# --------------------------------------------------------------------------- words


def percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} % [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def points_of(estimate: Estimate) -> str:
    """A difference of shares, in percentage points."""
    return f"{100 * estimate.value:+.1f} {estimate.interval(lambda end: f'{100 * end:+.1f}')}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.0f} ms"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that a terminal reads it too; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def write(path: str | Path, title: str, text: str) -> None:
    """A short Markdown report."""
    Path(path).write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
