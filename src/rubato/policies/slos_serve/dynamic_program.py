"""What admission computes, in numbers alone: what a grid leaves, and the dynamic programme on it, compiled (Numba).

`admission` is its interface, and says what it means. Compiled when first imported, a second, then loaded.

A grid is an array of rows (count, seconds, tokens), the last without end; those served anyway, `forced`, and the `new`
are rows (due, tokens, tpot, verified, memory, value), the forced in order of `due`, the new as given.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.policy_kit.compiled import compiled

Floats = NDArray[np.float64]
Line = tuple[Floats, Floats, Floats, Floats, float]  # `demand_line`

BATCH_ROUNDING = 1e-9  # of a batch: a deadline at a batch's very end is met by it
ROUNDING_TOKENS = 1e-6  # tokens: float rounding
SECONDS, TOKENS = 1, 2  # columns of a grid
TABLE = "float64[:,::1]"


def index(grid: Floats, due: Floats) -> Floats:
    """How many batches have ended by then, by each."""
    ended, begin = np.zeros(len(due)), 0.0
    for count, seconds, _ in grid:
        ended += np.minimum(np.maximum(np.floor((due - begin) / seconds + BATCH_ROUNDING), 0.0), count)
        begin += count * seconds
    return ended


def summed(grid: Floats, k: Floats, column: int) -> Floats:
    """A column's sum over the first k batches."""
    total, begin = np.zeros(len(k)), 0.0
    for row in grid:
        total += np.minimum(np.maximum(k - begin, 0.0), row[0]) * row[column]
        begin += row[0]
    return total


def seconds_after(grid: Floats, k: Floats) -> Floats:
    """How long the batch after the first k is, and none that follows is longer."""
    lead = len(grid) > 1 and grid[0, SECONDS] < grid[1, SECONDS]  # the first may be a short one
    seconds = np.maximum(grid[:, SECONDS], grid[1, SECONDS] if lead else 0.0)
    after: Floats = seconds[np.searchsorted(grid[:, 0].cumsum(), k, side="right").clip(0, len(grid) - 1)]
    return after


def rounding_allowance(grid: Floats, tpots: Floats) -> Floats:
    """How far a decode's stairs rise above the line of slope 1/tpot that begins at a due token, in tokens: nothing
    where batches divide the TPOT, and each other, else less than what it needs in a batch."""
    lengths = grid[int(len(grid) > 1 and grid[0, SECONDS] < grid[1, SECONDS]) :, SECONDS].tolist()
    known = {inf: 0.0}  # no stairs begin before a short first batch's end
    for tpot in set(tpots.tolist()) - {inf}:
        shorter = [seconds for seconds in lengths if seconds <= tpot * (1.0 + BATCH_ROUNDING)]
        ratios = [before / seconds for before, seconds in zip([tpot, *shorter], shorter, strict=False)]
        known[tpot] = shorter[0] / tpot if any(abs(ratio - round(ratio)) > ROUNDING_TOKENS for ratio in ratios) else 0.0
    return np.array([known[tpot] for tpot in tpots.tolist()])


def demand_line(grid: Floats, forced: Floats) -> Line:
    """at: the batches, ascending, by which something of theirs is due. owed, rates: owed + rates · t is what those due
    by then demand by time t; the first, from 0 on, of none. room: tokens left by then. slope: tokens a second that are
    left in the long run. Those due at 0 are late already: they are due with the first batch."""
    due, pending, tpot, verified = forced.T[:4]
    k, rate = index(grid, due), verified / tpot
    k[due <= 0.0] = min(1.0, k[due > 0.0].min(initial=1.0))  # not after those due before any batch ends: none fits
    owed = (pending + rounding_allowance(grid, tpot) * verified - rate * summed(grid, k, SECONDS)).cumsum()
    last = np.ones(len(k), dtype=bool)
    last[:-1] = k[1:] != k[:-1]
    at, owed, rates = k[last], owed[last], rate.cumsum()[last]
    room = summed(grid, at, TOKENS) - owed - rates * summed(grid, at, SECONDS)
    slope = float(grid[-1, TOKENS] / grid[-1, SECONDS] - rate.sum())
    return at, np.concatenate(([0.0], owed)), np.concatenate(([0.0], rates)), room, slope


def best_subset(grid: Floats, forced: Floats, new: Floats, seats: int) -> list[int] | None:
    """Indices of the set of largest value that is in time beside the forced; of these sets, the one that leaves the
    largest budget. None: the forced are not in time on this grid."""
    at, owed, rates, room, slope = demand_line(grid, forced)
    if slope < -ROUNDING_TOKENS or np.any(room < -ROUNDING_TOKENS):
        return None
    k = index(grid, new[:, 0])
    able = np.flatnonzero((k >= 1.0) & (seconds_after(grid, k) <= new[:, 2] * (1.0 + BATCH_ROUNDING)))
    able = able[np.argsort(k[able], kind="stable")]
    k, (_, pending, tpot, verified, _, value) = k[able], new[able].T
    # each: accepted, it demands own + rate * t by time t; by its own deadline there is `left`
    rate, by, before = verified / tpot, summed(grid, k, SECONDS), np.searchsorted(at, k, side="right")
    own = pending + rounding_allowance(grid, tpot) * verified - rate * by
    left = summed(grid, k, TOKENS) - owed[before] - rates[before] * by
    # index in `at` of the first deadline that is no earlier than its own
    between = np.append(np.searchsorted(at, k), len(at))
    classes = [*zip(rate.tolist(), value.tolist(), strict=True)]
    steps, size = {}, 1
    for one in dict.fromkeys(classes):
        steps[one], size = size, size * (classes.count(one) + 1)
    rows = np.ascontiguousarray(np.stack((own, rate, by, left, value, [steps[one] for one in classes]), axis=1))
    bounds = np.ascontiguousarray(np.stack((room, summed(grid, at, SECONDS)), axis=1))
    taken = int(accept(rows, between, bounds, slope, seats, size))
    return [int(i) for n, i in enumerate(able) if taken >> n & 1]


@compiled(f"int64({TABLE}, int64[::1], {TABLE}, float64, int64, int64)")
def accept(rows: Floats, between: NDArray[np.int64], bounds: Floats, slope: float, seats: int, size: int) -> int:
    """The programme, over the new in order of deadline. A state is how many were accepted of each class (tokens a
    second, value), as digits of its number; of sets with the same counts the one that owes least is kept. Which are in
    the best final state, as bits. rows: rows of what each adds to a state. bounds: rows (room, seconds)."""
    owed, rates, worth = np.full(size, np.inf), np.zeros(size), np.zeros(size)
    many, taken = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    owed[0] = 0.0
    for n in range(len(rows) + 1):
        for j in range(between[n - 1] if n else 0, between[n]):  # the forced are in time at these deadlines of theirs
            for state in range(size):
                if owed[state] + rates[state] * bounds[j, 1] > bounds[j, 0] + ROUNDING_TOKENS:
                    owed[state] = np.inf
        for state in range(size - 1 if n < len(rows) else -1, -1, -1):  # the last first: none takes this one twice
            own, rate, by, left, value, step = rows[n]
            more, pace, to = owed[state] + own, rates[state] + rate, state + int(step)
            if (
                more + pace * by <= left + ROUNDING_TOKENS
                and pace <= slope + ROUNDING_TOKENS
                and many[state] < seats
                and more < owed[to]
            ):
                owed[to], rates[to], worth[to] = more, pace, worth[state] + value
                many[to], taken[to] = many[state] + 1, taken[state] | 1 << n
    best = 0
    for state in range(1, size):
        better = worth[state] > worth[best] or (worth[state] == worth[best] and owed[state] < owed[best])
        if owed[state] < np.inf and better:
            best = state
    return int(taken[best])
