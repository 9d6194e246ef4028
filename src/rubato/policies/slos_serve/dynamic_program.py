"""What admission computes, in numbers alone: what a grid leaves, and the dynamic programme on it, compiled (Numba).

`admission` is its interface, and says what it means. Compiled when first imported, a second, then loaded.

A grid is an array of rows (count, seconds, tokens), the last without end; those served anyway, `forced`, and the `new`
are rows (due, tokens, tpot, verified, memory, value), the forced in order of `due`, the new as given.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rubato.policy_kit.compiled import compiled

Floats = NDArray[np.float64]

BATCH_ROUNDING = 1e-9  # of a batch: a deadline at a batch's very end is met by it
ROUNDING_TOKENS = 1e-6  # tokens: float rounding
SECONDS, TOKENS = 1, 2  # columns of a grid
TABLE = "float64[:,::1]"


class DemandLine(NamedTuple):
    """What forced demands take of a grid, and leave of it.

    Args:
        at: numbers of batches, ascending, by whose end some of them are due
        debts: with `rates`, in which the first entry is of no demand: those due by `at` demand debts + rates · t tokens
            by time t
        rates: tokens a second
        room: tokens left by `at`
        slope: tokens a second left in the long run
    """

    at: Floats
    debts: Floats
    rates: Floats
    room: Floats
    slope: float


def batches_ended(grid: Floats, due: Floats) -> Floats:
    """Returns how many batches have ended by each of these times."""
    ended, begin = np.zeros(len(due)), 0.0
    for count, seconds, _ in grid:
        ended += np.minimum(np.maximum(np.floor((due - begin) / seconds + BATCH_ROUNDING), 0.0), count)
        begin += count * seconds
    return ended


def sum_over_batches(grid: Floats, k: Floats, column: int) -> Floats:
    """Returns a column's sum over the first k batches, for each k."""
    total, begin = np.zeros(len(k)), 0.0
    for row in grid:
        total += np.minimum(np.maximum(k - begin, 0.0), row[0]) * row[column]
        begin += row[0]
    return total


def seconds_after(grid: Floats, k: Floats) -> Floats:
    """Returns how many seconds the batch after the first k takes, for each k; no later one takes longer."""
    lead = len(grid) > 1 and grid[0, SECONDS] < grid[1, SECONDS]  # the first may be a short one
    seconds = np.maximum(grid[:, SECONDS], grid[1, SECONDS] if lead else 0.0)
    after: Floats = seconds[np.searchsorted(grid[:, 0].cumsum(), k, side="right").clip(0, len(grid) - 1)]
    return after


def rounding_allowance(grid: Floats, tpots: Floats) -> Floats:
    """Returns how many tokens a decode's stairs rise above the line of slope 1/tpot that begins at a due token: none
    where batches divide the TPOT, and each other, else less than what it needs in a batch."""
    lengths = grid[int(len(grid) > 1 and grid[0, SECONDS] < grid[1, SECONDS]) :, SECONDS].tolist()
    allowance = {inf: 0.0}  # no stairs begin before a short first batch's end
    for tpot in set(tpots.tolist()) - {inf}:
        shorter = [seconds for seconds in lengths if seconds <= tpot * (1.0 + BATCH_ROUNDING)]
        ratios = [before / seconds for before, seconds in zip([tpot, *shorter], shorter, strict=False)]
        allowance[tpot] = (
            shorter[0] / tpot if any(abs(ratio - round(ratio)) > ROUNDING_TOKENS for ratio in ratios) else 0.0
        )
    return np.array([allowance[tpot] for tpot in tpots.tolist()])


def demand_line(grid: Floats, forced: Floats) -> DemandLine:
    """Adds up what the forced demand. Those due at 0 are late already: they count as due with the first batch."""
    due, pending, tpot, verified = forced.T[:4]
    k, rate = batches_ended(grid, due), verified / tpot
    k[due <= 0.0] = min(1.0, k[due > 0.0].min(initial=1.0))  # not after those due before any batch ends: none fits
    debts = (pending + rounding_allowance(grid, tpot) * verified - rate * sum_over_batches(grid, k, SECONDS)).cumsum()
    last = np.ones(len(k), dtype=bool)
    last[:-1] = k[1:] != k[:-1]
    at, debts, rates = k[last], debts[last], rate.cumsum()[last]
    room = sum_over_batches(grid, at, TOKENS) - debts - rates * sum_over_batches(grid, at, SECONDS)
    slope = float(grid[-1, TOKENS] / grid[-1, SECONDS] - rate.sum())
    return DemandLine(at, np.concatenate(([0.0], debts)), np.concatenate(([0.0], rates)), room, slope)


def best_subset(grid: Floats, forced: Floats, new: Floats, seats: int) -> list[int] | None:
    """Returns the indices of the set of largest value that is in time beside the forced, of several such sets those of
    the one that leaves the largest budget; None if the forced are not in time on this grid."""
    at, debts, rates, room, slope = demand_line(grid, forced)
    if slope < -ROUNDING_TOKENS or np.any(room < -ROUNDING_TOKENS):
        return None
    k = batches_ended(grid, new[:, 0])
    able = np.flatnonzero((k >= 1.0) & (seconds_after(grid, k) <= new[:, 2] * (1.0 + BATCH_ROUNDING)))
    able = able[np.argsort(k[able], kind="stable")]
    k, (_, pending, tpot, verified, _, value) = k[able], new[able].T
    # Each, if accepted, demands own + rate * t by time t; by its own deadline `by` the forced leave it `budget` tokens.
    rate, by, before = verified / tpot, sum_over_batches(grid, k, SECONDS), np.searchsorted(at, k, side="right")
    own = pending + rounding_allowance(grid, tpot) * verified - rate * by
    budget = sum_over_batches(grid, k, TOKENS) - debts[before] - rates[before] * by
    # index in `at` of the first deadline that is no earlier than its own
    between = np.append(np.searchsorted(at, k), len(at))
    classes = [*zip(rate.tolist(), value.tolist(), strict=True)]
    steps, size = {}, 1
    for one in dict.fromkeys(classes):
        steps[one], size = size, size * (classes.count(one) + 1)
    rows = np.ascontiguousarray(np.stack((own, rate, by, budget, value, [steps[one] for one in classes]), axis=1))
    bounds = np.ascontiguousarray(np.stack((room, sum_over_batches(grid, at, SECONDS)), axis=1))
    chosen = int(accept(rows, between, bounds, slope, seats, size))
    return [int(i) for n, i in enumerate(able) if chosen >> n & 1]


@compiled(f"int64({TABLE}, int64[::1], {TABLE}, float64, int64, int64)")
def accept(rows: Floats, between: NDArray[np.int64], bounds: Floats, slope: float, seats: int, size: int) -> int:
    """Runs the programme over the new in order of deadline.

    A state is how many were accepted of each class (tokens a second, value), as digits of its number; of sets with the
    same counts the one that owes least is kept.

    Args:
        rows: (own, rate, by, budget, value, step) of each of the new: it demands own + rate · t tokens by time t, there
            are `budget` by its own deadline `by`, and accepting it adds `step` to the number of a state
        between: how many deadlines of the forced are before that of each of the new, and how many there are
        bounds: (room, seconds) of each deadline of the forced
        slope: tokens a second left in the long run
        seats: how many may be accepted
        size: number of states

    Returns:
        the accepted of the best final state, as bits
    """
    debts, rates, worth = np.full(size, np.inf), np.zeros(size), np.zeros(size)
    counts, members = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    debts[0] = 0.0
    for n in range(len(rows) + 1):
        for j in range(between[n - 1] if n else 0, between[n]):  # the forced are in time at these deadlines of theirs
            for state in range(size):
                if debts[state] + rates[state] * bounds[j, 1] > bounds[j, 0] + ROUNDING_TOKENS:
                    debts[state] = np.inf
        for state in range(size - 1 if n < len(rows) else -1, -1, -1):  # the last first: none takes this one twice
            own, rate, by, budget, value, step = rows[n]
            more, pace, to = debts[state] + own, rates[state] + rate, state + int(step)
            if (
                more + pace * by <= budget + ROUNDING_TOKENS
                and pace <= slope + ROUNDING_TOKENS
                and counts[state] < seats
                and more < debts[to]
            ):
                debts[to], rates[to], worth[to] = more, pace, worth[state] + value
                counts[to], members[to] = counts[state] + 1, members[state] | 1 << n
    best = 0
    for state in range(1, size):
        better = worth[state] > worth[best] or (worth[state] == worth[best] and debts[state] < debts[best])
        if debts[state] < np.inf and better:
            best = state
    return int(members[best])
