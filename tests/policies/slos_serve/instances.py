"""Small instances of admission, and what decides them without the dynamic programme."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf

import numpy as np
from hypothesis import strategies as st

from rubato.policies.slos_serve import dynamic_program
from rubato.policies.slos_serve.admission import AdmissionLimits, Grid, grids_to_try
from rubato.policies.slos_serve.demand import Demand
from tests.policies.slos_serve import reference
from tests.policies.slos_serve.reference import CLOSE

Holds = Callable[[Grid, Sequence[Demand]], bool]


def capacity(seconds: float) -> int:
    """Of a machine that takes 2 units a step and 4 tokens a unit more."""
    return max(0, int((seconds - 2.0) * 4.0 + 1e-9))


def unit(seconds: float) -> int:
    """Six tokens a unit of time."""
    return int(6 * seconds + 1e-9)


def on_one_grid(grid: Grid, demands: Sequence[Demand]) -> bool:
    return all(alone(grid, demand) for demand in demands) and reference.holds(grid, demands)


def alone(grid: Grid, demand: Demand) -> bool:
    """No batch is longer than its TPOT from its due token on, and one ends by then."""
    k = reference.index(grid, demand.due)
    [after] = dynamic_program.seconds_after(np.array(grid), np.array([k]))
    return k >= 1.0 and bool(after <= demand.tpot * (1.0 + CLOSE))


def tried(forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits) -> list[Grid]:
    """The grids that admission tries."""
    return list(grids_to_try(forced, new, limits))


def brute_force(
    forced: Sequence[Demand], new: Sequence[Demand], limits: AdmissionLimits, holds: Holds = on_one_grid
) -> float | None:
    """The largest value of any subset that fits on a grid that admission tries; None when not even the forced do."""
    every = tried(forced, new, limits)
    best = None
    for size in range(len(new) + 1):
        for some in combinations(new, size):
            if sum(d.memory for d in some) > limits.memory or size > limits.seats:
                continue
            if any(reference.holds(g, forced) and holds(g, [*forced, *some]) for g in every):
                best = max(best or 0.0, sum(d.value for d in some))
    return best


def token_by_token(grid: Grid, demands: Sequence[Demand], batches: int = 60) -> bool:
    """Whether every token is in time when each batch is filled by earliest deadline, one token of each decode."""
    pending = [d.tokens for d in demands]
    due = [d.due for d in demands]
    ends = [reference.end(grid, k) for k in np.arange(1.0, batches + 1.0)]
    supply = np.diff([reference.supply(grid, k) for k in np.arange(batches + 1.0)]).tolist()
    for end, left in zip(ends, supply, strict=True):
        for i in sorted(range(len(demands)), key=due.__getitem__):
            if due[i] == inf or left == 0:
                break
            given = min(pending[i], left)
            left -= given
            pending[i] -= given
            if pending[i] == 0:
                if end > due[i] + 1e-6:
                    return False
                pending[i], due[i] = 1, due[i] + demands[i].tpot
    return (
        min(due, default=inf) > ends[-1] - 1e-6
        and sum(1.0 / d.tpot for d in demands) <= reference.throughput(grid) + 1e-9
    )


@st.composite
def instances(draw: st.DrawFn, values: bool = False) -> tuple[list[Demand], list[Demand], AdmissionLimits]:
    """Few distinct times and sizes (ties), budgets and memory that are scarce."""
    tpots = draw(st.sampled_from([[5.0], [5.0, 10.0], [4.0, 6.0, 15.0]]))
    tpot = st.sampled_from([*tpots, inf])
    forced = [
        Demand(f"f{i}", draw(st.sampled_from([4.0, 6.0, 10.0, 17.5])), draw(st.sampled_from([1, 1, 5, 20])), draw(tpot))
        for i in range(draw(st.integers(0, 4)))
    ]
    new = [
        Demand(
            f"n{i}", draw(st.sampled_from([4.5, 10.0, 20.0, 20.0, 33.0])), draw(st.sampled_from([2, 8, 8, 20, 45])),
            draw(tpot), draw(st.sampled_from([0, 1, 2, 5])), draw(st.sampled_from([1.0, 2.5])) if values else 1.0,
        )
        for i in range(draw(st.integers(1, 6)))
    ]  # fmt: skip
    new.sort(key=lambda d: d.due)
    longest = draw(st.sampled_from([8.0, 20.0]))
    return (
        forced,
        new,
        AdmissionLimits(longest, capacity, draw(st.sampled_from([3, 6, 100])), draw(st.sampled_from([2, 100]))),
    )


def drawn(rng: np.random.Generator) -> tuple[list[Demand], list[Demand], AdmissionLimits]:
    """An instance with distinct times, TPOTs that do not divide each other, and no scarcity but of time."""
    tpots = rng.choice([5.0, 7.0, 10.0, 12.0], 2)
    forced = [
        Demand(f"f{i}", float(tpot * rng.uniform(1.0, 2.0)), 1, float(tpot))
        for i, tpot in enumerate(rng.choice(tpots, rng.integers(0, 6)))
    ]
    new = [
        Demand(f"n{i}", float(rng.uniform(5.0, 60.0)), int(rng.integers(2, 60)), float(rng.choice(tpots)))
        for i in range(6)
    ]
    return forced, sorted(new, key=lambda d: d.due), AdmissionLimits(20.0, capacity, 0, 100)
