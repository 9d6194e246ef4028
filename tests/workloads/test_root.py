"""Roots and quantiles against SciPy's: recorded workloads were drawn with those, and stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import optimize, special

from rubato.workloads.lengths import normal
from rubato.workloads.root import root

FUNCTIONS: list[Callable[[float], float]] = [
    lambda x: x**3 - 2.0,
    lambda x: math.exp(x) - 4.0,
    lambda x: math.floor(100.0 * math.tanh(x - 0.3)) + 0.5,  # of steps, as means of rounded lengths are
    lambda x: x,
]


@pytest.mark.parametrize("within", [1e-3, 1e-12])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_root_to_the_last_bit(function: Callable[[float], float], within: float) -> None:
    assert root(function, -4.0, 5.0, within) == optimize.brentq(function, -4.0, 5.0, xtol=within)


def test_ends_count_and_one_sign_is_refused() -> None:
    assert root(lambda x: x - 1.0, 1.0, 100.0, 1e-3) == 1.0
    with pytest.raises(ValueError, match="no change of sign"):
        root(lambda x: x + 1.0, 0.0, 1.0, 1e-3)


def test_quantiles_of_the_normal() -> None:
    u = np.random.default_rng(0).random((50, 20))
    np.testing.assert_allclose(normal(u), special.ndtri(u), rtol=1e-13, atol=1e-14)
    assert normal(np.zeros(1))[0] < -37.0
