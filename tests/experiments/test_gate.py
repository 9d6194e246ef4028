"""The gate: every load offers what it says, and a cell counts what it should."""

from __future__ import annotations

import pytest

from experiments._gate import NOISES, cell
from experiments._gate_loads import loads
from rubato.engines.simulated import step_noise


@pytest.mark.parametrize("name", loads())
def test_every_load_is_another_one_with_another_seed(name: str) -> None:
    load = loads()[name]
    first, second = load.make(1), load.make(2)
    assert first.arrivals != second.arrivals
    assert first.arrivals == load.make(1).arrivals
    if load.counted is not None:
        start, end = load.counted
        assert 0 < start < 0.9 * len(first.arrivals)
        assert start < end
    assert set(first.tiers) == set(second.tiers)


def test_every_kind_of_noise_can_be_drawn() -> None:
    for kinds in NOISES.values():
        for noise in kinds:
            assert step_noise.factors(noise, 1) is not None


def test_a_cell_is_the_same_each_time_and_says_what_was_attained_and_broken() -> None:
    found = cell("demo 1.6", "60 % too fast", "vllm", 1)
    assert found == cell("demo 1.6", "60 % too fast", "vllm", 1)
    assert 0.0 <= found["worst"] <= found["attained"] < 0.1  # vllm sets none aside, and loses all beyond capacity
    assert found["promised"] >= found["broken"] > found["together"] > 5
