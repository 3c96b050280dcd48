"""Primal-dual steps: the average approaches the known optimum, its multipliers the known prices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from apportion.numerics.multipliers import Multipliers
from apportion.numerics.primal_dual import kkt, primal_dual, project


@dataclass(frozen=True)
class Nearest:
    """The point nearest to (0.9, 0.1; 1, 1) with the levels summing to at most one: (0.9, 0.1; 0.5, 0.5), price 0.5."""

    noise: float = 0.0
    num_weights: int = 2
    num_levels: int = 2

    def gradient(self, point_D):
        return point_D - np.array([0.9, 0.1, 1.0, 1.0])

    def sampled_gradient(self, point_D, rng):
        return self.gradient(point_D) + self.noise * rng.normal(size=4)

    def constraints(self, point_D):
        return np.array([point_D[2] + point_D[3] - 1.0])

    def slopes(self, point_D):
        return np.array([[0.0, 0.0, 1.0, 1.0]])


OPTIMUM, PRICE = np.array([0.9, 0.1, 0.5, 0.5]), np.array([0.5])


def test_the_residuals_are_nought_at_the_optimum_and_tell_what_is_wrong_elsewhere():
    assert kkt(Nearest(), OPTIMUM, PRICE).worst == pytest.approx(0.0, abs=1e-12)
    greedy = kkt(Nearest(), np.array([0.9, 0.1, 1.0, 1.0]), np.zeros(1))
    assert (greedy.stationarity, greedy.feasibility, greedy.complementarity) == pytest.approx((0.0, 1.0, 0.0))
    timid = kkt(Nearest(), np.array([0.9, 0.1, 0.0, 0.0]), np.array([2.0]))
    assert (timid.stationarity, timid.feasibility, timid.complementarity) == pytest.approx((0.0, 0.0, 2.0))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_average_approaches_optimum_and_price(noise):
    found = primal_dual(Nearest(noise), 5_000, np.random.default_rng(0))
    # the spread of the average over draws is about noise / sqrt(T) = 0.014, the transient D / (eta T) about the same
    np.testing.assert_allclose(found.point_D, OPTIMUM, atol=0.08)
    np.testing.assert_allclose(found.multiplier_K, PRICE, atol=0.08)
    assert found.residuals.worst < 0.08


def test_controlled_multipliers_reach_the_same_prices():
    prices = Multipliers((1,), rate=0.01, limit=5.0, window=50, damping=0.9, pi=(5.0, 1.0))
    found = primal_dual(Nearest(), 2_000, np.random.default_rng(0), multipliers=prices)
    np.testing.assert_allclose(prices.values, PRICE, atol=0.02)
    assert found.residuals.feasibility < 0.05


def test_the_same_seed_gives_the_same_run():
    runs = [primal_dual(Nearest(1.0), 50, np.random.default_rng(3)).point_D for _ in range(2)]
    np.testing.assert_array_equal(*runs)


@settings(deadline=None)
@given(arrays(np.float64, 5, elements=st.floats(-3.0, 3.0)))
def test_projection_lands_in_the_set_and_stays(point_D):
    once = project(point_D, 3)
    assert once[:3].min() >= 0
    np.testing.assert_allclose(once[:3].sum(), 1.0, atol=1e-9)
    assert once[3:].min() >= 0
    assert once[3:].max() <= 1
    np.testing.assert_allclose(project(once, 3), once, atol=1e-9)
