"""The rule and the table of `fidelity.py`: does a simulated cell hold against two live runs of it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
            "between the two. Requests: per live run. Pace: seconds that the steps of each live run took for each that "
            "the fit run's model says."
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One tier of one run, or of several pooled. e2e: mean seconds of what completed; ttft: 99th percentile."""

    requests: int
    attained: float
    e2e: float
    ttft: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A tier under a policy at a load. late: the load generator of a live run could not keep its schedule."""

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

    @property
    def attainment_off(self) -> float:
        return self.simulated.attained - (self.one.attained + self.two.attained) / 2

    @property
    def e2e_off(self) -> float:
        """As a share of the live runs' mean."""
        return _off(self.one.e2e, self.two.e2e, self.simulated.e2e)

    @property
    def ttft_off(self) -> float:
        """As a share of the live runs' mean."""
        return _off(self.one.ttft, self.two.ttft, self.simulated.ttft)

    @property
    def attainment_holds(self) -> bool:
        return abs(self.attainment_off) <= max(self.rule.points, SLACK * abs(self.one.attained - self.two.attained))

    @property
    def e2e_holds(self) -> bool:
        return abs(self.e2e_off) <= max(self.rule.e2e, SLACK * _apart(self.one.e2e, self.two.e2e))

    @property
    def ttft_holds(self) -> bool:
        bound = self.rule.ttft
        return bound is None or abs(self.ttft_off) <= max(bound, SLACK * _apart(self.one.ttft, self.two.ttft))

    @property
    def holds(self) -> bool:
        return self.attainment_holds and self.e2e_holds and self.ttft_holds

    def verdict(self) -> str:
        all_ = (("attainment", self.attainment_holds), ("e2e", self.e2e_holds), ("TTFT", self.ttft_holds))
        broken = ", ".join(name for name, holds in all_ if not holds)
        return (f"fails: {broken}" if broken else "holds") + (" (late client)" if self.late else "")

    def texts(self) -> list[str]:
        """In the order of HEAD."""
        three = (self.one, self.two, self.simulated)
        return [
            self.policy, f"{self.load:g}", self.tier, str(self.one.requests),
            *(f"{100 * f.attained:.1f} %" for f in three), f"{100 * self.attainment_off:+.1f}",
            *(f"{f.e2e:.2f} s" for f in three), f"{100 * self.e2e_off:+.1f} %",
            *(f"{f.ttft:.2f} s" for f in three), f"{100 * self.ttft_off:+.1f} %",
            " / ".join(f"{pace:.2f}" for pace in self.pace), self.verdict(),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        off = {"attainment_off": self.attainment_off, "e2e_off": self.e2e_off, "ttft_off": self.ttft_off}
        return {**asdict(self), **off, "holds": self.holds}


def _off(one: float, two: float, simulated: float) -> float:
    return simulated / ((one + two) / 2) - 1.0


def _apart(one: float, two: float) -> float:
    """The difference, as a share of the mean."""
    return abs(one - two) / ((one + two) / 2)


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
