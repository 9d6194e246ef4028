"""The dynamic programme is held against all subsets, its budget against every token."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from rubato.experiments import slos_serve_toy as toy
from rubato.policies.slos_serve.admission import Terms, admit
from rubato.policies.slos_serve.budget import Job
from tests.policies.slos_serve.instances import (
    brute_force,
    drawn,
    instances,
    natural,
    on_one_grid,
    token_by_token,
    unit,
)

Instance = tuple[list[Job], list[Job], Terms]


def check(instance: Instance) -> None:
    forced, new, terms = instance
    found = admit(forced, new, terms)
    best = brute_force(forced, new, terms)
    own = brute_force(forced, new, terms, over=lambda jobs: natural(jobs, [*forced, *new], terms))
    assert (found is None) == (best is None)
    if found is not None:
        assert found.value >= (own or 0.0)  # no set is missed for want of the grid that it would have alone
        chosen = [*forced, *(new[i] for i in found.accepted)]
        assert found.value == best
        assert on_one_grid(found.grid, chosen[len(forced) :]) or not found.accepted
        assert token_by_token(found.grid, chosen)


@given(instances())
def test_the_most_requests_that_fit_are_admitted(instance: Instance) -> None:
    check(instance)


@given(instances(values=True))
def test_the_greatest_value_that_fits_is_admitted(instance: Instance) -> None:
    check(instance)


def test_figure_3() -> None:
    """Six tokens a unit; three running decodes and three of four new ones: 36 - 18 = 18 = 3 * 6."""
    running = [Job(f"r{i}", 1.0, 1, 1.0) for i in range(3)]
    for ttft, most in [(6.0, 3), (8.0, 3), (100.0, 3)]:
        new = [Job(f"n{i}", ttft, 6, 1.0) for i in range(4)]
        found = admit(running, new, Terms(1.0, unit, 0, 64))
        assert found is not None
        assert len(found.accepted) == most


def test_figure_3_in_simulation() -> None:
    """The burst is prefilled two units apart, as the paper draws it; the fourth request is served when others end."""
    played = toy.play("slos_serve")
    assert played["attained"] == {"running": 3, "new": 3}
    assert played["prefilled"][:3] == [2.0, 4.0, 6.0]


def test_gap_to_token_by_token_feasibility() -> None:
    """Straight lines for stairs of tokens cost little: of 3,801 requests that fit on the same grids token by token, in
    1,000 instances, 3,748 are admitted."""
    admitted, feasible = gap(40)
    assert admitted <= feasible <= 1.03 * admitted


def gap(count: int) -> tuple[float, float]:
    """Over so many random instances: requests admitted, and the most that are feasible token by token."""
    admitted = feasible = 0.0
    for seed in range(count):
        forced, new, terms = drawn(np.random.default_rng([seed, 7]))
        found = admit(forced, new, terms)
        if found is not None:
            admitted += found.value
            feasible += brute_force(forced, new, terms, holds=token_by_token) or 0.0
    return admitted, feasible
