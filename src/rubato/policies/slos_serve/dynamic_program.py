"""What admission computes, in numbers alone, compiled (Numba): what grids leave, and the dynamic programme on them.

`token_budget` and `admission` are its interface, and say what it means; `grid_building` makes the grids. A compiled
function is kept on disk until its own file changes, whatever it calls: so neither file calls the other. Compiled when
first imported, some seconds, then loaded.

A grid is an array of rows (count, seconds, tokens), the last without end; those served anyway, `forced`, and the `new`
are rows (due, tokens, tpot, verified, memory, value), the forced in order of `due`, the new as given. Sums are taken in
the order of the rows.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.policy_kit.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Line = tuple[Floats, Floats, Floats, Floats, float]  # `demand_line`

CLOSE = 1e-9  # of a batch: a deadline at a batch's very end is met by it
EPS = 1e-6  # tokens: float rounding
COUNT, SECONDS, TOKENS = 0, 1, 2  # columns of a grid
DUE, PENDING, TPOT, VERIFIED, MEMORY, VALUE = 0, 1, 2, 3, 4, 5  # of the forced and the new
COLUMN, TABLE, TABLES = "float64[::1]", "float64[:,::1]", "float64[:,:,::1]"
OWED, RATE, KEY, MANY, WORTH, USED = 0, 1, 2, 3, 4, 5  # of a state, and what each of those asked adds to it
LAST = 6  # of a state: the last of `accepted` that it took
BY, LEFT = 6, 7  # of those asked


# --------------------------------------------------------------------------- one grid


@compiled()
def index(grid: Floats, due: float) -> float:
    """How many batches have ended by then."""
    ended, begin = 0.0, 0.0
    for p in range(len(grid)):
        count, seconds = grid[p, COUNT], grid[p, SECONDS]
        ended += min(max(np.floor((due - begin) / seconds + CLOSE), 0.0), count)
        begin += count * seconds
    return ended


@compiled()
def summed(grid: Floats, k: float, column: int) -> float:
    """A column's sum over the first k batches."""
    total, begin = 0.0, 0.0
    for p in range(len(grid)):
        total += min(max(k - begin, 0.0), grid[p, COUNT]) * grid[p, column]
        begin += grid[p, COUNT]
    return total


@compiled()
def seconds_after(grid: Floats, k: float) -> float:
    """How long the batch after the first k is, and none that follows is longer."""
    if k < grid[0, COUNT]:
        return float(max(grid[0, SECONDS], grid[min(1, len(grid) - 1), SECONDS]))  # the first may be a short one
    for p in range(len(grid)):
        if k < grid[p, COUNT]:
            return float(grid[p, SECONDS])
        k -= grid[p, COUNT]
    return float(grid[-1, SECONDS])


@compiled()
def rounding_allowance(grid: Floats, tpot: float) -> float:
    """How far a decode's stairs rise above the line of slope 1/tpot that begins at a due token, in tokens: nothing
    where batches divide the TPOT, and each other, else less than what it needs in a batch."""
    if tpot == inf:
        return 0.0
    begin = 1 if len(grid) > 1 and grid[0, SECONDS] < grid[1, SECONDS] else 0  # no stairs begin before its end
    before, longest = tpot, 0.0
    for p in range(begin, len(grid)):
        seconds = grid[p, SECONDS]
        if seconds > tpot * (1.0 + CLOSE):
            continue
        longest = max(longest, seconds)
        ratio = before / seconds
        if abs(ratio - np.round(ratio)) > 1e-6:
            return float(longest / tpot)
        before = seconds
    return 0.0


# --------------------------------------------------------------------------- what those served anyway leave of it


@compiled(f"Tuple(({COLUMN}, {COLUMN}, {COLUMN}, {COLUMN}, float64))({TABLE}, {TABLE})")
def demand_line(grid: Floats, forced: Floats) -> Line:
    """at: the batches, ascending, by which something of theirs is due. owed, rates: owed + rates · t is what those due
    by then demand by time t; the first, from 0 on, of none. room: tokens left by then. slope: tokens a second that are
    left in the long run. Those due at 0 are late already: they are due with the first batch."""
    count = len(forced)
    k = np.empty(count)
    first, late = 1.0, 0
    for i in range(count):
        k[i] = index(grid, forced[i, DUE])
        if forced[i, DUE] <= 0.0:
            late += 1
        else:
            first = min(first, k[i])
    for i in range(late):
        k[i] = first  # not after those due before any batch ends: none fits
    at, owed, rates, room = np.empty(count), np.zeros(count + 1), np.zeros(count + 1), np.empty(count)
    demand, rate, steps = 0.0, 0.0, 0
    known, stairs = 0.0, 0.0  # of the TPOT before
    for i in range(count):
        tpot, verified = forced[i, TPOT], forced[i, VERIFIED]
        if tpot != known:
            known, stairs = tpot, rounding_allowance(grid, tpot)
        own = verified / tpot
        demand += forced[i, PENDING] + stairs * verified - own * summed(grid, k[i], SECONDS)
        rate += own
        if i + 1 == count or k[i + 1] != k[i]:
            at[steps], owed[steps + 1], rates[steps + 1] = k[i], demand, rate
            room[steps] = summed(grid, k[i], TOKENS) - demand - rate * summed(grid, k[i], SECONDS)
            steps += 1
    slope = grid[-1, TOKENS] / grid[-1, SECONDS] - rate
    return at[:steps], owed[: steps + 1], rates[: steps + 1], room[:steps], slope


@compiled()
def holds(room: Floats, slope: float) -> bool:
    """Whether all of them are in time, for ever."""
    return bool(slope >= -EPS and np.all(room >= -EPS))


# --------------------------------------------------------------------------- which to admit


@compiled()
def able_alone(grid: Floats, new: Floats, memory: int) -> Ints:
    """Those that could be in time alone, in order of the batch that is each one's last."""
    last = np.full(len(new), inf)
    for i in range(len(new)):
        k = index(grid, new[i, DUE])
        if k >= 1.0 and new[i, MEMORY] <= memory and seconds_after(grid, k) <= new[i, TPOT] * (1.0 + CLOSE):
            last[i] = k
    return np.argsort(last, kind="mergesort")[: np.sum(last < inf)]


@compiled()
def all_fit(asked: Floats, between: Ints, room: Floats, ends: Floats, slope: float) -> bool:
    """Whether there is room for all of them: then there is nothing to choose."""
    owed, rate = 0.0, 0.0
    for n in range(len(asked)):
        owed += asked[n, OWED]
        rate += asked[n, RATE]
        if owed + rate * asked[n, BY] > asked[n, LEFT] + EPS:
            return False
        for j in range(between[n], between[n + 1]):
            if owed + rate * ends[j] > room[j] + EPS:
                return False
    return rate <= slope + EPS


@compiled()
def number_states(asked: Floats) -> None:
    """A state has a number, KEY: how many were accepted of each class (tokens a second, value), as digits. What each of
    those asked adds to it."""
    size = 1.0
    for n in range(len(asked)):
        members = 0
        for m in range(n, len(asked)):
            if asked[m, KEY] == 0.0 and asked[m, RATE] == asked[n, RATE] and asked[m, WORTH] == asked[n, WORTH]:
                asked[m, KEY] = size
                members += 1
        size *= members + 1


@compiled()
def state_order(rows: Floats, one: int, others: Floats, other: int) -> bool:
    for key in (KEY, OWED, USED):
        if rows[one, key] != others[other, key]:
            return bool(rows[one, key] < others[other, key])
    return False


@compiled()
def accept(
    asked: Floats, between: Ints, room: Floats, ends: Floats, slope: float, memory: int, seats: int
) -> list[int]:
    """The programme: for each state number those that no other beats in both budget and memory, in order of (KEY, OWED,
    USED). Which of those asking are in the best final state."""
    states, many = np.zeros((1, 7)), 1
    states[0, LAST] = -1.0
    accepted = [(-1, -1)][:0]  # (which of those asked, the one before)
    for n in range(len(asked)):
        grown, number = np.empty((many, 7)), 0
        for s in range(many):
            for c in range(LAST):
                grown[number, c] = states[s, c] + asked[n, c]
            grown[number, LAST] = states[s, LAST]
            number += (
                grown[number, OWED] + grown[number, RATE] * asked[n, BY] <= asked[n, LEFT] + EPS
                and grown[number, RATE] <= slope + EPS
                and grown[number, MANY] <= seats
                and grown[number, USED] <= memory
            )
        merged, kept = np.empty((many + number, 7)), 0
        s, g = 0, 0
        while s < many or g < number:
            takes = s == many or (g < number and state_order(grown, g, states, s))
            if takes:
                merged[kept] = grown[g]
                g += 1
            else:
                merged[kept] = states[s]
                s += 1
            # earlier states of equal counts owe no more: a state is kept if it takes less memory than the last one
            if kept and merged[kept - 1, KEY] == merged[kept, KEY] and merged[kept - 1, USED] <= merged[kept, USED]:
                continue
            in_time = True
            for j in range(between[n], between[n + 1]):  # the forced are in time at these deadlines of theirs
                in_time = in_time and merged[kept, OWED] + merged[kept, RATE] * ends[j] <= room[j] + EPS
            if in_time and takes:
                accepted.append((n, int(merged[kept, LAST])))
                merged[kept, LAST] = len(accepted) - 1
            kept += in_time
        states, many = merged, kept
    best = 0
    for s in range(1, many):
        if states[s, WORTH] > states[best, WORTH] or (
            states[s, WORTH] == states[best, WORTH] and states[s, OWED] < states[best, OWED]
        ):
            best = s
    last = int(states[best, LAST]) if many else -1
    taken = [0][:0]
    while last >= 0:
        n, last = accepted[last]
        taken.append(n)
    return taken


@compiled()
def best_subset(grid: Floats, line: Line, new: Floats, able: Ints, memory: int, seats: int) -> Ints:
    """Indices of the set of largest value; of these, the one that leaves the largest budget."""
    at, owed, rates, room, slope = line
    count = len(able)
    # each: accepted, it demands asked[OWED] + asked[RATE] * t by time t; by its own deadline there is asked[LEFT]
    asked = np.zeros((count, 8))
    between = np.empty(count + 1, dtype=np.int64)  # where in `at` deadlines begin that are no earlier than its own
    due = 0
    for n in range(count):
        i = able[n]
        k = index(grid, new[i, DUE])
        tpot, verified = new[i, TPOT], new[i, VERIFIED]
        asked[n, RATE], asked[n, BY] = verified / tpot, summed(grid, k, SECONDS)
        asked[n, OWED] = new[i, PENDING] + rounding_allowance(grid, tpot) * verified - asked[n, RATE] * asked[n, BY]
        while due < len(at) and at[due] < k:
            due += 1
        between[n] = due
        by = due + 1 if due < len(at) and at[due] == k else due
        asked[n, LEFT] = summed(grid, k, TOKENS) - owed[by] - rates[by] * asked[n, BY]
        asked[n, MANY], asked[n, WORTH], asked[n, USED] = 1.0, new[i, VALUE], new[i, MEMORY]
    between[count] = len(at)
    ends = np.empty(len(at))
    for j in range(len(at)):
        ends[j] = summed(grid, at[j], SECONDS)
    if np.sum(asked[:, USED]) <= memory:  # memory is no reason to prefer one
        if count <= seats and all_fit(asked, between, room, ends, slope):
            return able
        asked[:, USED] = 0.0
    number_states(asked)
    taken = accept(asked, between, room, ends, slope, memory, seats)
    chosen = np.empty(len(taken), dtype=np.int64)
    for n in range(len(taken)):
        chosen[n] = able[taken[n]]
    return chosen


@compiled(f"Tuple((int64, float64, int64[::1]))({TABLES}, int64[::1], {TABLE}, {TABLE}, int64, int64, float64)")
def best_set(
    grids: Floats, sizes: Ints, forced: Floats, new: Floats, memory: int, seats: int, most: float
) -> tuple[int, float, Ints]:
    """Which grid (-1: not even the forced are in time on any), what the best set is worth there, and which are in it.

    The grids that could hold most, each request taken alone, come first, and none is tried that cannot better what is
    found. most: no set is worth more. Of equal sets it is that of the first grid.
    """
    bounds = np.zeros(len(sizes))
    for g in range(len(sizes)):
        for i in able_alone(grids[g, : sizes[g]], new, memory):
            bounds[g] += new[i, VALUE]
        if bounds[g] >= most - EPS:
            bounds[g] = most
    grid_of, value, accepted = -1, -inf, np.empty(0, dtype=np.int64)
    for _ in range(len(sizes)):
        g = int(np.argmax(bounds))
        bound, bounds[g] = bounds[g], -inf
        least = value + (EPS if grid_of < g else -EPS)
        if bound <= least:
            continue
        grid = grids[g, : sizes[g]]
        line = demand_line(grid, forced)
        if not holds(line[3], line[4]):
            continue
        chosen = best_subset(grid, line, new, able_alone(grid, new, memory), memory, seats)
        worth = 0.0
        for i in chosen:
            worth += new[i, VALUE]
        if worth > least:
            grid_of, value, accepted = g, worth, chosen
        if value >= most - EPS:
            break
    return grid_of, value, accepted
