"""Whom to admit (SLOs-Serve, §3.2.1): the set of new requests of the largest value that leaves everybody in time.

A dynamic programme over the new requests in order of deadline, on one grid of batches. A state is how many were
accepted of each class, a TPOT with a value; of two sets with the same counts the one with the larger prefill budget
is as good for all that follows, unless it takes more memory: per state the Pareto front of budget and memory is kept.
Counts by class give the value, so no front over values is needed. Grids are tried one after the other: the tightest
TPOT admitted decides how long batches are, and a deadline may fall just before a batch's end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice, product
from math import ceil, inf, prod
from operator import mul
from typing import NamedTuple

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
    most = ceiling(new, terms.memory, terms.seats)
    demand = Demand(forced)
    tries: list[_Try] = []
    best: tuple[Admitted, int] | None = None
    for n, grid in enumerate(grids(demand, new, terms)):
        able, after = alone(grid, new, terms.memory)
        tries.append(_Try(n, grid, able, after, sum([new[i].value for i in able])))
        if tries[-1].bound >= most - EPS:
            best = _better(best, tries.pop(), demand, new, terms)
            if best is not None and best[0].value >= most - EPS:
                return best[0]
    for each in sorted(tries, key=lambda each: -each.bound):
        best = _better(best, each, demand, new, terms)
    return best[0] if best is not None else None


class _Try(NamedTuple):
    """The n-th grid; who could be in time there alone, each one's last batch, and what they are worth together."""

    n: int
    grid: Grid
    able: Sequence[int]
    after: Floats
    bound: float


def _better(
    best: tuple[Admitted, int] | None, one: _Try, demand: Demand, new: Sequence[Job], terms: Terms
) -> tuple[Admitted, int] | None:
    """The best set so far, or the one of this grid: of equal ones that of the first grid. It is looked for only where
    it could be better."""
    value, n = (best[0].value, best[1]) if best is not None else (-inf, inf)
    if one.bound <= value + (EPS if n < one.n else -EPS):
        return best
    line = Line(one.grid, demand)
    if not line.holds:
        return best
    accepted = choose(line, new, one.able, one.after, terms.memory, terms.seats)
    own = sum([new[i].value for i in accepted])
    if own <= value + (EPS if n < one.n else -EPS):
        return best
    return Admitted(accepted, one.grid, own), one.n


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
    """The grids to try, each once: for each length of the first batches, each choice of the first request admitted of
    each TPOT that would shorten batches. All but where those are more than `GRIDS`: then its first request or none. In
    the end with a short batch first, where one of the new is due before any other would have ended."""
    known: set[Grid] = set()
    due = np.array([j.due for j in new])
    assert (due < inf).all(), "every new request has a deadline, if one of ours"
    for longest in lengths(forced, new, terms):
        yield from _laid(forced, new, due, longest, terms, known)
    for lead in leads(forced, new, terms):
        yield from _laid(forced, new, due, terms.longest, terms, known, lead)


def _laid(
    forced: Demand,
    new: Sequence[Job],
    due: Floats,
    longest: float,
    terms: Terms,
    known: set[Grid],
    lead: Phase | None = None,
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
        grid = lay([*decodes, *added], longest, terms.capacity, lead) if added else plain
        if grid not in known:
            known.add(grid)
            yield grid


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
    early = forced.due[(forced.tokens > 1) | (forced.due < forced.tpot)]
    fresh = [j.due for j in new if j.due > 0.0 and (j.tokens > 1 or j.due < j.tpot)]
    soon = heapq.merge(early[early > 0.0].tolist(), sorted(fresh))
    fits = [due / max(1, ceil(due / terms.longest - CLOSE)) for due, _ in islice(groupby(soon), ALIGNED)]
    return [terms.longest, *(fit for fit in fits if fit < terms.longest and terms.capacity(fit))]


def alone(grid: Grid, new: Sequence[Job], memory: int) -> tuple[list[int], Floats]:
    """Who could be in time if nobody else were there, in order of deadline, and the batch that is each one's last."""
    after = grid.index(np.array([j.due for j in new]))
    able = [
        i
        for i, (job, k) in enumerate(zip(new, after.tolist(), strict=True))
        if 1.0 <= k < inf and grid.seconds_after(k) <= job.tpot * (1.0 + CLOSE) and job.memory <= memory
    ]
    able.sort(key=after.__getitem__)
    return able, after[able]


def choose(
    line: Line, new: Sequence[Job], able: Sequence[int], after: Floats, memory: int, seats: int
) -> tuple[int, ...]:
    """Indices of the set of largest value; of these, the one that leaves the largest budget."""
    if not able:
        return ()
    asked = _Asked(line, [new[i] for i in able], after)
    if asked.all_fit(memory, seats):
        return tuple(able)
    scarce = sum([j.memory for j in asked.jobs]) > memory
    table = _Fronts(asked, seats, memory) if scarce else _Counts(asked, seats)
    for turn in range(len(able)):
        table.decide(turn)
        between = slice(*asked.between[turn : turn + 2])
        if between.start < between.stop:
            table.keep(line.room[between], asked.ends_between[between])
    return tuple(able[turn] for turn in table.best())


class _Asked:
    """Those who could be in time alone, in order of deadline, as columns. owed: each demands that + t / TPOT by time t.
    between: where in `line.at` those deadlines of the forced begin that are no earlier than each one's. A state has a
    number: how many were accepted of each class (seconds a token, value), as digits; step: what each adds to it."""

    def __init__(self, line: Line, jobs: Sequence[Job], after: Floats) -> None:
        self.jobs = jobs
        self.line = line
        grid = line.grid
        self.ends, self.room = grid.ends(after), line.left(after)
        self.rate = np.array([j.rate for j in jobs])
        fringes = {tpot: grid.fringe(tpot) for tpot in {j.tpot for j in jobs}}
        self.owed = np.array([j.tokens + fringes[j.tpot] * j.verified for j in jobs]) - self.rate * self.ends
        self.between = [*line.at.searchsorted(after, side="left").tolist(), len(line.at)]
        self.ends_between = grid.ends(line.at)
        self._after = after
        self.classes = Counter((j.tpot / j.verified, j.value) for j in jobs)
        radix = [1, *accumulate([n + 1 for n in self.classes.values()], mul)]
        self.states = radix.pop()
        place = dict(zip(self.classes, radix, strict=True))
        self.step = [place[j.tpot / j.verified, j.value] for j in jobs]

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


class _Counts:
    """The programme where memory does not matter: for each state the least `owed`; with its rate, what is demanded."""

    def __init__(self, asked: _Asked, seats: int) -> None:
        self._asked = asked
        self._rate, self._value, count = np.zeros((3, asked.states))
        number = np.arange(asked.states)
        for (each, value), most in asked.classes.items():
            number, digit = np.divmod(number, most + 1)
            self._rate += digit / each
            self._value += digit * value
            count += digit
        self._able = (self._rate <= asked.line.slope + EPS) & (count <= seats)
        self._owed = np.full(asked.states, inf)
        self._owed[0] = 0.0
        self._accepted: list[NDArray[np.bool_]] = []  # by turn, of the states from `step` on

    def decide(self, turn: int) -> None:
        """Each state as it is, or with this request where it fits and owes less: by its deadline, in the long run."""
        asked, step = self._asked, self._asked.step[turn]
        owed = self._owed[:-step] + asked.owed[turn]
        fits = owed + self._rate[step:] * asked.ends[turn] <= asked.room[turn] + EPS
        fits &= self._able[step:]
        fits &= owed < self._owed[step:]
        np.copyto(self._owed[step:], owed, where=fits)
        self._accepted.append(fits)

    def keep(self, room: Floats, ends: Floats) -> None:
        """Only the states that leave the forced in time at these deadlines of theirs."""
        demand = self._owed[:, None] + self._rate[:, None] * ends
        self._owed[(demand > room + EPS).any(axis=1)] = inf

    def best(self) -> list[int]:
        """The turns in which it was accepted, of the best state at the end."""
        value = np.where(self._owed < inf, self._value, -inf)
        state = int(np.lexsort((self._owed, -value))[0])
        turns = []
        for turn in range(len(self._accepted) - 1, -1, -1):
            before = state - self._asked.step[turn]
            if before >= 0 and self._accepted[turn][before]:
                state = before
                turns.append(turn)
        return turns[::-1]


KEY, OWED, RATE, VALUE, COUNT, USED = range(6)


class _Fronts:
    """The programme where memory is scarce. The states are columns of an array: OWED + RATE · t is what the accepted
    demand by time t, USED their memory."""

    def __init__(self, asked: _Asked, seats: int, memory: int) -> None:
        self._asked = asked
        self._seats = seats
        self._memory = memory
        self._states: Floats = np.zeros((6, 1))
        self._from: list[tuple[Ints, int]] = []  # of each state after a decision: that before, accepted if >= the int

    def decide(self, turn: int) -> None:
        """Each state without this request, and with it where it fits: by its deadline, in memory, in the long run."""
        asked, states = self._asked, self._states
        job, end, slope = asked.jobs[turn], asked.ends[turn], asked.line.slope
        delta = (asked.step[turn], asked.owed[turn], job.rate, job.value, 1.0, job.memory)
        grown = states + np.array(delta)[:, None]
        fits = grown[OWED] + grown[RATE] * end <= asked.room[turn] + EPS
        fits &= (grown[RATE] <= slope + EPS) & (grown[COUNT] <= self._seats) & (grown[USED] <= self._memory)
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
