"""Admission (SLOs-Serve, §3.2.1): the set of new requests of the largest value that leaves all in time.

A dynamic programme over the new requests in order of deadline, on one grid of batches. A state is how many were
accepted of each class, a TPOT with a value; of two sets with the same counts the one with the larger prefill budget is
as good for all that follows, unless it takes more memory: per state the Pareto front of budget and memory is kept.
Counts by class give the value, so no front over values is needed. Grids are tried one after the other: the tightest
TPOT admitted decides how long batches are, and a deadline may fall just before a batch's end. `dynamic_program` does
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from rubato.policies.slos_serve import dynamic_program, grid_building
from rubato.policies.slos_serve.dynamic_program import Floats, Ints
from rubato.policies.slos_serve.token_budget import Demand, Grid, rows


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What admission has to work with. longest: seconds of a batch while no TPOT is tighter. capacity: tokens of a
    batch of so many seconds; beside: of one in which no more than so many decode (None: unknown). memory, seats: KV
    blocks, and places in a batch, that the forced leave."""

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


def admit(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> Admitted | None:
    """The best set of `new` to add to `forced`. None: not even the forced are in time on any of the grids.

    Equal deadlines are decided in the order given. The grid is made for the accepted alone where they all are in time
    on that one, too: declined requests then do not shorten batches, whose rest best effort lives on.
    """
    served = rows(forced)
    found = _best(served, new, limits)
    if found is None or len(found.accepted) == len(new):
        return found
    again = _best(served, [new[i] for i in found.accepted], limits)
    if again is None or len(again.accepted) < len(found.accepted):
        return found
    return replace(found, grid=again.grid)


def _best(served: Floats, new: Sequence[Demand], limits: AdmissionLimits) -> Admitted | None:
    """As `admit`, on a grid that may be laid for some that are declined. served: rows of the forced."""
    assert all(d.due < inf for d in new), "every new request has a deadline, if one of ours"
    asked = rows(new, in_order_given=True)
    grids, sizes = grids_to_try(served, asked, limits)
    most = ceiling(new, limits.memory, limits.seats)
    at, value, accepted = dynamic_program.best_set(grids, sizes, served, asked, limits.memory, limits.seats, most)
    return Admitted(tuple(sorted(accepted.tolist())), Grid.of(grids[at, : sizes[at]]), value) if at >= 0 else None


def admit_first(
    forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits, others: AdmissionLimits, most: float
) -> Admitted | None:
    """As `admit`, but those worth `most` go first, and the rest only where `others` hold all of them: what is left
    between the two is for those worth most that have not come yet."""
    top = [i for i, d in enumerate(new) if d.value >= most]
    rest = [i for i, d in enumerate(new) if d.value < most]
    first = admit(forced, [new[i] for i in top], limits)
    if first is None:
        return None
    accepted = [top[i] for i in first.accepted]
    taken = [new[i] for i in accepted]
    left = replace(others, memory=others.memory - sum(d.memory for d in taken), seats=others.seats - len(taken))
    second = admit([*forced, *taken], [new[i] for i in rest], left)
    if second is None:
        return replace(first, accepted=tuple(accepted))
    return Admitted((*accepted, *(rest[i] for i in second.accepted)), second.grid, first.value + second.value)


def ceiling(new: Sequence[Demand], memory: int, seats: int) -> float:
    """No set is worth more, whatever the grid: as many as memory and places hold, highest worth per block first, the
    last one in part where values differ."""
    order = sorted(new, key=lambda d: d.memory / d.value)
    value, memory = 0.0, max(memory, 0)
    for demand in order[:seats]:
        if demand.memory > memory:
            same = all(d.value == demand.value for d in new)
            return value if same else value + demand.value * memory / demand.memory
        memory -= demand.memory
        value += demand.value
    return value if len(new) <= seats else sum(sorted((d.value for d in new), reverse=True)[:seats])


def first_grid(forced: Sequence[Demand], limits: AdmissionLimits) -> Grid:
    """The first grid that is tried where none is new, whether the forced are in time there or not."""
    grids, sizes = grids_to_try(rows(forced), rows(()), limits)
    return Grid.of(grids[0, : sizes[0]])


def grids_to_try(forced: Floats, new: Floats, limits: AdmissionLimits) -> tuple[Floats, Ints]:
    """The grids to try, each once, and how many phases each has (`grid_building.build_grids`): of batches of the
    longest, then of those that fit one of the first deadlines without a rest (a short prompt is due before a long batch
    would have ended), then with a short batch first, in which those that are ahead are left out where all would last
    too long."""
    longest, capacity = limits.longest, limits.capacity
    starts = [(longest, float(capacity(longest)), 0.0, 0.0)]
    for fit in grid_building.fits(forced, new, longest).tolist():
        if fit < longest and (tokens := capacity(fit)):
            starts.append((fit, float(tokens), 0.0, 0.0))
    if limits.beside is not None:
        for end, decodes in grid_building.short(forced, new, longest).tolist():
            if beside := limits.beside(end, int(decodes)):
                starts.append((*starts[0][:2], end, beside))
    tpots = {*forced[:, dynamic_program.TPOT].tolist(), *new[:, dynamic_program.TPOT].tolist()} - {inf}
    spans = [(tpot, float(capacity(tpot)) if tpot < longest else 0.0) for tpot in tpots]
    return grid_building.build_grids(
        forced, new, np.array(starts), np.array(spans, dtype=np.float64).reshape(len(spans), 2)
    )
