"""Knapsack: the exact choice against all subsets, the relaxation above it, rounding below it and within the room."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.knapsack import Knapsack, round_within, rounding_gap

amounts = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.01, 10.0)), min_size=1, max_size=8)


def knapsack(items, share):
    value_L, cost_L = np.array(items).T
    return Knapsack(value_L, cost_L, share * float(cost_L.sum()))


@settings(deadline=None, max_examples=50)
@given(amounts, st.floats(0.05, 1.0))
def test_the_exact_choice_is_the_best_subset_and_lies_between_rounding_and_relaxation(items, share):
    problem = knapsack(items, share)
    subsets = (np.array(bits, dtype=float) for bits in itertools.product((0, 1), repeat=len(items)))
    best = max(problem.value(subset) for subset in subsets if problem.fits(subset))
    exact, rounded = problem.exact(), round_within(problem, problem.relaxed())
    close = 1e-6 * problem.value_L.sum()  # the solver's tolerance on values
    assert problem.fits(exact)
    assert problem.fits(rounded)
    assert problem.value(exact) >= best - close
    assert problem.value(problem.relaxed()) >= best - close
    assert best / 2 - close <= problem.value(rounded) <= best


@settings(deadline=None, max_examples=50)
@given(amounts, st.floats(0.05, 1.0), st.integers(0, 1000))
def test_rounding_never_exceeds_the_room_whatever_the_shares(items, share, seed):
    problem = knapsack(items, share)
    assert problem.fits(round_within(problem, np.random.default_rng(seed).uniform(size=len(items))))


def test_the_relaxation_takes_the_best_value_per_cost_first():
    problem = Knapsack(np.array([6.0, 5.0, 4.0]), np.array([2.0, 2.5, 4.0]), 3.25)
    np.testing.assert_allclose(problem.relaxed(), [1.0, 0.5, 0.0], atol=1e-9)


def test_half_of_the_value_is_all_that_rounding_promises():
    alone = Knapsack(np.array([1.1, 10.0]), np.array([1.0, 10.0]), 10.0)  # the dense item keeps the large one out
    assert rounding_gap(alone) == 0.0  # but the best item alone is a candidate
    pair = Knapsack(np.array([1.02, 1.0, 1.0]), np.array([1.01, 1.0, 1.0]), 2.0)
    assert rounding_gap(pair) == pytest.approx(1 - 1.02 / 2)


def test_bad_instances_are_refused():
    with pytest.raises(ValueError, match="costs > 0"):
        Knapsack(np.ones(2), np.zeros(2), 1.0)
    with pytest.raises(ValueError, match="leaves 0"):
        Knapsack(np.ones(2), np.ones(2), 0.0)
