"""The demo's arithmetic; that it runs is shown by running it."""

from __future__ import annotations

import pytest

from rubato.bench import BenchError
from rubato.demo import held


@pytest.mark.parametrize(
    ("tries", "rate"),
    [
        ([(5.0, 0.7), (4.0, 1.0)], 4.0 + 1.0 / 3.0),  # on the line between the two
        ([(5.0, 0.7), (4.0, 0.9)], 4.0),
        ([(4.0, 1.0), (4.6, 0.95), (5.3, 0.85)], 4.95),
        ([(6.0, 0.2), (5.0, 0.6), (4.0, 1.0)], 4.25),  # the nearest above, not the first tried
        ([(4.0, 1.0), (4.6, 1.0)], 4.6),  # no end found: the highest that held
    ],
)
def test_the_rate_that_is_held(tries: list[tuple[float, float]], rate: float) -> None:
    assert held(tries) == pytest.approx(rate)


def test_none_held() -> None:
    with pytest.raises(BenchError, match=r"none of 2 rates down to 4.00/s"):
        held([(5.0, 0.5), (4.0, 0.8)])
