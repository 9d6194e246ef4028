"""The rule and the table of `fidelity.py`: does a simulated cell hold against two live runs of it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

POINTS, RELATIVE, SLACK = 0.05, 0.10, 1.5  # attainment, mean e2e, times what the live runs differ by
HEAD = (
    "policy", "load", "tier", "requests", "attained live 1", "live 2", "simulated", "off", "mean e2e live 1", "live 2",
    "simulated", "off", "pace", "verdict",
)  # fmt: skip
RULE = (
    f"A cell holds if attainment is within {100 * POINTS:.0f} points and mean e2e within {100 * RELATIVE:.0f} % of the "
    f"mean of both live runs, or within {SLACK} times the difference between the two. Requests: per live run. Pace: "
    "seconds that the steps of each live run took for each that the fit run's model says."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One tier of one run, or of several pooled. e2e: mean seconds of what completed."""

    requests: int
    attained: float
    e2e: float


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
    pace: tuple[float, float] = (1.0, 1.0)
    late: bool = False

    @property
    def attainment_off(self) -> float:
        return self.simulated.attained - (self.one.attained + self.two.attained) / 2

    @property
    def e2e_off(self) -> float:
        """As a share of the live runs' mean."""
        return self.simulated.e2e / self._e2e - 1.0

    @property
    def attainment_holds(self) -> bool:
        return abs(self.attainment_off) <= max(POINTS, SLACK * abs(self.one.attained - self.two.attained))

    @property
    def e2e_holds(self) -> bool:
        return abs(self.e2e_off) <= max(RELATIVE, SLACK * abs(self.one.e2e - self.two.e2e) / self._e2e)

    @property
    def _e2e(self) -> float:
        return (self.one.e2e + self.two.e2e) / 2

    def verdict(self) -> str:
        both = (("attainment", self.attainment_holds), ("e2e", self.e2e_holds))
        broken = ", ".join(name for name, holds in both if not holds)
        return (f"fails: {broken}" if broken else "holds") + (" (late client)" if self.late else "")

    def texts(self) -> list[str]:
        """In the order of HEAD."""
        three = (self.one, self.two, self.simulated)
        return [
            self.policy, f"{self.load:g}", self.tier, str(self.one.requests),
            *(f"{100 * f.attained:.1f} %" for f in three), f"{100 * self.attainment_off:+.1f}",
            *(f"{f.e2e:.2f} s" for f in three), f"{100 * self.e2e_off:+.1f} %",
            " / ".join(f"{pace:.2f}" for pace in self.pace), self.verdict(),
        ]  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        off = {"attainment_off": self.attainment_off, "e2e_off": self.e2e_off}
        return {**asdict(self), **off, "attainment_holds": self.attainment_holds, "e2e_holds": self.e2e_holds}


def table(cells: Sequence[Cell], about: str) -> str:
    """A Markdown page: what was done, the rule, the table."""
    holds = sum(cell.attainment_holds and cell.e2e_holds for cell in cells)
    lines = [
        "# Simulated against live",
        "",
        about,
        "",
        RULE,
        "",
        f"{holds} of {len(cells)} hold.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(cell.texts()) + " |" for cell in cells),
    ]
    return "\n".join(lines) + "\n"
