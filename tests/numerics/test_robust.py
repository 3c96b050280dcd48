"""Weights over losses: the tail mean, the worst in a divergence ball, the worst group."""

import math

import cvxpy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.cvar import cvar
from apportion.numerics.robust import GroupWeights, cvar_weights, kl_weights

losses = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=12).map(np.array)


@given(losses, st.floats(0, 0.99))
def test_weighted_losses_are_the_cvar(loss_E, beta):
    weight_E = cvar_weights(loss_E, beta)
    assert weight_E.min() >= 0
    assert weight_E.sum() == pytest.approx(1)
    assert weight_E @ loss_E == pytest.approx(cvar(loss_E.tolist(), beta), abs=1e-6)


@pytest.mark.parametrize("radius", [0.05, 0.5, 1.2])
def test_kl_weights_are_the_worst_case(radius):
    loss_E = np.array([0.3, 1.0, 2.5, 0.1, 0.9])
    q = cvxpy.Variable(5)
    constraints = [cvxpy.sum(q) == 1, cvxpy.sum(cvxpy.rel_entr(q, np.full(5, 0.2))) <= radius]
    best = cvxpy.Problem(cvxpy.Maximize(q @ loss_E), constraints).solve()
    assert kl_weights(loss_E, radius) @ loss_E == pytest.approx(best, rel=1e-4)


@given(losses, st.floats(0, 3))
def test_kl_weights_stay_in_the_ball(loss_E, radius):
    weight_E = kl_weights(loss_E, radius)
    some_E = weight_E[weight_E > 0]
    assert (some_E * np.log(some_E * len(loss_E))).sum() <= radius + 1e-6
    assert weight_E @ loss_E >= loss_E.mean() - 1e-9


def test_a_large_ball_holds_the_worst_alone():
    assert kl_weights(np.array([1.0, 3.0, 2.0]), math.log(3)).tolist() == [0.0, 1.0, 0.0]


def test_the_worse_group_gains_weight():
    groups = GroupWeights(2, rate=0.5)
    for _ in range(20):
        weight_E = groups.update(np.array([0.1, 0.1, 2.0]), np.array([0, 0, 1]))
    assert weight_E[2] > 0.9
    assert weight_E.sum() == pytest.approx(1)


@pytest.mark.parametrize("wrong", [lambda: cvar_weights(np.ones(2), 1.0), lambda: kl_weights(np.ones(2), -1.0)])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"radius|beta"):
        wrong()
