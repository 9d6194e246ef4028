"""The gate: every load offers what it says, and a cell counts what it should."""

from __future__ import annotations

from typing import Any

import pytest

from experiments._gate import NOISES, cell
from experiments._gate_loads import loads
from experiments._gate_parts import PARTS, without
from experiments.rubato_robust import EXAMPLE, LEFT_OUT, OTHERS, OURS, Table, measured
from rubato.engines.simulated import step_noise


def test_every_load_is_another_one_with_another_seed() -> None:
    """All in one test: how many requests a second loads have takes a second to work out, in each process that asks."""
    for name, load in loads().items():
        first, second = load.make(1), load.make(2)
        assert first.arrivals != second.arrivals, name
        assert first.arrivals == load.make(1).arrivals, name
        if load.counted is not None:
            start, end = load.counted
            assert 0 < start < 0.9 * len(first.arrivals), name
            assert start < end, name
        assert set(first.tiers) == set(second.tiers), name


def test_every_kind_of_noise_can_be_drawn() -> None:
    for kinds in NOISES.values():
        for noise in kinds:
            assert step_noise.factors(noise, 1) is not None


def test_a_cell_is_the_same_each_time_and_says_what_was_attained_and_broken() -> None:
    found = cell("demo 1.6", "60 % too fast", "vllm", 1)
    assert found == cell("demo 1.6", "60 % too fast", "vllm", 1)
    assert 0.0 <= found["worst"] <= found["attained"] < 0.1  # vllm sets none aside, and loses all beyond capacity
    assert found["promised"] >= found["broken"] > found["together"] > 5


@pytest.mark.parametrize("part", PARTS)
def test_a_part_left_out_is_back_afterwards(part: str) -> None:
    before = [getattr(owner, name) for owner, name, _ in PARTS[part]]
    with without(part):
        assert [getattr(owner, name) for owner, name, _ in PARTS[part]] == [value for *_, value in PARTS[part]]
    assert [getattr(owner, name) for owner, name, _ in PARTS[part]] == before


def test_the_readmes_scheduler_runs_under_its_label() -> None:
    [run] = measured("coder", EXAMPLE, ["independent"], 1)
    assert run["policy"] == EXAMPLE
    assert 0.0 < run["attained"] < 1.0


def runs(
    policy: str, attained: tuple[float, float], worst: float, broken: int = 0, load: str = "a"
) -> list[dict[str, Any]]:
    """Two seeds of one cell."""
    own = {"load": load, "noise": "b", "policy": policy, "worst": worst, "promised": 50, "broken": broken}
    return [own | {"attained": one, "seed": seed} for seed, one in enumerate(attained, 1)]


def test_ours_is_held_against_the_best_other_of_a_cell() -> None:
    values = (
        runs(OURS, (0.6, 0.9), 0.5, broken=2) + runs("edf", (0.8, 0.7), 0.1) + runs("without memory", (0.3, 0.4), 0)
    )
    for other in OTHERS[1:]:
        values += runs(other, (0.2, 0.2), 0.2)
    table = Table(values)
    assert table.best(table.cells) == "edf"
    assert table.ratio("attained").value == pytest.approx((0.6 / 0.8 + 0.9 / 0.7) / 2)
    assert table.ratio("worst").value == pytest.approx(0.5 / 0.2)  # of that measure another is the best
    assert table.ratio("both").value == pytest.approx((0.55 / 0.45 + 0.7 / 0.4) / 2)
    assert table.near() == 100.0
    assert table.ahead("edf", "worst").value == pytest.approx(40.0)
    assert table.broken(table.cells) == pytest.approx(4.0)
    assert table.parts() == ["memory"]
    assert table.without("memory") == [("a", "b")]
    assert table.lost("memory", "attained").value == pytest.approx(40.0)
    assert table.broken(table.cells, f"{LEFT_OUT}memory") == 0.0


def test_a_cell_in_which_the_others_attain_nothing_does_not_decide_the_ratio() -> None:
    values = runs(OURS, (0.6, 0.9), 0.5) + runs(OURS, (0.2, 0.1), 0.1, load="hard")
    for other in OTHERS:
        values += runs(other, (0.5, 0.6), 0.2) + runs(other, (0.1, 0.0), 0.0, load="hard")
    assert Table(values).ratio("attained").value == pytest.approx((0.8 / 0.6 + 1.0 / 0.6) / 2)
