"""Whom to admit (SLOs-Serve, §3.2.1): the set of new requests of the largest value that leaves everybody in time.

A dynamic programme over the new requests in order of deadline, on one grid of batches. A state is how many were
accepted of each class, a TPOT with a value; of two sets with the same counts the one with the larger prefill budget
is as good for all that follows, unless it takes more memory: per state the Pareto front of budget and memory is kept.
Counts by class give the value, so no front over values is needed. Grids are tried one after the other: the tightest
TPOT admitted decides how long batches are, and a deadline may fall just before a batch's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, prod

import numpy as np
from numpy.typing import NDArray

from rubato.policies.slos_serve.budget import CLOSE, EPS, Demand, Floats, Grid, Job, Line, Phase, lay

GRIDS = 64  # tried at most for one length of the first batches
ALIGNED = 2  # deadlines that the first batches are fitted to, the earliest ones
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Terms:
    """What admission has to work with. longest: seconds of a batch while no TPOT is tighter. capacity: tokens of a
    batch of so many seconds; beside: of one in which no more than so many decode (None: nobody knows). memory, seats:
    KV blocks, and places in a batch, that the forced leave."""

    longest: float
    capacity: Callable[[float], int]
    memory: int
    seats: int
    beside: Callable[[float, int], float] | None = None


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
    demand = Demand(forced)
    for grid in grids(demand, new, terms):
        line = Line(grid, demand)
        if not line.holds:
            continue
        accepted = choose(line, new, terms.memory, terms.seats, best.value if best is not None else -inf)
        value = sum([new[i].value for i in accepted])
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


def grids(forced: Demand, new: Sequence[Job], terms: Terms) -> Iterator[Grid]:
    """The grids to try: for each length of the first batches, each choice of the first request admitted of each TPOT
    that would shorten batches. All of them but where they are more than `GRIDS`: then its first request or none. In the
    end with a short batch first, where one of the new is due before any other would have ended."""
    due = np.array([j.due for j in new])
    assert (due < inf).all(), "every new request has a deadline, if one of ours"
    for longest in lengths(forced, new, terms):
        yield from _laid(forced, new, due, longest, terms)
    for lead in leads(forced, new, terms):
        yield from _laid(forced, new, due, terms.longest, terms, lead)


def _laid(
    forced: Demand, new: Sequence[Job], due: Floats, longest: float, terms: Terms, lead: Phase | None = None
) -> Iterator[Grid]:
    decodes = forced.first()
    plain = lay(decodes, longest, terms.capacity, lead)
    after = plain.index(due).tolist()
    shorter = sorted({j.tpot for j, k in zip(new, after, strict=True) if j.tpot < plain.seconds_after(k)})
    options: list[list[float | None]] = [[*sorted({j.due for j in new if j.tpot == tpot}), None] for tpot in shorter]
    if prod(map(len, options)) > GRIDS:
        options = [[o[0], None] for o in options]
    for dues in product(*options):
        added = [(due, tpot) for due, tpot in zip(dues, shorter, strict=True) if due is not None]
        yield lay([*decodes, *added], longest, terms.capacity, lead) if added else plain


def leads(forced: Demand, new: Sequence[Job], terms: Terms) -> list[Phase]:
    """One short batch each, until one of the first prompts is due: the decodes due before the batch after it ends, and
    what fits beside those. All others, who are ahead, wait for it; a batch with all of them would last too long."""
    if terms.beside is None:
        return []
    made = []
    for end in sorted({j.due for j in new if 0.0 < j.due < terms.longest})[:ALIGNED]:
        if (forced.tpot[forced.due < end] < end).any():  # two of its tokens would be due
            continue
        if tokens := terms.beside(end, int((forced.due < end + terms.longest).sum())):
            made.append(Phase(1, end, tokens))
    return made


def lengths(forced: Demand, new: Sequence[Job], terms: Terms) -> list[float]:
    """The longest, and what fits one of the first deadlines without a rest, of a prefill or of a decode that is due
    before its TPOT is over: a short prompt is due before a long batch would have ended."""
    f = forced
    early = f.due[((f.tokens > 1) | (f.due < f.tpot)) & ~f.late]
    dues = {*early.tolist(), *(j.due for j in new if (j.tokens > 1 or j.due < j.tpot) and j.due > 0.0)}
    fits = [due / max(1, ceil(due / terms.longest - CLOSE)) for due in sorted(dues)[:ALIGNED]]
    return [terms.longest, *(fit for fit in fits if fit < terms.longest and terms.capacity(fit))]


def choose(line: Line, new: Sequence[Job], memory: int, seats: int, beaten: float = -inf) -> tuple[int, ...]:
    """Indices of the set of largest value; of these, the one that leaves the largest budget. beaten: a value that a set
    has on another grid; none where there is no larger one here."""
    grid = line.grid
    after = grid.index(np.array([j.due for j in new], dtype=np.float64))
    able = [
        i
        for i, (job, k) in enumerate(zip(new, after.tolist(), strict=True))
        if 1.0 <= k < inf and grid.seconds_after(k) <= job.tpot * (1.0 + CLOSE) and job.memory <= memory
    ]
    if not able or sum([new[i].value for i in able]) <= beaten + EPS:
        return ()
    able.sort(key=after.__getitem__)
    asked = _Asked(line, [new[i] for i in able], after[able])
    if asked.all_fit(memory, seats):
        return tuple(able)
    table = _Table(asked.jobs, memory)
    for turn, job in enumerate(asked.jobs):
        table.decide(job, asked.owed[turn], asked.ends[turn], asked.room[turn], line.slope, seats)
        between = slice(*asked.between[turn : turn + 2])
        if between.start < between.stop:
            table.keep(line.room[between], asked.ends_between[between])
    return tuple(able[turn] for turn in table.best())


class _Asked:
    """Those who could be in time alone, in order of deadline, as columns. owed: each demands that + t / TPOT by time t.
    between: where in `line.at` those deadlines of the forced begin that are no earlier than each one's."""

    def __init__(self, line: Line, jobs: Sequence[Job], after: Floats) -> None:
        self.jobs = jobs
        self.line = line
        grid = line.grid
        self.ends, self.room = grid.ends(after), line.left(after)
        self.rate = 1.0 / np.array([j.tpot for j in jobs])
        fringes = {tpot: grid.fringe(tpot) for tpot in {j.tpot for j in jobs}}
        self.owed = np.array([j.tokens + fringes[j.tpot] for j in jobs]) - self.rate * self.ends
        self.between = [*line.at.searchsorted(after, side="left").tolist(), len(line.at)]
        self.ends_between = grid.ends(line.at)
        self._after = after

    def all_fit(self, memory: int, seats: int) -> bool:
        """Whether there is room for all of them: then there is nothing to choose."""
        if len(self.jobs) > seats or sum([j.memory for j in self.jobs]) > memory:
            return False
        rates, owed = self.rate.cumsum(), self.owed.cumsum()
        if rates[-1] > self.line.slope + EPS or (owed + rates * self.ends > self.room + EPS).any():
            return False
        later = slice(self.between[0], None)
        n = self._after.searchsorted(self.line.at[later], side="right") - 1
        return bool((owed[n] + rates[n] * self.ends_between[later] <= self.line.room[later] + EPS).all())


KEY, OWED, RATE, VALUE, COUNT, USED = range(6)


class _Table:
    """The states: columns of an array. OWED + RATE · t is what the accepted demand by time t, USED their memory."""

    def __init__(self, jobs: Sequence[Job], memory: int) -> None:
        classes = Counter((j.tpot, j.value) for j in jobs)
        self._step: dict[tuple[float, float], int] = {}
        radix = 1
        for each, count in classes.items():
            self._step[each] = radix
            radix *= count + 1
        self._memory = memory
        self._scarce = sum([j.memory for j in jobs]) > memory
        self._states: Floats = np.zeros((6, 1))
        self._from: list[tuple[Ints, int]] = []  # of each state after a decision: that before, accepted if >= the int

    def decide(self, job: Job, owed: float, end: float, room: float, slope: float, seats: int) -> None:
        """Each state without this request, and with it where it fits: by its deadline, in memory, in the long run."""
        step = self._step[job.tpot, job.value]
        states = self._states
        used = job.memory if self._scarce else 0  # else who comes first is taken, not who is smaller
        grown = states + np.array([[step], [owed], [1.0 / job.tpot], [job.value], [1.0], [used]])
        fits = (grown[OWED] + grown[RATE] * end <= room + EPS) & (grown[RATE] <= slope + EPS) & (grown[COUNT] <= seats)
        if self._scarce:
            fits &= grown[USED] <= self._memory
        rows = fits.nonzero()[0]
        before = states.shape[1]
        self._from.append((np.concatenate((np.arange(before), rows + before)), before))  # + before marks: accepted
        if len(rows):
            self._states = np.concatenate((states, grown[:, rows]), axis=1)
            self._restrict(self._undominated())

    def _undominated(self) -> Ints:
        """Per state, the columns that no other beats in both budget and memory."""
        keys, owed, used = self._states[KEY], self._states[OWED], self._states[USED]
        order = np.lexsort((used, owed, keys))
        key = keys[order]
        first = np.ones(len(key), dtype=bool)
        np.not_equal(key[1:], key[:-1], out=first[1:])
        if not self._scarce:
            return order[first]
        # the least memory so far in its state: states further on are shifted below all before
        shifted = used[order] - (self._memory + 1) * first.cumsum()
        least = np.minimum.accumulate(shifted)
        first[1:] |= shifted[1:] < least[:-1]
        return order[first]

    def keep(self, room: Floats, ends: Floats) -> None:
        """Only the states that leave the forced in time at these deadlines of theirs."""
        demand = self._states[OWED][:, None] + self._states[RATE][:, None] * ends
        fits = (demand <= room + EPS).all(axis=1)
        if not fits.all():
            self._restrict(fits.nonzero()[0])

    def _restrict(self, columns: Ints) -> None:
        source, before = self._from[-1]
        self._from[-1] = (source[columns], before)
        self._states = self._states[:, columns]

    def best(self) -> list[int]:
        """The turns in which it was accepted, of the best state at the end."""
        row = int(np.lexsort((self._states[KEY], self._states[OWED], -self._states[VALUE]))[0])
        turns = []
        for turn in range(len(self._from) - 1, -1, -1):
            source, before = self._from[turn]
            row = int(source[row])
            if row >= before:
                row -= before
                turns.append(turn)
        return turns[::-1]
