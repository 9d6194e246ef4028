"""The grids that admission tries, as arrays, compiled (Numba); `admission.grids_to_try` says which, and in what order.

Rows and columns are those of `dynamic_program`. Compiled functions contain that module's constants: touch this file,
too, when they change there, or the copy kept on disk stays old.
"""

from __future__ import annotations

from math import inf

import numpy as np

from rubato.policies.slos_serve.dynamic_program import (
    CLOSE,
    COLUMN,
    COUNT,
    DUE,
    PENDING,
    SECONDS,
    TABLE,
    TABLES,
    TOKENS,
    TPOT,
    Floats,
    Ints,
)
from rubato.policy_kit.compiled import compiled

GRIDS = 64  # tried at most for one length of the first batches
ALIGNED = 2  # deadlines that the first batches are fitted to, the earliest ones


@compiled()
def fitted(rows: Floats) -> Floats:
    """Deadlines that batches reach with no remainder: of prefills, or of decodes due before their TPOT ends."""
    due = rows[:, DUE]
    return due[(due > 0.0) & ((rows[:, PENDING] > 1.0) | (due < rows[:, TPOT]))]


@compiled(f"{COLUMN}({TABLE}, {TABLE}, float64)")
def fits(forced: Floats, new: Floats, longest: float) -> Floats:
    """Seconds of batches that reach the first of these without remainder."""
    dues = np.unique(np.concatenate((fitted(forced), fitted(new))))[:ALIGNED]
    return dues / np.maximum(1.0, np.ceil(dues / longest - CLOSE))


@compiled(f"{TABLE}({TABLE}, {TABLE}, float64)")
def short(forced: Floats, new: Floats, longest: float) -> Floats:
    """Rows (seconds, decodes) of short first batches, until one of the first prompts is due: how many decodes are due
    before the batch after it ends. None where two tokens of one would be due in it."""
    due = new[:, DUE]
    ends = np.unique(due[(due > 0.0) & (due < longest)])[:ALIGNED]
    made, count = np.empty((len(ends), 2)), 0
    for end in ends:
        decodes, able = 0, True
        for i in range(len(forced)):
            decodes += forced[i, DUE] < end + longest
            able = able and not (forced[i, DUE] < end and forced[i, TPOT] < end)
        if able:
            made[count, 0], made[count, 1] = end, decodes
            count += 1
    return made[:count]


@compiled()
def tokens_of(spans: Floats, seconds: float) -> float:
    for s in range(len(spans)):
        if spans[s, 0] == seconds:
            return float(spans[s, 1])
    raise ValueError("the caller did not say how many tokens a batch of so many seconds holds")


@compiled()
def insert(decodes: Floats, count: int, due: float, tpot: float, tokens: float) -> None:
    """In order of (due, tpot)."""
    at = count
    while at > 0 and (decodes[at - 1, 0] > due or (decodes[at - 1, 0] == due and decodes[at - 1, 1] > tpot)):
        decodes[at] = decodes[at - 1]
        at -= 1
    decodes[at, 0], decodes[at, 1], decodes[at, 2] = due, tpot, tokens


@compiled()
def build_grid(grid: Floats, size: int, longest: float, tokens: float, decodes: Floats) -> int:
    """Batches of at most `longest` seconds and so many tokens, then of each TPOT, from the last batch that ends before
    its request is due. decodes: rows (due, tpot, tokens). Adds to the `size` rows; returns the new size."""
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
    firsts, count = np.empty((len(spans), 3)), 0
    for s in range(len(spans)):
        for i in range(len(forced)):
            if forced[i, TPOT] == spans[s, 0]:
                insert(firsts, count, forced[i, DUE], spans[s, 0], spans[s, 1])
                count += 1
                break
    return firsts[:count]


@compiled()
def shortening(decodes: Floats, new: Floats, longest: float) -> tuple[list[float], list[Floats]]:
    """The TPOTs of the new that would shorten batches of at most `longest`, ascending, and the deadlines of each."""
    tpots, dues = [], []
    for tpot in np.unique(new[:, TPOT]):
        due = np.unique(new[:, DUE][new[:, TPOT] == tpot])
        able = False
        for at in due:
            seconds = longest  # of batches when it is due, as `build_grid` has them
            for d in range(len(decodes)):
                if decodes[d, 0] <= at:
                    seconds = min(seconds, decodes[d, 1])
            able = able or tpot < seconds
        if able:
            tpots.append(tpot)
            dues.append(due)
    return tpots, dues


@compiled()
def is_known(made: Floats, sizes: Ints, at: int) -> bool:
    for g in range(at):
        same = sizes[g] == sizes[at]
        for p in range(sizes[at]):
            for c in range(3):
                same = same and made[g, p, c] == made[at, p, c]
        if same:
            return True
    return False


@compiled(f"Tuple(({TABLES}, int64[::1]))({TABLE}, {TABLE}, {TABLE}, {TABLE})")
def build_grids(forced: Floats, new: Floats, starts: Floats, spans: Floats) -> tuple[Floats, Ints]:
    """The grids to try, each once, and how many rows each has.

    starts: rows (seconds, tokens, seconds and tokens of a short first batch, or 0). For each start, every choice of the
    first new request of each TPOT that would shorten batches; where those are more than `GRIDS`, the first of each or
    none; where these are too many, too, all TPOTs from one on. spans: rows (TPOT, tokens), of all TPOTs.
    """
    decodes = first_decodes(forced, spans)
    known = len(decodes)
    laid = np.empty((known + len(new), 3))
    made, sizes, total = np.empty((16, len(laid) + 3, 3)), np.empty(16, dtype=np.int64), 0
    for s in range(len(starts)):
        tpots, dues = shortening(decodes, new, starts[s, 0])
        choices = 1.0
        for due in dues:
            choices *= len(due) + 1
        if choices > GRIDS:
            dues = [due[:1] for due in dues]
            choices = 2.0 ** len(dues)
        chain = choices > GRIDS
        if chain:
            choices = len(dues) + 1.0
        for choice in range(int(choices)):
            laid[:known] = decodes
            count, rest = known, choice
            for d in range(len(dues) - 1, -1, -1):  # which of its deadlines, the number of them for none
                first = int(d < choice) if chain else rest % (len(dues[d]) + 1)
                rest //= len(dues[d]) + 1
                if first < len(dues[d]):
                    insert(laid, count, dues[d][first], tpots[d], tokens_of(spans, tpots[d]))
                    count += 1
            if total == len(made):
                made, sizes = np.concatenate((made, np.empty_like(made))), np.concatenate((sizes, np.empty_like(sizes)))
            grid, lead = made[total], int(starts[s, 2] > 0.0)
            grid[0, COUNT], grid[0, SECONDS], grid[0, TOKENS] = 1.0, starts[s, 2], starts[s, 3]
            sizes[total] = build_grid(grid, lead, starts[s, 0], starts[s, 1], laid[:count])
            total += not is_known(made, sizes, total)
    return made[:total], sizes[:total]
