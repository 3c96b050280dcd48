"""The accountant against the mechanism's definition, published values and Rényi's bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from apportion.numerics.privacy import combined_shift, delta_of, epsilon_of, multiplier_for, renyi_epsilon


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("sigma", [0.7, 1.0, 4.0])
def test_delta_is_the_hockey_stick_divergence(epsilon, sigma):
    """By definition: the integral of max(0, p - e^ε q) for Gaussians one sensitivity apart."""

    def density(x):
        return max(0.0, norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma))

    value, _ = quad(density, -10 * sigma, 1 + 10 * sigma, limit=400, points=[sigma**2 * epsilon + 0.5])
    assert delta_of(epsilon, [sigma]) == pytest.approx(value, abs=1e-7)


def test_several_releases_are_one_with_less_noise():
    assert combined_shift([2.0, 2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert epsilon_of(1e-5, [2.0] * 4) == pytest.approx(epsilon_of(1e-5, [1.0]))


def test_the_published_multiplier_of_the_gaussian_mechanism():
    """σ = √(2 log(1.25/δ))/ε (Dwork and Roth, 2014, Theorem A.1, ε < 1) suffices; the exact one is smaller."""
    epsilon, delta = 0.9, 1e-5
    classic = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    exact = multiplier_for(epsilon, delta)
    assert delta_of(epsilon, [classic]) <= delta
    assert exact < classic
    assert delta_of(epsilon, [exact]) == pytest.approx(delta, rel=1e-3)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.5, 20), st.floats(1e-8, 1e-2), st.integers(1, 5))
def test_renyi_is_never_below_the_exact_epsilon_and_not_far_above(sigma, delta, count):
    exact, renyi = epsilon_of(delta, [sigma] * count), renyi_epsilon(delta, [sigma] * count)
    assert exact <= renyi + 1e-6
    assert renyi <= 1.3 * exact + 0.3


@settings(deadline=None, max_examples=30)
@given(st.floats(0.1, 10), st.floats(1e-8, 1e-2), st.integers(1, 4))
def test_the_multiplier_keeps_what_it_promises(epsilon, delta, count):
    sigma = multiplier_for(epsilon, delta, count)
    assert epsilon_of(delta, [sigma] * count) <= epsilon + 1e-6


@pytest.mark.parametrize("call", [lambda: epsilon_of(0, [1]), lambda: delta_of(1, []), lambda: multiplier_for(0, 0.1)])
def test_senseless_input_is_refused(call):
    with pytest.raises(ValueError, match="must be"):
        call()


def test_empirical_leakage_stays_under_the_bound():
    """The best test between two neighbours, over many draws, does no better than (ε, δ) allows."""
    sigma, generator = 1.5, np.random.default_rng(0)
    without, with_one = sigma * generator.standard_normal(200_000), 1 + sigma * generator.standard_normal(200_000)
    epsilon = 0.5
    for threshold in np.linspace(-2, 3, 21):
        false, true = (without > threshold).mean(), (with_one > threshold).mean()
        assert true <= math.exp(epsilon) * false + delta_of(epsilon, [sigma]) + 0.01
