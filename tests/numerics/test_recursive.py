"""Recursive least squares against the batch problem that it solves."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.numerics.recursive import recursive_least_squares


@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_steps_equal_the_weighted_batch_solution(forgetting):
    rng = np.random.default_rng(0)
    rows, values = rng.standard_normal((12, 2)), rng.standard_normal(12)
    start, prior = np.array([0.3, 1.0]), np.diag([4.0, 9.0])
    theta, spread = start, prior
    for row, value in zip(rows, values, strict=True):
        theta, spread = recursive_least_squares(theta, spread, row, float(value), forgetting)
    weight = forgetting ** np.arange(len(rows) - 1, -1, -1)
    inverse = np.linalg.inv(prior) * forgetting ** len(rows)
    normal = (rows.T * weight) @ rows + inverse
    expected = np.linalg.solve(normal, (rows.T * weight) @ values + inverse @ start)
    np.testing.assert_allclose(theta, expected, rtol=1e-8)
    np.testing.assert_allclose(spread, np.linalg.inv(normal), rtol=1e-7)
