"""The largest rate at which a share of the requests attains, of one system after another under the same requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import floor, log
from typing import Any

from rubato.measure.confidence import Estimate, over_seeds
from rubato.measure.records import Record
from rubato.planning.capacity import AlwaysAttained, NoCapacity, crossing, rate_or_zero
from rubato.planning.judge.search import MEASURES

FARTHER = 3


def on_grid(rate: float, step: float) -> float:
    """The largest power of `step` that is no larger."""
    return float(step ** floor(log(rate) / log(step) + 1e-6))


def share(records: Sequence[Record]) -> float:
    """Of the requests offered, those that met their SLO, and were not demoted."""
    return sum(r.verdict.met and not r.best_effort for r in records) / len(records)


def shares_of(records: Sequence[Record]) -> dict[str, float]:
    """Of all, of the worst tier, and of each tier, the tightest TPOT first where tiers are named by theirs."""
    names = {r.tier for r in records}
    tpots = all(name.startswith("tpot-") for name in names)
    tiers = sorted(names, key=lambda n: float(n.removeprefix("tpot-").removesuffix("ms")) if tpots else n)
    each = {tier: share([r for r in records if r.tier == tier]) for tier in tiers}
    return {"all": share(records), "worst": min(each.values()), **each}


def geometric(ratios: Iterable[float]) -> Estimate:
    """The geometric mean of ratios, one a seed."""
    return over_seeds([log(ratio) for ratio in ratios]).exp()


class RateSearch:
    """Runs of one workload at several rates, each done once, at powers of `grid`, so that measures share runs. bracket:
    how far apart (relative) rates on either side of what is sought may be. known: (policy, rate) -> the share that
    attained, in all, in the worst tier, and by tier. measures: what may be asked of a run, and which share it is of."""

    measures: Mapping[str, tuple[str, float]] = MEASURES

    def __init__(self, grid: float, bracket: float) -> None:
        self.grid, self.bracket = grid, bracket
        self.known: dict[tuple[str, float], dict[str, float]] = {}

    @abstractmethod
    def run(self, choice: str, rate: float) -> dict[str, float]:
        """Shares of a run, of all, of the worst tier, and by tier (`shares_of`)."""
        ...

    def shares(self, choice: str, rate: float) -> Mapping[str, float]:
        rate = on_grid(rate, self.grid)
        if (choice, rate) not in self.known:
            self.known[choice, rate] = self.run(choice, rate)
        return self.known[choice, rate]

    def attained(self, choice: str, measure: str) -> Callable[[float], float]:
        """Of a rate: the share asked for over what it has to be, so that 1 is enough."""
        of, target = self.measures[measure]
        return lambda rate: self.shares(choice, rate)[of] / target

    def best(
        self, choices: Sequence[str], start: float, measure: str, coarse: int = 4, every: bool = False
    ) -> tuple[float, str]:
        """The largest rate that one of these settings holds, and which one's it is; one is searched only if it attains
        at the rate of the best before it, which a short window may get wrong, or (every) each. (0, the first) where
        none does at an eighth of `start`. coarse: steps of the grid from one rate tried to the next until there is a
        bracket."""
        best, found = choices[0], 0.0
        for choice in choices:
            if every or len(choices) == 1 or self.attained(choice, measure)(found or start / 8.0) >= 1.0:
                rate = rate_or_zero(partial(self.goodput, choice, found or start, measure, self.grid**coarse))
                found, best = max((found, best), (rate, choice))
        return found, best

    def goodput(self, choice: str, start: float, measure: str, factor: float = 0.0) -> float:
        """The rate at which the measure is just met: on the line (share over log rate) between the ends of a bracket.
        factor: between rates tried until there is one; 0: that of the grid; where the start was so far off that there
        is none, it is `FARTHER` steps of that. Raises NoCapacity where the measure is met at no rate tried,
        AlwaysAttained where it is met at all."""
        attained, factor = self.attained(choice, measure), factor or self.grid
        begin = on_grid(start, factor)
        try:
            middle = crossing(attained, 1.0, begin, self.bracket, factor)
        except (AlwaysAttained, NoCapacity):
            middle = crossing(attained, 1.0, begin, self.bracket, factor**FARTHER)
        rates = sorted(rate for known, rate in self.known if known == choice)
        high = min(rate for rate in rates if rate > middle and attained(rate) < 1.0)
        low = max(rate for rate in rates if rate < high and attained(rate) >= 1.0)
        part = (attained(low) - 1.0) / (attained(low) - attained(high))
        return float(low * (high / low) ** part)

    def near(self, choice: str, rate: float) -> Mapping[str, float]:
        """Shares at the rate tried that is next to this one."""
        return self.known[choice, min((r for c, r in self.known if c == choice), key=lambda r: abs(r - rate))]

    def listed(self) -> list[Any]:
        return sorted([choice, rate, shares["all"], shares["worst"]] for (choice, rate), shares in self.known.items())
