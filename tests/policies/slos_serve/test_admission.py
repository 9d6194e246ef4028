"""The dynamic programme is held against all subsets, its budget against every token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from experiments import _slos_serve_runs as runs
from experiments import slos_serve_toy as toy
from rubato.fleet.cluster_options import PolicyChoice
from rubato.measure.promises import Promises, promises
from rubato.measure.records import rejudged
from rubato.policies.slos_serve import dynamic_program
from rubato.policies.slos_serve.admission import AdmissionLimits, admit
from rubato.policies.slos_serve.demand import Demand, rows
from rubato.policies.slos_serve.dynamic_program import ROUNDING_TOKENS, SECONDS, TOKENS, sum_over_batches
from rubato.simulation.run_spec import RunSpec, oracle_lengths
from rubato.simulation.simulate import simulate
from tests.policies.slos_serve import reference
from tests.policies.slos_serve.instances import (
    brute_force,
    capacity,
    drawn,
    instances,
    on_one_grid,
    token_by_token,
    tried,
    unit,
)

Instance = tuple[list[Demand], list[Demand], AdmissionLimits]


@given(instances(values=True))
def test_the_set_of_the_greatest_value_is_admitted(instance: Instance) -> None:
    """Where memory is scarce it is one that fits, worth no less than any that fits alone."""
    forced, new, limits = instance
    found, best = admit(forced, new, limits), brute_force(forced, new, limits)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        chosen = [new[i] for i in found.accepted]
        assert found.value == sum(d.value for d in chosen) <= best
        assert sum(d.memory for d in chosen) <= limits.memory
        assert len(chosen) <= limits.seats
        assert found.value == best or sum(d.memory for d in new) > limits.memory
        alone = [brute_force(forced, [one], limits) for one in new if one.memory <= limits.memory]
        assert found.value >= max([value for value in alone if value is not None], default=0.0)
        assert on_one_grid(found.grid, chosen) or not chosen
        assert token_by_token(found.grid, [*forced, *chosen])


@given(instances(values=True))
def test_what_is_left_of_grids_is_as_in_plain_python(instance: Instance) -> None:
    """Those of two late decodes beside, and of one that verifies three tokens."""
    forced, new, limits = instance
    forced = [
        *forced,
        Demand("late", -1.0, 1, 5.0),
        Demand("now", 0.0, 4, 6.0),
        Demand("wide", 7.0, 3, 15.0, verified=3),
    ]
    for grid in tried(forced, new, limits):
        made, k, due = np.array(grid), np.arange(12.0), np.linspace(-1.0, 40.0, 83)
        assert sum_over_batches(made, k, SECONDS).tolist() == pytest.approx([reference.end(grid, n) for n in k])
        assert sum_over_batches(made, k, TOKENS).tolist() == pytest.approx([reference.supply(grid, n) for n in k])
        assert dynamic_program.batches_ended(made, due).tolist() == [reference.index(grid, at) for at in due]
        *_, room, slope = dynamic_program.demand_line(made, rows(forced))
        assert room.tolist() == pytest.approx(reference.room(grid, forced))
        assert (slope >= -ROUNDING_TOKENS and room.min() >= -ROUNDING_TOKENS) == reference.holds(grid, forced)


def test_memory_is_for_those_that_take_least_of_it() -> None:
    new = [Demand(f"n{i}", 20.0, 2, 15.0, memory) for i, memory in enumerate((5, 2, 4, 1))]
    found = admit([], new, AdmissionLimits(20.0, capacity, 8, 100))
    assert found is not None
    assert found.accepted == (1, 2, 3)


def test_memory_is_for_one_that_is_worth_more_than_those_that_take_least_of_it() -> None:
    gold, standard, vast = (Demand(*d) for d in (
        ("g", 20.0, 2, 15.0, 10, 9.0), ("s", 20.0, 2, 15.0, 1, 1.0), ("v", 20.0, 2, 15.0, 11, 50.0)
    ))  # fmt: skip
    for new, taken in (((gold, standard), 9.0), ((gold, standard, vast), 9.0), ((standard, standard), 2.0)):
        found = admit([], new, AdmissionLimits(20.0, capacity, 10, 100))
        assert found is not None
        assert found.value == taken


def test_memory_is_counted_by_what_is_held_together() -> None:
    """Ten blocks each at the end, one a hundred tokens after the other: six of its blocks are still to come."""
    soon, later = (Demand("d", 20.0, 1, 15.0, 10, output_left=left) for left in (1.0, 101.0))
    for left, fits in ((later, True), (soon, False)):
        found = admit([soon], [left], AdmissionLimits(20.0, capacity, 14, 100, block=16))
        assert found is not None
        assert found.accepted == ((0,) if fits else ())


def test_the_first_batch_may_be_a_short_one() -> None:
    """Nothing of ten units ends by 3; beside the decode due by 13 five tokens end by then, the others wait."""
    running = [Demand("soon", 12.0, 1, 10.0), *(Demand(f"r{i}", 30.0, 1, 30.0) for i in range(30))]
    limits = AdmissionLimits(10.0, capacity, 10, 100, beside=lambda *asked: 6.0 if asked == (3.0, 1) else 0.0)
    for tokens, ends in ((5.0, True), (7.0, False)):
        found = admit(running, [Demand("new", 3.0, tokens, 30.0)], limits)
        assert found is not None
        assert found.accepted == ((0,) if ends else ())
        assert found.grid.has_short_first == ends
    found = admit(running, [Demand("new", 3.0, 5.0, 30.0)], replace(limits, beside=None))
    assert found is not None
    assert found.accepted == ()


@pytest.mark.parametrize("due", [1e12, 1e19, 1e300])
def test_a_deadline_may_be_as_far_away_as_anybody_likes(due: float) -> None:
    found = admit([Demand("r", due, 1, 1.0)], [Demand("n", due, 6, 0.5)], AdmissionLimits(1.0, unit, 0, 64))
    assert found is not None
    assert found.accepted == (0,)


def test_many_tpots_make_few_grids() -> None:
    """An e2e of its own for each makes as many TPOTs: not two to the power of them, and those that fit are admitted."""
    new = [Demand(f"n{i}", 40.0 + i, 2, 5.0 + 0.1 * i) for i in range(16)]
    limits = AdmissionLimits(20.0, capacity, 100, 100)
    assert len(tried([], new, limits)) <= 17
    found = admit([], new, limits)
    assert found is not None
    assert len(found.accepted) == 13
    assert token_by_token(found.grid, [new[i] for i in found.accepted])


def test_figure_3() -> None:
    """Six tokens a unit; three running decodes and three of four new ones: 36 - 18 = 18 = 3 * 6."""
    running = [Demand(f"r{i}", 1.0, 1, 1.0) for i in range(3)]
    for ttft, most in [(6.0, 3), (8.0, 3), (100.0, 3)]:
        new = [Demand(f"n{i}", ttft, 6, 1.0) for i in range(4)]
        found = admit(running, new, AdmissionLimits(1.0, unit, 0, 64))
        assert found is not None
        assert len(found.accepted) == most


def test_figure_3_in_simulation() -> None:
    """The paper draws the burst prefilled two units apart; here all three end at their deadline, as a decode more would
    take its tokens from the others' prompts. The fourth is served when others end."""
    played = toy.play("slos_serve")
    assert played["attained"] == {"running": 3, "new": 3}
    assert sorted(played["prefilled"])[:3] == [6.0, 6.0, 6.0]
    run = simulate(toy.toy(), RunSpec(toy.MACHINE, PolicyChoice("slos_serve")))
    assert promises(rejudged(run, "windowed")) == Promises(6, 0, 0)


@pytest.mark.parametrize("seed", [3, 4])
def test_begun_promises_are_kept_by_windows_where_streams_of_three_tpots_share_a_replica(seed: int) -> None:
    """Mixed beyond capacity: prompts and windows that ended early once took the pace of others, 5 and 3 of them."""
    load = runs.load("mixed", seed, runs.FULL, count=200).rescaled(5.0)
    spec = RunSpec(
        runs.hardware("mixed", runs.FULL), PolicyChoice("slos_serve"), lengths=oracle_lengths, slo_rule="windowed"
    )
    run = simulate(load, spec, causes=False)
    for rule in runs.JUDGES:
        kept = promises(rejudged(run, rule))
        assert kept.made > 170
        assert kept.broken == 0


def test_gap_to_token_by_token_feasibility() -> None:
    """Straight lines for stairs of tokens cost little: of 3,801 requests that fit on the same grids token by token, in
    1,000 instances, 3,748 are admitted."""
    admitted, feasible = gap(40)
    assert admitted <= feasible <= 1.03 * admitted


def gap(count: int) -> tuple[float, float]:
    """Over so many random instances: requests admitted, and the most that are feasible token by token."""
    admitted = feasible = 0.0
    for seed in range(count):
        forced, new, limits = drawn(np.random.default_rng([seed, 7]))
        found = admit(forced, new, limits)
        if found is not None:
            admitted += found.value
            feasible += brute_force(forced, new, limits, holds=token_by_token) or 0.0
    return admitted, feasible
