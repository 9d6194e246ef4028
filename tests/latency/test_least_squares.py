"""Non-negative and isotonic least squares against SciPy's, which the package does without."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from rubato.latency.least_squares import isotonic, nnls


@pytest.mark.parametrize("seed", range(40))
def test_nothing_non_negative_is_closer(seed: int) -> None:
    """Also where columns are equal, zero, or of very different sizes, and where there are more of them than rows."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    matrix = rng.normal(size=(rows, columns)) * 10.0 ** rng.uniform(-6, 6, size=columns)
    if seed % 3 == 0:
        matrix = np.abs(matrix)
    if seed % 5 == 0:
        matrix[:, -1] = matrix[:, 0]
    if seed % 7 == 0:
        matrix[:, 0] = 0.0
    right = matrix @ np.abs(rng.normal(size=columns)) if seed % 4 == 0 else rng.normal(size=rows)
    found = nnls(matrix, right)
    assert (found >= 0.0).all()
    size = np.maximum(np.sqrt((matrix * matrix).sum(axis=0)), 1e-300)
    theirs = optimize.nnls(matrix / size, right)[1]
    assert np.linalg.norm(matrix @ found - right) <= theirs + 1e-12 * max(1.0, float(np.linalg.norm(right)))


def test_what_can_be_explained_is() -> None:
    rng = np.random.default_rng(0)
    matrix, wanted = rng.random((200, 6)), np.array([0.0, 2.0, 0.0, 1e-3, 5.0, 0.0])
    np.testing.assert_allclose(nnls(matrix, matrix @ wanted), wanted, atol=1e-12)


def test_a_right_side_of_zero_needs_nothing() -> None:
    assert nnls(np.eye(3), np.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("seed", range(20))
def test_isotonic_is_scipys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=1 + seed), rng.uniform(0.01, 3.0, size=1 + seed)
    theirs = optimize.isotonic_regression
    np.testing.assert_allclose(isotonic(values, weights), theirs(values, weights=weights).x, atol=1e-12)
    np.testing.assert_allclose(isotonic(values), theirs(values).x, atol=1e-12)
