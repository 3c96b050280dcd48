"""Tail risk against its variational definition and its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.cvar import cvar

losses = st.lists(st.floats(-100, 100), min_size=1, max_size=40)
betas = st.floats(0, 0.999)


def variational(values, beta, tau):
    return tau + sum(max(value - tau, 0) for value in values) / ((1 - beta) * len(values))


@given(losses, betas)
def test_it_is_the_least_of_the_variational_bound(values, beta):
    # eq. T2 is convex and piecewise linear in tau, so its minimum lies at one of the losses
    least = min(variational(values, beta, tau) for tau in values)
    assert math.isclose(cvar(values, beta), least, rel_tol=1e-6, abs_tol=1e-6)


@given(losses, betas)
def test_it_lies_between_mean_and_maximum_and_rises_with_beta(values, beta):
    risk = cvar(values, beta)
    assert sum(values) / len(values) - 1e-9 <= risk <= max(values) + 1e-9
    assert cvar(values, beta / 2) <= risk + 1e-6


@given(losses, betas, st.floats(0, 10), st.floats(-50, 50))
def test_it_moves_and_scales_with_the_losses(values, beta, scale, shift):
    moved = cvar([scale * value + shift for value in values], beta)
    assert math.isclose(moved, scale * cvar(values, beta) + shift, rel_tol=1e-6, abs_tol=1e-5)


def test_beta_zero_is_the_mean():
    assert cvar([1.0, 2.0, 6.0], 0) == 3.0


@pytest.mark.parametrize(("values", "beta"), [([], 0.5), ([1.0], 1.0), ([1.0], -0.1)])
def test_senseless_input_is_refused(values, beta):
    with pytest.raises(ValueError, match="CVaR needs"):
        cvar(values, beta)
