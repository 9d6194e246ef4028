"""Admission (SLOs-Serve, §3.2.1 and Algorithm 2): the set of new requests of the largest value that leaves all in time.

Batches lie end to end, each as long as the tightest TPOT among those that decode by then: a grid. A batch counts for
the first deadline at or after its end, so a deadline d is met by the first `index(d)` batches, and what remains of the
time goes on into the next interval. A request demands its pending tokens by its next due token (one token of a decode:
there is no difference), then one a TPOT.

Served earliest deadline first, one token a batch for each decode and prefill in any chunks, all are in time if and only
if for each k what is due within k batches is no more than these k hold. Only if is plain. The other way: take the first
k that fails and the last batch b < k not full of tokens due by k. All prefill due by k was done with it, and each
decode that still owed a token due by k got one in it; so fewer decodes than a batch holds are left, each has a place in
all of b+1..k, and no more tokens due in there than that, since two of its tokens are never due by the same batch. It
holds again when the first batch has ended, early or not: no deadline loses a batch by that. `demand_line` keeps the
bound with decodes as straight lines, never below their stairs, so that counts suffice to add them up.

The programme takes the new requests in order of deadline. A state is how many were accepted of each class, a TPOT with
a value: counts give the value, and of two sets with the same counts the one with the larger prefill budget is as good
for all that follows. Where memory does not hold the set, the one of it that takes most for its value is left out, and
the programme runs again: there the set is not always the best. Grids are tried one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import NamedTuple

import numpy as np

from rubato.policies.slos_serve.demand import Demand, peak_kv, rows
from rubato.policies.slos_serve.dynamic_program import BATCH_ROUNDING, ROUNDING_TOKENS, best_subset, demand_line

MAX_SHORT_BATCHES = 2  # deadlines of new requests for which the first batch may be a short one, the earliest


class Phase(NamedTuple):
    """A run of `batches` (inf: without end) of at most `seconds` and `tokens` each."""

    batches: float
    seconds: float
    tokens: float


class Grid(tuple[Phase, ...]):
    """Batches laid end to end: phases, each of shorter batches than the one before, the last without end. Before the
    longest there may be one short batch, for a prompt that is due at its end."""

    __slots__ = ()

    @property
    def has_short_first(self) -> bool:
        """Returns whether the first batch is a short one."""
        return len(self) > 1 and self[0].seconds < self[1].seconds

    def step(self) -> Grid:
        """Returns the grid after the first batch."""
        more = self[0].batches - 1
        return Grid((self[0]._replace(batches=more), *self[1:])) if more else Grid(self[1:])

    def room(self, demands: Sequence[Demand]) -> float:
        """Returns the tokens that these demands leave for others, the least at any of their deadlines; negative if they
        do not fit. Demands due at 0 are late and count as due with the first batch."""
        return float(demand_line(np.array(self), rows(demands)).room.min(initial=inf))


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What admission has to work with.

    Args:
        longest: seconds of a batch while no TPOT is tighter
        capacity: gives the tokens that a batch of so many seconds holds
        memory: KV blocks there are
        seats: places in a batch that the forced leave
        beside: gives the same as `capacity` for (seconds, most decodes in it); None: unknown
        block: tokens of a KV block
    """

    longest: float
    capacity: Callable[[float], float]
    memory: int
    seats: int
    beside: Callable[[float, int], float] | None = None
    block: int = 1


class Admitted(NamedTuple):
    """The new demands that are accepted.

    Args:
        accepted: their indices
        grid: on which they and all forced demands are in time
        value: of all accepted
    """

    accepted: tuple[int, ...]
    grid: Grid
    value: float


def admit(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> Admitted | None:
    """Chooses the set of `new` to add to `forced`, the best one unless memory is short.

    Memory is counted by its forecast peak (§3.2.1 has the sum of what each holds at its end, which they never hold
    together).

    Args:
        forced: demands that are served anyway
        new: demands to decide on, each with a deadline; equal deadlines are decided in this order
        limits: what there is

    Returns:
        the accepted; None if even the forced are late on every grid
    """
    assert all(d.due < inf for d in new), "every new request has a deadline, if one of ours"
    forced_rows, value_of_all, peak = rows(forced), sum(d.value for d in new), peak_kv(forced, limits.block)
    # Where memory does not hold the best set, the one of it that is largest by such a key may not be chosen.
    keys_to_leave_out: list[Callable[[int], tuple[float, ...]]] = [lambda i: (new[i].memory / new[i].value,)]
    if len({d.value for d in new}) > 1:  # then that may leave out one worth more than all others
        keys_to_leave_out.append(
            lambda i: (peak.peak_with([new[i].memory], [new[i].output_left]) > limits.memory, -new[i].value)
        )

    def choose(grid: Grid, key: Callable[[int], tuple[float, ...]]) -> tuple[list[int] | None, bool]:
        """Returns the best set on this grid that memory holds, None if the forced are late on it; and whether none was
        left out for memory."""
        able = list(range(len(new)))
        while True:
            new_rows = rows([new[i] for i in able], in_order_given=True)
            chosen = best_subset(np.array(grid), forced_rows, new_rows, limits.seats)
            accepted = [able[i] for i in chosen or ()]
            more = [new[i].memory for i in accepted], [new[i].output_left for i in accepted]
            if not accepted or peak.peak_with(*more) <= limits.memory:
                return None if chosen is None else accepted, len(able) == len(new)
            able.remove(max(accepted, key=key))

    best: Admitted | None = None
    for grid in grids_to_try(forced, new, limits):
        for key in keys_to_leave_out:
            accepted, has_memory_for_all = choose(grid, key)
            value = sum(new[i].value for i in accepted or ())
            if accepted is not None and (best is None or value > best.value + ROUNDING_TOKENS):
                best = Admitted(tuple(sorted(accepted)), grid, value)
            if has_memory_for_all:
                break
        if best is not None and best.value >= value_of_all - ROUNDING_TOKENS:
            return best
    if best is None:
        return None
    again = admit(forced, [new[i] for i in best.accepted], limits)  # those that are declined do not shorten batches
    return best if again is None or again.value < best.value - ROUNDING_TOKENS else best._replace(grid=again.grid)


def grids_to_try(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> Iterator[Grid]:
    """Yields grids: first those that begin with the longest batches, then those with a short batch in front. Of each
    kind, the first keeps the TPOTs of all demands, the others leave out ever more of the tightest TPOTs of `new`."""
    first: dict[float, float] = {}  # TPOT -> when the first of the forced is due
    for d in forced:
        if d.due < first.get(d.tpot, inf):
            first[d.tpot] = d.due
    first_new = {d.tpot: min(o.due for o in new if o.tpot == d.tpot) for d in new if d.tpot < limits.longest}
    tpots = sorted(tpot for tpot, due in first_new.items() if due < first.get(tpot, inf))
    for lead in (None, *_short(forced, new, limits)):
        for tightest in range(len(tpots) + 1):
            more = {tpot: first_new[tpot] for tpot in tpots[tightest:]}
            yield _lay(sorted((due, tpot) for tpot, due in (first | more).items()), lead, limits)


def _lay(decodes: Sequence[tuple[float, float]], lead: Phase | None, limits: AdmissionLimits) -> Grid:
    """Lays batches of the longest duration, then of each TPOT from the last batch that ends before its request is due.
    `decodes` are (due, tpot), in order."""
    phases, begin, seconds = [], 0.0, limits.longest
    if lead is not None:
        phases, begin = [lead], lead.seconds
    for due, tpot in decodes:
        if tpot < seconds:
            count = max(0.0, float(floor((due - begin) / seconds + BATCH_ROUNDING)))
            if count:
                phases.append(Phase(count, seconds, limits.capacity(seconds)))
                begin += count * seconds
            seconds = tpot
    return Grid([*phases, Phase(inf, seconds, limits.capacity(seconds))])


def _short(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> Iterator[Phase]:
    """Yields short first batches, each until one of the first new prompts is due. Only decodes that are due before the
    batch after it ends are counted in it: the others can wait. None where two tokens of one decode would be due."""
    longest = limits.longest
    for end in sorted({d.due for d in new if 0.0 < d.due < longest})[:MAX_SHORT_BATCHES]:
        two_due = any(d.due < end and d.tpot < end for d in forced)
        beside = (
            0.0 if two_due or limits.beside is None else limits.beside(end, sum(d.due < end + longest for d in forced))
        )
        if beside:
            yield Phase(1.0, end, beside)
