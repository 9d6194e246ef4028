"""What a grid leaves, one request after the other: what `dynamic_program` is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, inf

from rubato.policies.slos_serve.admission import Grid, Phase
from rubato.policies.slos_serve.demand import Demand

CLOSE, EPS = 1e-9, 1e-6


def index(grid: Grid, due: float) -> float:
    """How many batches have ended by then."""
    ended, begin = 0.0, 0.0
    for phase in grid:
        ended += min(max(floor((due - begin) / phase.seconds + CLOSE), 0), phase.batches)
        begin += phase.batches * phase.seconds
        if due < begin:
            break
    return ended


def until(grid: Grid, k: float, what: Callable[[Phase], float]) -> float:
    """The sum of something over the first k batches."""
    total = 0.0
    for phase in grid:
        total += min(k, phase.batches) * what(phase)
        k = max(0.0, k - phase.batches)
    return total


def end(grid: Grid, k: float) -> float:
    return until(grid, k, lambda phase: phase.seconds)


def supply(grid: Grid, k: float) -> float:
    return until(grid, k, lambda phase: phase.tokens)


def fringe(grid: Grid, tpot: float) -> float:
    """What a decode's stairs rise above its line: nothing where all batches divide its TPOT, and each other."""
    lengths = [p.seconds for p in grid[grid.has_short_first :] if p.seconds <= tpot * (1.0 + CLOSE)]
    ratios = [a / b for a, b in zip([tpot, *lengths], lengths, strict=False)]
    if tpot == inf or all(abs(ratio - round(ratio)) <= 1e-6 for ratio in ratios):
        return 0.0
    return max(lengths) / tpot


def room(grid: Grid, demands: Sequence[Demand]) -> list[float]:
    """Tokens left by each batch by which something is due."""
    due = {n: index(grid, d.due) for n, d in enumerate(demands) if d.due < inf}
    first = min([1.0, *(k for n, k in due.items() if demands[n].due > 0.0)])
    due |= {n: first for n in due if demands[n].due <= 0.0}

    def demanded(k: float) -> float:
        at = [(demands[n], own) for n, own in due.items() if own <= k]
        stairs = (d.tokens + fringe(grid, d.tpot) * d.verified for d, _ in at)
        return sum(stairs) + sum(d.verified / d.tpot * (end(grid, k) - end(grid, own)) for d, own in at)

    return [supply(grid, k) - demanded(k) for k in sorted(set(due.values()))]


def throughput(grid: Grid) -> float:
    """Tokens a second in the long run."""
    return grid[-1].tokens / grid[-1].seconds


def holds(grid: Grid, demands: Sequence[Demand]) -> bool:
    """Whether all of them are in time, for ever."""
    rate = sum(d.verified / d.tpot for d in demands if d.due < inf)
    return rate <= throughput(grid) + EPS and all(left >= -EPS for left in room(grid, demands))
