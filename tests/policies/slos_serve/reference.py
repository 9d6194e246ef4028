"""Grids, and what is left of them, in plain Python: what the compiled `dynamic_program` is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import ceil, floor, inf

from rubato.policies.slos_serve.admission import AdmissionLimits
from rubato.policies.slos_serve.token_budget import Demand, Grid, Phase

CLOSE, EPS = 1e-9, 1e-6


def index(grid: Grid, due: float) -> float:
    """How many batches have ended by then."""
    ended, begin = 0.0, 0.0
    for phase in grid.phases:
        ended += min(max(floor((due - begin) / phase.seconds + CLOSE), 0), phase.batches)
        begin += phase.batches * phase.seconds
        if due < begin:
            break
    return ended


def until(grid: Grid, k: float, what: Callable[[Phase], float]) -> float:
    """The sum of something over the first k batches."""
    total = 0.0
    for phase in grid.phases:
        total += min(k, phase.batches) * what(phase)
        k = max(0.0, k - phase.batches)
    return total


def end(grid: Grid, k: float) -> float:
    return until(grid, k, lambda phase: phase.seconds)


def supply(grid: Grid, k: float) -> float:
    return until(grid, k, lambda phase: phase.tokens)


def fringe(grid: Grid, tpot: float) -> float:
    """What a decode's stairs rise above its line: nothing where all batches divide its TPOT, and each other."""
    lengths = [p.seconds for p in grid.phases[grid.leads :] if p.seconds <= tpot * (1.0 + CLOSE)]
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
    return grid.phases[-1].tokens / grid.phases[-1].seconds


def holds(grid: Grid, demands: Sequence[Demand]) -> bool:
    """Whether all of them are in time, for ever."""
    rate = sum(d.verified / d.tpot for d in demands if d.due < inf)
    return rate <= throughput(grid) + EPS and all(left >= -EPS for left in room(grid, demands))


def lay(decodes: Sequence[tuple[float, float]], longest: float, capacity: Callable[[float], int]) -> Grid:
    """Batches of at most `longest`, and of each TPOT from the last batch that has ended when its request is due."""
    phases = []
    begin, seconds = 0.0, longest
    for due, tpot in sorted(decodes):
        if tpot < seconds and due < inf:
            count = max(0, floor((due - begin) / seconds + CLOSE))
            if count:
                phases.append(Phase(count, seconds, capacity(seconds)))
                begin += count * seconds
            seconds = tpot
    return Grid([*phases, Phase(inf, seconds, capacity(seconds))])


def lengths(demands: Sequence[Demand], limits: AdmissionLimits) -> list[float]:
    """The longest batch, and those that fit the first two deadlines that a batch can be fitted to."""
    soon = sorted({d.due for d in demands if 0.0 < d.due < inf and (d.tokens > 1 or d.due < d.tpot)})
    fits = [due / max(1, ceil(due / limits.longest - CLOSE)) for due in soon[:2]]
    return [limits.longest, *(fit for fit in fits if fit < limits.longest and limits.capacity(fit))]


def natural(demands: Sequence[Demand], every: Sequence[Demand], limits: AdmissionLimits) -> Iterator[Grid]:
    """The grids of one set: batches as long as the tightest TPOT that decodes by then."""
    for longest in lengths(every, limits):
        yield lay([(d.due, d.tpot) for d in demands], longest, limits.capacity)


def grids(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> list[Grid]:
    """Those of every choice of the first new request of each TPOT, or of none."""
    tpots = sorted({d.tpot for d in new})
    firsts = [[*sorted({d.due for d in new if d.tpot == tpot}), inf] for tpot in tpots]
    return [
        lay([*((d.due, d.tpot) for d in forced), *zip(dues, tpots, strict=True)], longest, limits.capacity)
        for longest in lengths([*forced, *new], limits)
        for dues in product(*firsts)
    ]
