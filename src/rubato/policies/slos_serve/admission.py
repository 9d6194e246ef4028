"""Whom to admit (SLOs-Serve, §3.2.1): the set of new requests of the largest value that leaves everybody in time.

A dynamic programme over the new requests in order of deadline, on one grid of batches. A state is how many were
accepted of each class, a TPOT with a value; of two sets with the same counts the one with the larger prefill budget
is as good for all that follows, unless it takes more memory: per state the Pareto front of budget and memory is kept.
Counts by class give the value, so no front over values is needed. Grids are tried one after the other: the tightest
TPOT admitted decides how long batches are, and a deadline may fall just before a batch's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from rubato.policies.slos_serve.budget import CLOSE, EPS, Floats, Grid, Job, Line, lay

GRIDS = 64  # tried at most for one length of the first batches
ALIGNED = 2  # deadlines that the first batches are fitted to, the earliest ones
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Terms:
    """What admission has to work with. longest: seconds of a batch while no TPOT is tighter. capacity: tokens of a
    batch of so many seconds. memory, seats: KV blocks, and places in a batch, that the forced leave."""

    longest: float
    capacity: Callable[[float], int]
    memory: int
    seats: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """accepted: indices into the new. grid: the one on which they and the forced are all in time."""

    accepted: tuple[int, ...]
    grid: Grid
    value: float


def admit(forced: Sequence[Job], new: Sequence[Job], terms: Terms) -> Admitted | None:
    """The best set of `new` to add to `forced`. None: not even the forced are in time on any of the grids.

    Equal deadlines are decided in the order given.
    """
    best: Admitted | None = None
    most = ceiling(new, terms.memory, terms.seats)
    for grid in grids(forced, new, terms):
        line = Line(grid, forced)
        if not line.holds:
            continue
        accepted = choose(line, new, terms.memory, terms.seats)
        value = sum(new[i].value for i in accepted)
        if best is None or value > best.value + EPS:
            best = Admitted(accepted, grid, value)
        if best.value >= most - EPS:
            break
    return best


def admit_first(forced: Sequence[Job], new: Sequence[Job], terms: Terms, others: Terms, most: float) -> Admitted | None:
    """As `admit`, but those worth `most` go first, and the rest only where `others` hold all of them: what is left
    between the two terms is for those worth most that have not come yet."""
    top = [i for i, j in enumerate(new) if j.value >= most]
    rest = [i for i, j in enumerate(new) if j.value < most]
    first = admit(forced, [new[i] for i in top], terms)
    if first is None:
        return None
    accepted = [top[i] for i in first.accepted]
    taken = [new[i] for i in accepted]
    left = replace(others, memory=others.memory - sum(j.memory for j in taken), seats=others.seats - len(taken))
    second = admit([*forced, *taken], [new[i] for i in rest], left)
    if second is None:
        return replace(first, accepted=tuple(accepted))
    return Admitted((*accepted, *(rest[i] for i in second.accepted)), second.grid, first.value + second.value)


def ceiling(new: Sequence[Job], memory: int, seats: int) -> float:
    """No set is worth more, whatever the grid: as many as memory and places hold, those worth most a block first, the
    last one in part where values differ."""
    order = sorted(new, key=lambda j: j.memory / j.value)
    value = 0.0
    for job in order[:seats]:
        if job.memory > memory:
            same = all(j.value == job.value for j in new)
            return value if same else value + job.value * memory / job.memory
        memory -= job.memory
        value += job.value
    return value if len(new) <= seats else sum(sorted((j.value for j in new), reverse=True)[:seats])


def grids(forced: Sequence[Job], new: Sequence[Job], terms: Terms) -> Iterator[Grid]:
    """The grids to try: for each length of the first batches, each choice of the first request admitted of each TPOT
    that would shorten batches. All of them but where they are more than `GRIDS`: then its first request or none."""
    decodes = [(j.due, j.tpot) for j in forced if j.due < inf]
    assert all(j.due < inf for j in new), "every new request has a deadline, if one of ours"
    for longest in lengths([*forced, *new], terms):
        plain = lay(decodes, longest, terms.capacity)
        after = plain.index(np.array([j.due for j in new]))
        shorter = sorted({j.tpot for j, k in zip(new, after, strict=True) if j.tpot < plain.seconds_after(float(k))})
        options: list[list[float | None]] = [
            [*sorted({j.due for j in new if j.tpot == tpot}), None] for tpot in shorter
        ]
        if np.prod([len(o) for o in options]) > GRIDS:
            options = [[o[0], None] for o in options]
        for dues in product(*options):
            added = [(due, tpot) for due, tpot in zip(dues, shorter, strict=True) if due is not None]
            yield lay([*decodes, *added], longest, terms.capacity) if added else plain


def lengths(jobs: Sequence[Job], terms: Terms) -> list[float]:
    """The longest, and what fits one of the first deadlines without a rest, of a prefill or of a decode that is due
    before its TPOT is over: a short prompt is due before a long batch would have ended."""
    dues = sorted({j.due for j in jobs if (j.tokens > 1 or j.due < j.tpot) and 0.0 < j.due < inf})[:ALIGNED]
    fits = [due / max(1, ceil(due / terms.longest - CLOSE)) for due in dues]
    return [terms.longest, *(fit for fit in fits if fit < terms.longest and terms.capacity(fit))]


def choose(line: Line, new: Sequence[Job], memory: int, seats: int) -> tuple[int, ...]:
    """Indices of the set of largest value; of these, the one that leaves the largest budget."""
    grid = line.grid
    after = grid.index(np.array([j.due for j in new], dtype=np.float64))
    able = [
        i
        for i, (job, k) in enumerate(zip(new, after, strict=True))
        if 1.0 <= k < inf and grid.seconds_after(float(k)) <= job.tpot * (1.0 + CLOSE) and job.memory <= memory
    ]
    able.sort(key=lambda i: float(after[i]))
    if not able:
        return ()
    ends, room = grid.ends(after), line.left(after)
    table = _Table(new, able, memory)
    for turn, i in enumerate(able):
        k = float(after[i])
        table.decide(new[i], grid.fringe(new[i].tpot), float(ends[i]), float(room[i]), line.slope, seats)
        until = float(after[able[turn + 1]]) if turn + 1 < len(able) else inf
        between = slice(*np.searchsorted(line.at, [k, until], side="left"))
        if between.start < between.stop:
            table.keep(line.room[between], grid.ends(line.at[between]))
    return tuple(able[turn] for turn in table.best())


class _Table:
    """The states: rows of arrays. `owed` + rate · t is what the accepted demand by time t."""

    def __init__(self, new: Sequence[Job], able: Sequence[int], memory: int) -> None:
        classes: dict[tuple[float, float], int] = {}
        for i in able:
            classes[new[i].tpot, new[i].value] = classes.get((new[i].tpot, new[i].value), 0) + 1
        self._step: dict[tuple[float, float], int] = {}
        radix = 1
        for each, count in classes.items():
            self._step[each] = radix
            radix *= count + 1
        self._memory = memory
        self._scarce = sum(new[i].memory for i in able) > memory
        self._key: Ints = np.zeros(1, np.int64)
        self._owed: Floats = np.zeros(1)
        self._rate: Floats = np.zeros(1)
        self._value: Floats = np.zeros(1)
        self._count: Ints = np.zeros(1, np.int64)
        self._used: Ints = np.zeros(1, np.int64)
        self._from: list[tuple[Ints, int]] = []  # of each row after a decision: the row before, accepted if >= the int

    def decide(self, job: Job, fringe: float, end: float, room: float, slope: float, seats: int) -> None:
        """Each state without this request, and with it where it fits: by its deadline, in memory, in the long run."""
        rate = 1.0 / job.tpot
        owed = self._owed + (job.tokens + fringe - rate * end)
        rates = self._rate + rate
        fits = (owed + rates * end <= room + EPS) & (rates <= slope + EPS) & (self._count < seats)
        used = self._used
        if self._scarce:
            used = used + job.memory
            fits &= used <= self._memory
        rows = np.flatnonzero(fits)
        before = len(self._key)
        step = self._step[job.tpot, job.value]
        self._key = np.concatenate((self._key, self._key[rows] + step))
        self._owed = np.concatenate((self._owed, owed[rows]))
        self._rate = np.concatenate((self._rate, rates[rows]))
        self._value = np.concatenate((self._value, self._value[rows] + job.value))
        self._count = np.concatenate((self._count, self._count[rows] + 1))
        self._used = np.concatenate((self._used, used[rows]))
        source: Ints = np.concatenate((np.arange(before), rows + before))  # + before marks: accepted
        self._from.append((source, before))
        if len(rows):
            self._restrict(self._undominated())

    def _undominated(self) -> Ints:
        """Per state, the rows that no other beats in both budget and memory."""
        order = np.lexsort((self._used, self._owed, self._key))
        key = self._key[order]
        first = np.concatenate(([True], key[1:] != key[:-1]))
        if not self._scarce:
            return order[first]
        # the least memory so far in its state: states further on are shifted below all before
        shifted = self._used[order] - (self._memory + 1) * np.cumsum(first)
        least = np.minimum.accumulate(shifted)
        return order[first | np.concatenate(([True], shifted[1:] < least[:-1]))]

    def keep(self, room: Floats, ends: Floats) -> None:
        """Only the states that leave the forced in time at these deadlines of theirs."""
        demand = self._owed[:, None] + self._rate[:, None] * ends[None, :]
        self._restrict(np.flatnonzero((demand <= room[None, :] + EPS).all(axis=1)))

    def _restrict(self, rows: Ints) -> None:
        source, before = self._from[-1]
        self._from[-1] = (source[rows], before)
        self._key, self._owed, self._rate = self._key[rows], self._owed[rows], self._rate[rows]
        self._value, self._count, self._used = self._value[rows], self._count[rows], self._used[rows]

    def best(self) -> list[int]:
        """The turns in which it was accepted, of the best state at the end."""
        row = int(np.lexsort((self._key, self._owed, -self._value))[0])
        turns = []
        for turn in range(len(self._from) - 1, -1, -1):
            source, before = self._from[turn]
            row = int(source[row])
            if row >= before:
                row -= before
                turns.append(turn)
        return turns[::-1]
