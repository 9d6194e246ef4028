"""PB*, autoregressive (SLOs-Serve, Algorithm 2): what a grid of batches brings by each deadline, after every decode.

Batches lie end to end, each as long as the tightest TPOT among those that decode by then. One counts for the first
deadline at or after its end, so a deadline d is met by the first `index(d)` batches and what remains of the time goes
on into the next interval. A request demands its pending tokens by its next due token (one token of a decode: there is
no difference), then one a TPOT.

Served earliest deadline first, one token a batch for each decode and prefill in any chunks, everybody is in time if and
only if for each k what is due within k batches is no more than these k hold. Only if is plain. If: take the first k
that fails and the last batch b < k not full of tokens due by k. All prefill due by k was done with it, and each decode
that still owed a token due by k got one in it; so fewer decodes than a batch holds are left, each has a place in all of
b+1..k, and no more tokens due in there than that, since two of its tokens are never due by the same batch. It holds
again on the grid that starts when the first batch has ended, early or not: no deadline loses a batch by that. The bound
is kept by `Line` with decodes as straight lines, never below their stairs, so that counts suffice to add them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CLOSE = 1e-9  # of a batch: a deadline at a batch's very end is met by it
EPS = 1e-6  # tokens: float rounding


class Job(NamedTuple):
    """What one request demands: `tokens` by `due` (seconds from where the grid begins), from then on an entry of
    `verified` every `tpot` seconds (inf: none), and `memory` KV blocks. value: of attaining it. accepts: probability
    that a token drafted for it is right. Tokens are those of decodes, drafted or not: of a prefill, the last counts as
    one, the others as what they cost beside it (`demand.lightness`)."""

    id: str
    due: float
    tokens: float
    tpot: float
    memory: int = 0
    value: float = 1.0
    accepts: float = 0.0
    verified: int = 1

    @property
    def rate(self) -> float:
        """Tokens a second that its decode takes."""
        return self.verified / self.tpot


@dataclass(frozen=True, slots=True)
class Phase:
    """`count` batches (inf: for ever) of at most `seconds` and `tokens`."""

    count: float
    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Batches laid end to end: phases, each of shorter batches than the one before, the last without end. Before the
    longest there may be one short batch, for a prompt that is due at its end (`lay`, lead)."""

    phases: tuple[Phase, ...]

    @property
    def leads(self) -> bool:
        """Whether the first batch is such a short one."""
        return len(self.phases) > 1 and self.phases[0].seconds < self.phases[1].seconds

    def index(self, due: Floats) -> Floats:
        """How many batches have ended by then."""
        ended, begin = np.zeros(len(due)), 0.0
        for p in self.phases:
            ended += _within(np.floor((due - begin) / p.seconds + CLOSE), p.count)
            begin += p.count * p.seconds
        return ended

    def ends(self, k: Floats) -> Floats:
        """When the first k batches have ended."""
        return self._sum(k, [p.seconds for p in self.phases])

    def supply(self, k: Floats) -> Floats:
        """The tokens of the first k batches."""
        return self._sum(k, [float(p.tokens) for p in self.phases])

    def _sum(self, k: Floats, each: Sequence[float]) -> Floats:
        total, begin = np.zeros(len(k)), 0.0
        for p, amount in zip(self.phases, each, strict=True):
            total += _within(k - begin, p.count) * amount
            begin += p.count
        return total

    def seconds_after(self, k: float) -> float:
        """How long the batch after the first k is, and none that follows is longer."""
        for p in self.phases:
            if k < p.count:
                return p.seconds if p is not self.phases[0] else max(q.seconds for q in self.phases)
            k -= p.count
        raise AssertionError("the last phase has no end")

    @property
    def throughput(self) -> float:
        """Tokens a second in the long run."""
        return self.phases[-1].tokens / self.phases[-1].seconds

    def fringe(self, tpot: float) -> float:
        """How far a decode's stairs rise above the line of slope 1/tpot that begins at a due token, in tokens: nothing
        where batches divide the TPOT, and each other, else less than what it needs in a batch."""
        before = tpot
        for p in self.phases[self.leads :] if tpot < inf else ():  # nobody's stairs begin before a short batch's end
            if p.seconds > tpot * (1.0 + CLOSE):
                continue
            ratio = before / p.seconds
            if abs(ratio - round(ratio)) > 1e-6:
                return max(q.seconds for q in self.phases[self.leads :] if q.seconds <= tpot * (1.0 + CLOSE)) / tpot
            before = p.seconds
        return 0.0

    def step(self) -> Grid:
        """What remains after the first batch."""
        first, *rest = self.phases
        if first.count > 1:
            return Grid((Phase(first.count - 1, first.seconds, first.tokens), *rest))
        return Grid(tuple(rest))


def _within(count: Floats, most: float) -> Floats:
    """Clipped to [0, most], in place."""
    np.maximum(count, 0.0, out=count)
    return count if most == inf else np.minimum(count, most, out=count)


def lay(
    decodes: Iterable[tuple[float, float]], longest: float, capacity: Callable[[float], int], lead: Phase | None = None
) -> Grid:
    """The grid for requests with these (due, tpot): batches of at most `longest` seconds, and of each TPOT from the
    last batch on that has ended when its request is due. capacity: tokens of a batch that takes so many seconds. lead:
    one shorter batch before all others."""
    phases: list[Phase] = [] if lead is None else [lead]
    begin, seconds = 0.0 if lead is None else lead.seconds, longest
    for due, tpot in sorted(decodes):
        if tpot < seconds:
            count = max(0, floor((due - begin) / seconds + CLOSE))
            if count:
                phases.append(Phase(count, seconds, capacity(seconds)))
                begin += count * seconds
            seconds = tpot
    return Grid((*phases, Phase(inf, seconds, capacity(seconds))))


class Demand:
    """What jobs with a deadline demand, as columns in order of deadline: told once, held against many grids."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        rows = sorted([j for j in jobs if j.due < inf], key=itemgetter(1))  # by `due`
        _, due, tokens, tpot, *_, verified = zip(*rows, strict=True) if rows else ((),) * len(Job._fields)
        columns = (due, tokens, tpot, verified)
        self.due, self.tokens, self.tpot, self.verified = (np.fromiter(c, np.float64, len(rows)) for c in columns)
        self.rate = self.verified / self.tpot
        self.late = int(self.due.searchsorted(0.0, side="right"))  # so many of them
        self.tpots = set(tpot)

    def first(self) -> list[tuple[float, float]]:
        """(due, TPOT) of the first of each TPOT: all that shortens batches."""
        return [(float(self.due[self.tpot == tpot].min()), tpot) for tpot in self.tpots]


class Line:
    """What requests that are served anyway leave of a grid for others.

    at: the batches, ascending, by which something of theirs is due. room: tokens that are left by then. slope: tokens a
    second that are left in the long run.
    """

    def __init__(self, grid: Grid, demand: Demand) -> None:
        """Jobs due at 0 are late already: they are due with the first batch."""
        self.grid = grid
        tokens = demand.tokens
        for tpot in demand.tpots:
            if fringe := grid.fringe(tpot):
                tokens = np.where(demand.tpot == tpot, tokens + fringe * demand.verified, tokens)
        k = grid.index(demand.due)
        k[: demand.late] = k[demand.late :].min(initial=1.0)  # not after those due before any batch ends: none fits
        self._k = k
        self._rates = _summed(demand.rate)
        self._owed = _summed(tokens - demand.rate * grid.ends(k))
        last = np.ones(len(k), dtype=bool)  # of those due by the same batch
        np.not_equal(k[1:], k[:-1], out=last[:-1])
        self.at = k[last]
        self.room = self.left(self.at)
        self.slope = grid.throughput - float(self._rates[-1])

    def left(self, k: Floats) -> Floats:
        """Tokens left by the k-th batch's end: its PB* from now, when nobody is added. Negative: they do not fit."""
        n = self._k.searchsorted(k, side="right")
        return self.grid.supply(k) - self._owed[n] - self._rates[n] * self.grid.ends(k)

    @property
    def holds(self) -> bool:
        """Whether all of them are in time, for ever."""
        return self.slope >= -EPS and bool((self.room >= -EPS).all())


def _summed(values: Floats) -> Floats:
    """The sum of the first n of them, for each n from 0."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, out=sums[1:])
    return sums
