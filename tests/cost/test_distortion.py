"""Distortion bands hold every sample, no smaller factor does, and the confidence on their misses is honest."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.distortion import frontier, guaranteed_error, relative_error, smallest_kappa, tightest
from apportion.cost.sample import CostError

pairs = st.lists(st.tuples(st.floats(0.5, 20.0), st.floats(0.5, 20.0)), min_size=1, max_size=20)


def inside(kappa, eps, rows):
    return all(p / kappa - eps <= y * (1 + 1e-9) and y <= (kappa * p + eps) * (1 + 1e-9) for p, y in rows)


@settings(deadline=None)
@given(pairs, st.floats(0.0, 5.0))
def test_the_smallest_factor_holds_and_no_smaller_does(rows, eps):
    predictions, latencies = zip(*rows, strict=True)
    kappa = smallest_kappa(predictions, latencies, eps)
    assert inside(kappa, eps, rows)
    if kappa > 1.001:
        assert not inside(kappa * 0.999, eps, rows)


@settings(deadline=None)
@given(pairs, st.booleans())
def test_the_frontier_falls_to_one(rows, upper_only):
    points = frontier(*zip(*rows, strict=True), upper_only=upper_only)
    kappas = [point.kappa for point in points]
    assert kappas == sorted(kappas, reverse=True)
    assert kappas[-1] == pytest.approx(1.0)


@settings(deadline=None)
@given(pairs, st.floats(1.0, 30.0))
def test_predictions_within_the_proxy_limit_keep_the_budget(rows, budget):
    points = frontier(*zip(*rows, strict=True), upper_only=True)
    best = tightest(points, budget)
    limit = best.proxy_limit(budget)
    assert all(point.proxy_limit(budget) <= limit for point in points)
    assert all(y <= budget * (1 + 1e-9) for p, y in rows if p <= limit)


def test_the_relative_error_is_the_order_statistic():
    latencies = [1.0] * 20
    predictions = [1 + 0.01 * i for i in range(20)]
    result = relative_error(predictions, latencies, delta=0.1)
    assert result.eta == pytest.approx(0.17)
    assert result.delta == pytest.approx(0.1)
    assert result.delta_upper > 0.1


def test_the_confidence_on_the_share_beyond_eta_is_kept():
    rng = np.random.default_rng(0)
    num_draws, held, held_strict = 600, 0, 0
    for _ in range(num_draws):  # |error| uniform on [0, 0.2]: the share beyond eta is 1 - 5 eta
        predictions = (1 + rng.uniform(0, 0.2, 80)).tolist()
        result = relative_error(predictions, [1.0] * 80, delta=0.1, confidence=0.9)
        held += 1 - 5 * result.eta <= result.delta_upper
        strict = guaranteed_error(predictions, [1.0] * 80, delta=0.1, confidence=0.9)
        held_strict += 1 - 5 * strict.eta <= 0.1
    assert abs(held / num_draws - 0.9) <= 5 * math.sqrt(0.9 * 0.1 / num_draws)
    assert held_strict / num_draws >= 0.9 - 5 * math.sqrt(0.9 * 0.1 / num_draws)


def test_too_few_configurations_guarantee_nothing():
    assert guaranteed_error([1.0] * 58, [1.0] * 58).eta == math.inf
    assert guaranteed_error([1.0] * 59, [1.0] * 59).eta == 0.0


def test_nonsense_is_refused():
    with pytest.raises(CostError, match="2 predictions and 1 latencies"):
        smallest_kappa([1.0, 2.0], [1.0])
    with pytest.raises(CostError, match="eps is"):
        smallest_kappa([1.0], [1.0], eps_ms=-1.0)
    with pytest.raises(CostError, match="above 0"):
        relative_error([0.0], [1.0])
