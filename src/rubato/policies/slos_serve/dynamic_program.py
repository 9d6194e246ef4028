"""What admission computes, in numbers alone, compiled (Numba): grids, what they leave, and the dynamic programme.

`token_budget` and `admission` are its surface, and say what it means. All of it is in one file because a compiled
function is kept on disk until its own file changes, whatever it calls. Compiled when first imported, some seconds, then
loaded.

A grid is an array of rows (count, seconds, tokens), the last without end; those served anyway, `forced`, rows (due,
tokens, tpot, verified) in order of `due`; the `new`, in the order given, rows (due, tokens, tpot, verified, memory,
value). Sums are taken in the order of the rows.
"""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from rubato.policy_kit.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLOSE = 1e-9  # of a batch: a deadline at a batch's very end is met by it
EPS = 1e-6  # tokens: float rounding
GRIDS = 64  # tried at most for one length of the first batches
ALIGNED = 2  # deadlines that the first batches are fitted to, the earliest ones
COUNT, SECONDS, TOKENS = 0, 1, 2  # columns of a grid
DUE, PENDING, TPOT, VERIFIED, MEMORY, VALUE = 0, 1, 2, 3, 4, 5  # of the forced and the new
COLUMN, TABLE, TABLES = "float64[::1]", "float64[:,::1]", "float64[:,:,::1]"
OWED, RATE, BY, LEFT = 0, 1, 2, 3  # of those asked, `best_subset`
KEY, MANY, WORTH, USED, LAST = 2, 3, 4, 5, 6  # of a state, `accept_in_scarce_memory`, beside OWED and RATE


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
def end(grid: Floats, k: float) -> float:
    """When the first k batches have ended."""
    return summed(grid, k, SECONDS)


@compiled()
def supply(grid: Floats, k: float) -> float:
    """The tokens of the first k batches."""
    return summed(grid, k, TOKENS)


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
def demand_line(grid: Floats, forced: Floats) -> tuple[Floats, Floats, Floats, Floats, float]:
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
        demand += forced[i, PENDING] + stairs * verified - own * end(grid, k[i])
        rate += own
        if i + 1 == count or k[i + 1] != k[i]:
            at[steps], owed[steps + 1], rates[steps + 1] = k[i], demand, rate
            room[steps] = supply(grid, k[i]) - demand - rate * end(grid, k[i])
            steps += 1
    slope = grid[-1, TOKENS] / grid[-1, SECONDS] - rate
    return at[:steps], owed[: steps + 1], rates[: steps + 1], room[:steps], slope


@compiled()
def holds(room: Floats, slope: float) -> bool:
    """Whether all of them are in time, for ever."""
    if slope < -EPS:
        return False
    for left in room:  # noqa: SIM110
        if left < -EPS:
            return False
    return True


# --------------------------------------------------------------------------- which grids to try


@compiled()
def insert_sorted(values: Floats, count: int, value: float) -> int:
    """Into distinct, ascending values, as far as there is room; how many there are then."""
    at = count
    while at > 0 and values[at - 1] >= value:
        at -= 1
    if at == len(values) or (at < count and values[at] == value):
        return count
    count = min(count + 1, len(values))
    for n in range(count - 1, at, -1):
        values[n] = values[n - 1]
    values[at] = value
    return count


@compiled()
def earliest(dues: Floats, count: int, rows: Floats, before: float, fit: bool) -> int:
    """The first distinct deadlines, later than now. fit: only of those that batches are fitted to."""
    for i in range(len(rows)):
        due = rows[i, DUE]
        if 0.0 < due < before and (not fit or rows[i, PENDING] > 1.0 or due < rows[i, TPOT]):
            count = insert_sorted(dues, count, due)
    return count


@compiled(f"{COLUMN}({TABLE}, {TABLE}, float64)")
def fits(forced: Floats, new: Floats, longest: float) -> Floats:
    """Seconds of batches that reach the first deadlines without a rest: of prefills, or of decodes that are due before
    their TPOT is over."""
    dues = np.empty(ALIGNED)
    count = earliest(dues, 0, forced, inf, True)
    count = earliest(dues, count, new, inf, True)
    for i in range(count):
        dues[i] /= max(1.0, np.ceil(dues[i] / longest - CLOSE))
    return dues[:count]


@compiled(f"{TABLE}({TABLE}, {TABLE}, float64)")
def short(forced: Floats, new: Floats, longest: float) -> Floats:
    """Rows (seconds, decodes) of short first batches, until one of the first prompts is due: how many decodes are due
    before the batch after it ends. None where two tokens of one would be due in it."""
    ends = np.empty(ALIGNED)
    made = np.empty((ALIGNED, 2))
    count = 0
    for n in range(earliest(ends, 0, new, longest, False)):
        decodes, able = 0, True
        for i in range(len(forced)):
            due = forced[i, DUE]
            decodes += due < ends[n] + longest
            able = able and not (due < ends[n] and forced[i, TPOT] < ends[n])
        if able:
            made[count, 0], made[count, 1] = ends[n], decodes
            count += 1
    return made[:count]


@compiled()
def tokens_of(spans: Floats, seconds: float) -> float:
    for s in range(len(spans)):
        if spans[s, 0] == seconds:
            return float(spans[s, 1])
    raise ValueError("nobody was asked what a batch of so many seconds holds")


@compiled()
def copy(to: Floats, at: int, rows: Floats, row: int) -> None:
    for c in range(rows.shape[1]):
        to[at, c] = rows[row, c]


@compiled()
def insert(decodes: Floats, count: int, due: float, tpot: float, tokens: float) -> None:
    """In order of (due, tpot)."""
    at = count
    while at > 0 and (decodes[at - 1, 0] > due or (decodes[at - 1, 0] == due and decodes[at - 1, 1] > tpot)):
        copy(decodes, at, decodes, at - 1)
        at -= 1
    decodes[at, 0], decodes[at, 1], decodes[at, 2] = due, tpot, tokens


@compiled()
def build_grid(grid: Floats, size: int, longest: float, tokens: float, decodes: Floats) -> int:
    """Batches of at most `longest` seconds and so many tokens, and of each TPOT from the last batch on that has ended
    when its request is due: decodes, rows (due, tpot, tokens). Onto the `size` rows that are there; how many then."""
    begin = 0.0
    for p in range(size):
        begin += grid[p, COUNT] * grid[p, SECONDS]
    seconds = longest
    for d in range(len(decodes)):
        due, tpot = decodes[d, 0], decodes[d, 1]
        if tpot < seconds:
            count = max(0.0, np.floor((due - begin) / seconds + CLOSE))
            if count:
                grid[size, COUNT], grid[size, SECONDS], grid[size, TOKENS] = count, seconds, tokens
                begin += count * seconds
                size += 1
            seconds, tokens = tpot, decodes[d, 2]
    grid[size, COUNT], grid[size, SECONDS], grid[size, TOKENS] = inf, seconds, tokens
    return size + 1


@compiled()
def first_decodes(forced: Floats, spans: Floats) -> Floats:
    """The first of each TPOT, as `build_grid` takes them: all that shortens batches. spans: rows (seconds, tokens)."""
    firsts = np.empty((len(spans), 3))
    count = 0
    for i in range(len(forced)):
        tpot, known = forced[i, TPOT], False
        for j in range(count):
            known = known or firsts[j, 1] == tpot
        if not known and tpot < inf:
            insert(firsts, count, forced[i, DUE], tpot, tokens_of(spans, tpot))
            count += 1
    return firsts[:count]


@compiled()
def _is_known(made: Floats, sizes: Ints, at: int) -> bool:
    for g in range(at):
        if sizes[g] == sizes[at]:
            same = True
            for p in range(sizes[at]):
                for c in range(3):
                    same = same and made[g, p, c] == made[at, p, c]
            if same:
                return True
    return False


@compiled(f"Tuple(({TABLES}, int64[::1]))({TABLE}, {TABLE}, {TABLE}, {TABLE})")
def build_grids(forced: Floats, new: Floats, starts: Floats, spans: Floats) -> tuple[Floats, Ints]:
    """The grids to try, each once, and how many rows each has.

    starts: rows (seconds, tokens, seconds and tokens of a short first batch, or 0). For each, every choice of the first
    of the new of each TPOT that would shorten batches; where those are more than `GRIDS`, its first or none; and where
    these are too, all TPOTs from one on. spans: rows (TPOT, tokens), of all TPOTs.
    """
    decodes = first_decodes(forced, spans)
    known = len(decodes)
    width = known + len(new) + 3
    made, sizes, total = np.empty((16, width, 3)), np.empty(16, dtype=np.int64), 0
    all_ = np.empty((known + len(new), 3))
    tpots, distinct = np.empty(len(new)), 0
    for i in range(len(new)):
        distinct = insert_sorted(tpots, distinct, new[i, TPOT])
    tpots = tpots[:distinct]
    picked = np.empty(len(tpots))  # those that would shorten batches
    dues = np.empty((len(tpots), len(new)))  # of each of them, distinct, ascending
    options = np.empty(len(tpots), dtype=np.int64)  # so many, and none
    digits = np.empty(len(tpots), dtype=np.int64)
    first = np.empty((1, 3))  # the short batch
    for s in range(len(starts)):
        lead = int(starts[s, 2] > 0.0)
        first[0, COUNT], first[0, SECONDS], first[0, TOKENS] = 1.0, starts[s, 2], starts[s, 3]
        shorter, choices = 0, 1.0
        for tpot in tpots:
            able, count = False, 0
            for i in range(len(new)):
                if new[i, TPOT] == tpot:
                    seconds = starts[s, 0]  # of batches when it is due, as `build_grid` has them
                    for d in range(known):
                        if decodes[d, 0] <= new[i, DUE]:
                            seconds = min(seconds, decodes[d, 1])
                    able = able or bool(tpot < seconds)
                    count = insert_sorted(dues[shorter], count, new[i, DUE])
            if able:
                options[shorter] = count
                picked[shorter], choices = tpot, choices * (count + 1)
                shorter += 1
        if choices > GRIDS:
            options[:shorter] = 1
            choices = 2.0**shorter
        chain = choices > GRIDS
        if chain:
            choices = shorter + 1.0
        digits[:shorter] = 0
        for choice in range(int(choices)):
            for d in range(known):
                insert(all_, d, decodes[d, 0], decodes[d, 1], decodes[d, 2])
            added = 0
            for d in range(shorter):
                if d >= choice if chain else digits[d] < options[d]:
                    insert(all_, known + added, dues[d, digits[d]], picked[d], tokens_of(spans, picked[d]))
                    added += 1
            if total == len(made):
                more, more_sizes = np.empty((2 * total, width, 3)), np.empty(2 * total, dtype=np.int64)
                for g in range(total):
                    more_sizes[g] = sizes[g]
                    for p in range(sizes[g]):
                        copy(more[g], p, made[g], p)
                made, sizes = more, more_sizes
            grid = made[total]
            copy(grid, 0, first, 0)
            sizes[total] = build_grid(grid, lead, starts[s, 0], starts[s, 1], all_[: known + added])
            total += not _is_known(made, sizes, total)
            for d in range(shorter - 1, -1, -1):  # the last one first
                digits[d] = digits[d] + 1 if digits[d] < options[d] else 0
                if digits[d]:
                    break
    return made[:total], sizes[:total]


# --------------------------------------------------------------------------- which to admit


@compiled()
def able_alone(grid: Floats, new: Floats, memory: int) -> Ints:
    """Those that could be in time alone, in order of the batch that is each one's last."""
    able = np.empty(len(new), dtype=np.int64)
    after = np.empty(len(new))
    count = 0
    for i in range(len(new)):
        k = index(grid, new[i, DUE])
        if not 1.0 <= k < inf or new[i, MEMORY] > memory:
            continue
        if seconds_after(grid, k) <= new[i, TPOT] * (1.0 + CLOSE):
            at = count
            while at > 0 and after[at - 1] > k:
                able[at], after[at] = able[at - 1], after[at - 1]
                at -= 1
            able[at], after[at] = i, k
            count += 1
    return able[:count]


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
def places(new: Floats, able: Ints) -> tuple[Ints, int]:
    """A state has a number: how many were accepted of each class (seconds a token, value), as digits. What each adds to
    it, and how many there are."""
    count = len(able)
    kind = np.empty(count, dtype=np.int64)
    of_kind = np.zeros(count, dtype=np.int64)
    kinds = 0
    for n in range(count):
        i, kind[n] = able[n], -1
        for m in range(n):
            j = able[m]
            if new[j, TPOT] / new[j, VERIFIED] == new[i, TPOT] / new[i, VERIFIED] and new[j, VALUE] == new[i, VALUE]:
                kind[n] = kind[m]
                break
        if kind[n] < 0:
            kind[n] = kinds
            kinds += 1
        of_kind[kind[n]] += 1
    radix = np.ones(kinds + 1, dtype=np.int64)
    for c in range(kinds):
        radix[c + 1] = radix[c] * (of_kind[c] + 1)
    for n in range(count):
        kind[n] = radix[kind[n]]
    return kind, radix[kinds]


@compiled()
def accept_in_ample_memory(
    asked: Floats, between: Ints, room: Floats, ends: Floats, slope: float, new: Floats, able: Ints, step: Ints,
    states: int, seats: int,
) -> Ints:  # fmt: skip
    """The programme where memory does not matter: for each state the least `owed`; with its rate, what is demanded."""
    count = len(asked)
    owed = np.full(states, inf)
    rate, value, number = np.zeros(states), np.zeros(states), np.zeros(states, dtype=np.int64)
    accepted = np.zeros((count, states), dtype=np.bool_)
    owed[0] = 0.0
    for n in range(count):
        for state in range(states - 1, step[n] - 1, -1):  # the fuller ones first: each as it was before
            before = state - step[n]
            if owed[before] == inf:
                continue
            own, speed = owed[before] + asked[n, OWED], rate[before] + asked[n, RATE]
            if (
                own < owed[state]
                and own + speed * asked[n, BY] <= asked[n, LEFT] + EPS
                and speed <= slope + EPS
                and number[before] < seats
            ):
                owed[state], rate[state], number[state] = own, speed, number[before] + 1
                value[state] = value[before] + new[able[n], VALUE]
                accepted[n, state] = True
        for j in range(between[n], between[n + 1]):  # the forced are in time at these deadlines of theirs
            for state in range(states):
                if owed[state] + rate[state] * ends[j] > room[j] + EPS:
                    owed[state] = inf
    state = 0
    for other in range(states):
        if owed[other] < inf and (
            value[other] > value[state] or (value[other] == value[state] and owed[other] < owed[state])
        ):
            state = other
    taken = np.empty(count, dtype=np.int64)
    many = 0
    for n in range(count - 1, -1, -1):
        if accepted[n, state]:
            taken[many] = n
            many += 1
            state -= step[n]
    return taken[:many]


@compiled()
def state_order(rows: Floats, one: int, others: Floats, other: int) -> bool:
    for key in (KEY, OWED, USED):
        if rows[one, key] != others[other, key]:
            return bool(rows[one, key] < others[other, key])
    return False


@compiled()
def accept_in_scarce_memory(
    asked: Floats, between: Ints, room: Floats, ends: Floats, slope: float, new: Floats, able: Ints, step: Ints,
    memory: int, seats: int,
) -> Ints:  # fmt: skip
    """The programme where memory is scarce: for each state those that no other beats in both budget and memory, in
    order of (KEY, OWED, USED). LAST is the last of `accepted`, rows (turn, the one before), that it took."""
    count = len(asked)
    states, many = np.zeros((1, 7)), 1
    states[0, LAST] = -1.0
    accepted, nodes = np.empty((64, 2)), 0
    for n in range(count):
        grown, number = np.empty((many, 7)), 0
        for s in range(many):
            copy(grown, number, states, s)
            grown[number, OWED] += asked[n, OWED]
            grown[number, RATE] += asked[n, RATE]
            grown[number, KEY] += step[n]
            grown[number, MANY] += 1.0
            grown[number, WORTH] += new[able[n], VALUE]
            grown[number, USED] += new[able[n], MEMORY]
            number += (
                grown[number, OWED] + grown[number, RATE] * asked[n, BY] <= asked[n, LEFT] + EPS
                and grown[number, RATE] <= slope + EPS
                and grown[number, MANY] <= seats
                and grown[number, USED] <= memory
            )
        if nodes + number > len(accepted):
            more = np.empty((2 * (nodes + number), 2))
            for a in range(nodes):
                copy(more, a, accepted, a)
            accepted = more
        merged, kept = np.empty((many + number, 7)), 0
        s, g = 0, 0
        while s < many or g < number:
            takes = s == many or (g < number and state_order(grown, g, states, s))
            if takes:
                copy(merged, kept, grown, g)
                g += 1
            else:
                copy(merged, kept, states, s)
                s += 1
            # of the same counts, those before owe no more: it is kept where it takes less memory than the last of them
            if kept and merged[kept - 1, KEY] == merged[kept, KEY] and merged[kept - 1, USED] <= merged[kept, USED]:
                continue
            in_time = True
            for j in range(between[n], between[n + 1]):  # the forced are in time at these deadlines of theirs
                in_time = in_time and merged[kept, OWED] + merged[kept, RATE] * ends[j] <= room[j] + EPS
            if in_time and takes:
                accepted[nodes, 0], accepted[nodes, 1] = n, merged[kept, LAST]
                merged[kept, LAST] = nodes
                nodes += 1
            kept += in_time
        states, many = merged, kept
    best = 0
    for s in range(1, many):
        if states[s, WORTH] > states[best, WORTH] or (
            states[s, WORTH] == states[best, WORTH] and states[s, OWED] < states[best, OWED]
        ):
            best = s
    taken, last = np.empty(count, dtype=np.int64), int(states[best, LAST]) if many else -1
    size = 0
    while last >= 0:
        taken[size] = int(accepted[last, 0])
        last = int(accepted[last, 1])
        size += 1
    return taken[:size]


@compiled()
def best_subset(
    grid: Floats, at: Floats, owed: Floats, rates: Floats, room: Floats, slope: float, new: Floats, able: Ints,
    memory: int, seats: int,
) -> Ints:  # fmt: skip
    """Indices of the set of largest value; of these, the one that leaves the largest budget."""
    count = len(able)
    # each: accepted, it demands asked[OWED] + asked[RATE] · t by time t; by its own deadline there is asked[LEFT]
    asked = np.empty((count, 4))
    between = np.empty(count + 1, dtype=np.int64)  # where in `at` deadlines begin that are no earlier than its own
    needed, due = 0.0, 0
    for n in range(count):
        i = able[n]
        k = index(grid, new[i, DUE])
        tpot, verified = new[i, TPOT], new[i, VERIFIED]
        asked[n, RATE], asked[n, BY] = verified / tpot, end(grid, k)
        asked[n, OWED] = new[i, PENDING] + rounding_allowance(grid, tpot) * verified - asked[n, RATE] * asked[n, BY]
        while due < len(at) and at[due] < k:
            due += 1
        between[n] = due
        by = due + 1 if due < len(at) and at[due] == k else due
        asked[n, LEFT] = supply(grid, k) - owed[by] - rates[by] * asked[n, BY]
        needed += new[i, MEMORY]
    between[count] = len(at)
    ends = np.empty(len(at))
    for j in range(len(at)):
        ends[j] = end(grid, at[j])
    if count <= seats and needed <= memory and all_fit(asked, between, room, ends, slope):
        return able
    step, states = places(new, able)
    if needed > memory:
        taken = accept_in_scarce_memory(asked, between, room, ends, slope, new, able, step, memory, seats)
    else:
        taken = accept_in_ample_memory(asked, between, room, ends, slope, new, able, step, states, seats)
    for n in range(len(taken)):
        taken[n] = able[taken[n]]
    return taken


@compiled()
def improve(
    grid_of: int, value: float, accepted: Ints, g: int, bound: float, grid: Floats, forced: Floats, new: Floats,
    memory: int, seats: int,
) -> tuple[int, float, Ints]:  # fmt: skip
    """The best so far, or what this grid brings. It is looked for only where it could be better."""
    least = value + (EPS if grid_of < g else -EPS)
    if bound <= least:
        return grid_of, value, accepted
    at, owed, rates, room, slope = demand_line(grid, forced)
    if not holds(room, slope):
        return grid_of, value, accepted
    able = able_alone(grid, new, memory)
    chosen = best_subset(grid, at, owed, rates, room, slope, new, able, memory, seats)
    own = 0.0
    for i in chosen:
        own += new[i, VALUE]
    if own <= least:
        return grid_of, value, accepted
    return g, own, chosen


@compiled(f"Tuple((int64, float64, int64[::1]))({TABLES}, int64[::1], {TABLE}, {TABLE}, int64, int64, float64)")
def best_set(
    grids: Floats, sizes: Ints, forced: Floats, new: Floats, memory: int, seats: int, most: float
) -> tuple[int, float, Ints]:
    """Which grid (-1: not even the forced are in time on any), what the best set is worth there, and which are in it.

    The grids that could hold most, each request taken alone, come first, and none is tried that cannot better what is
    found: most is what no set is worth more than. Of equal sets it is that of the first grid.
    """
    bounds = np.empty(len(sizes))
    grid_of, value, accepted = -1, -inf, np.empty(0, dtype=np.int64)
    for g in range(len(sizes)):
        grid = grids[g, : sizes[g]]
        bounds[g] = 0.0
        for i in able_alone(grid, new, memory):
            bounds[g] += new[i, VALUE]
        if bounds[g] >= most - EPS:
            grid_of, value, accepted = improve(grid_of, value, accepted, g, bounds[g], grid, forced, new, memory, seats)
            if value >= most - EPS:
                return grid_of, value, accepted
            bounds[g] = -inf
    for _ in range(len(sizes)):
        g = 0
        for other in range(1, len(sizes)):
            if bounds[other] > bounds[g]:
                g = other
        if bounds[g] < value - EPS:
            break
        grid = grids[g, : sizes[g]]
        grid_of, value, accepted = improve(grid_of, value, accepted, g, bounds[g], grid, forced, new, memory, seats)
        bounds[g] = -inf
    return grid_of, value, accepted
