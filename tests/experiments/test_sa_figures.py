"""SA's figures: how often the best of several single runs reaches a number."""

from __future__ import annotations

import pytest

from experiments.sa_gain import reaching

CELLS = [(4, 1), (10, 2)]
#                        (4, 1), (10, 2): a value a seed
SYSTEMS = {"sa": ([1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 5.0]), "base": ([2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 0.0])}
VALUES = [
    {"name": name, "n": n, "b": b, "seed": seed, "g": g}
    for name, cells in SYSTEMS.items()
    for (n, b), values in zip(CELLS, cells, strict=True)
    for seed, g in enumerate(values)
]


@pytest.mark.parametrize(
    ("cells", "bar", "share"),
    [
        (CELLS[:1], 1.5, 0.5),
        (CELLS[1:], 1.5, 0.25),  # all of something is more than nothing
        (CELLS, 1.5, 1 - 0.5 * 0.75),
        (CELLS, 3.0, 0.25),  # nothing but that over 0
        (CELLS[:1], 0.5, 0.25),  # at most half
    ],
)
def test_a_number_is_reached_in_a_share_of_draws(cells: list[tuple[int, int]], bar: float, share: float) -> None:
    found = reaching(VALUES, "sa", cells, "g", bar, "base")
    assert found.value == pytest.approx(share)
    assert found.low <= share <= found.high
