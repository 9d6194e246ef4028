"""The rule and the table: does a simulated cell hold against two live runs of it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, nan
from statistics import mean
from typing import Any

import numpy as np

from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import BenchResult, summarise

SLACK = 1.5  # times what the live runs differ by
HEAD = (
    "policy", "load", "tier", "requests", "attained live 1", "live 2", "simulated", "off", "mean e2e live 1", "live 2",
    "simulated", "off", "TTFT P99 live 1", "live 2", "simulated", "off", "pace", "verdict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """How far off a simulation may be: attainment in points / 100, mean e2e and the 99th percentile of TTFT relative
    (None: TTFT is shown, not judged)."""

    points: float = 0.05
    e2e: float = 0.10
    ttft: float | None = None

    def text(self) -> str:
        """A sentence or two, for above the table."""
        ttft = "" if self.ttft is None else f", P99 of TTFT within {100 * self.ttft:.0f} %"
        return (
            f"A cell holds if attainment is within {100 * self.points:.0f} points, mean e2e within "
            f"{100 * self.e2e:.0f} %{ttft} of the mean of both live runs, or within {SLACK} times the difference "
            "between the two. Requests: per live run. Pace: seconds of each live run's steps per second "
            "predicted by the fit run's model."
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One tier of one run, or of several pooled. e2e: mean seconds of what completed; ttft: 99th percentile."""

    requests: int
    attained: float
    e2e: float
    ttft: float


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far off simulation is, and how far it may be. each: the same, of each seed of the noise alone."""

    value: float
    bound: float
    each: tuple[float, ...] = ()

    @property
    def holds(self) -> bool:
        return abs(self.value) <= self.bound

    def share(self) -> Estimate:
        """|off| of its bound: 1 is the most that holds. The interval is of the noise in simulation: live runs' own is
        what the bound allows for."""
        noise = over_seeds([value - self.value for value in self.each])
        half = (noise.high - noise.low) / 2
        least, most = max(0.0, abs(self.value) - half), abs(self.value) + half
        return Estimate(abs(self.value) / self.bound, least / self.bound, most / self.bound)


@dataclass(frozen=True, slots=True)
class Cell:
    """A tier under a policy at a load. simulated: all seeds pooled; seeds: each alone. late: the load generator of a
    live run could not keep its schedule."""

    policy: str
    load: float
    rate: float
    tier: str
    one: Figures
    two: Figures
    simulated: Figures
    rule: Rule = Rule()
    pace: tuple[float, float] = (1.0, 1.0)
    late: bool = False
    seeds: tuple[Figures, ...] = ()

    @property
    def attainment(self) -> Deviation:
        """In points / 100."""
        middle = (self.one.attained + self.two.attained) / 2
        bound = max(self.rule.points, SLACK * abs(self.one.attained - self.two.attained))
        return Deviation(self.simulated.attained - middle, bound, tuple(f.attained - middle for f in self.seeds))

    @property
    def e2e(self) -> Deviation:
        """As a share of the live runs' mean."""
        each = tuple(f.e2e for f in self.seeds)
        return _relative(self.one.e2e, self.two.e2e, self.simulated.e2e, self.rule.e2e, each)

    @property
    def ttft(self) -> Deviation:
        """As a share of the live runs' mean; without a bound where the rule has none."""
        each = tuple(f.ttft for f in self.seeds)
        bound = inf if self.rule.ttft is None else self.rule.ttft
        return _relative(self.one.ttft, self.two.ttft, self.simulated.ttft, bound, each)

    @property
    def offs(self) -> dict[str, Deviation]:
        return {"attainment": self.attainment, "e2e": self.e2e, "TTFT": self.ttft}

    @property
    def holds(self) -> bool:
        return all(off.holds for off in self.offs.values())

    def verdict(self) -> str:
        broken = ", ".join(name for name, off in self.offs.items() if not off.holds)
        return (f"fails: {broken}" if broken else "holds") + (" (late client)" if self.late else "")

    def texts(self) -> list[str]:
        """In the order of HEAD."""
        three = (self.one, self.two, self.simulated)
        return [
            self.policy, f"{self.load:g}", self.tier, str(self.one.requests),
            *(f"{100 * f.attained:.1f} %" for f in three), f"{100 * self.attainment.value:+.1f}",
            *(f"{f.e2e:.2f} s" for f in three), f"{100 * self.e2e.value:+.1f} %",
            *(f"{f.ttft:.2f} s" for f in three), f"{100 * self.ttft.value:+.1f} %",
            " / ".join(f"{pace:.2f}" for pace in self.pace), self.verdict(),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        off = {"attainment_off": self.attainment.value, "e2e_off": self.e2e.value, "ttft_off": self.ttft.value}
        return {**asdict(self), **off, "holds": self.holds}


def _relative(one: float, two: float, simulated: float, bound: float, each: Sequence[float]) -> Deviation:
    middle = (one + two) / 2
    bound = max(bound, SLACK * abs(one - two) / middle)
    return Deviation(simulated / middle - 1.0, bound, tuple(value / middle - 1.0 for value in each))


def figures(runs: Sequence[BenchResult], tier: str) -> Figures:
    """Offered requests of one run, attainment, mean e2e of what completed and P99 of TTFT of what began, in seconds;
    over all runs given. tier: "all" of them together."""
    row = next(row for row in summarise(runs) if row.tier == tier)
    verdicts = [r.verdict for run in runs for r in run.records if tier in (r.tier, "all")]
    e2e = [v.e2e for v in verdicts if v.e2e is not None]
    ttft = [v.ttft for v in verdicts if v.ttft is not None]
    p99 = float(np.quantile(ttft, 0.99)) if ttft else nan
    return Figures(row.offered // len(runs), row.attainment, mean(e2e) if e2e else nan, p99)


def table(cells: Sequence[Cell], about: str) -> str:
    """A Markdown page: what was done, the rule, the table."""
    lines = [
        "# Simulated against live",
        "",
        about,
        "",
        cells[0].rule.text(),
        "",
        f"{sum(cell.holds for cell in cells)} of {len(cells)} hold.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(cell.texts()) + " |" for cell in cells),
    ]
    return "\n".join(lines) + "\n"
