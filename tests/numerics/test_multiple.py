"""Binomial limits against the binomial law itself, and Holm's correction against its closed test."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from apportion.numerics.multiple import binomial_upper, holm, one_sided_p, tolerance_rank


@settings(deadline=None)
@given(st.integers(1, 200), st.data(), st.floats(0.5, 0.99))
def test_at_the_upper_limit_so_few_events_are_just_too_rare(num_trials, data, confidence):
    num_events = data.draw(st.integers(0, num_trials - 1))
    limit = binomial_upper(num_events, num_trials, confidence)
    assert binom.cdf(num_events, num_trials, limit) == pytest.approx(1 - confidence, abs=1e-6)


def test_all_events_leave_no_limit():
    assert binomial_upper(5, 5, 0.95) == 1.0


@settings(deadline=None)
@given(st.integers(1, 150), st.floats(0.02, 0.5), st.floats(0.5, 0.99))
def test_the_tolerance_rank_is_the_first_that_the_binomial_allows(num_samples, delta, confidence):
    rank = tolerance_rank(num_samples, delta, confidence)
    good = [k for k in range(1, num_samples + 1) if binom.cdf(k - 1, num_samples, 1 - delta) >= confidence + 1e-9]
    near = [k for k in range(1, num_samples + 1) if binom.cdf(k - 1, num_samples, 1 - delta) >= confidence - 1e-9]
    assert min(near, default=num_samples + 1) <= rank <= min(good, default=num_samples + 1)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), st.floats(0.01, 0.2))
def test_holm_is_the_closed_test_of_bonferroni(p_values, level):
    indices = range(len(p_values))
    subsets = [set(s) for size in range(1, len(p_values) + 1) for s in itertools.combinations(indices, size)]
    closed = [all(min(p_values[k] for k in s) <= level / len(s) for s in subsets if i in s) for i in indices]
    assert holm(p_values, level) == closed


def test_exact_readings_need_no_test():
    assert one_sided_p(1e-9, 0.0) == 0.0
    assert one_sided_p(0.0, 0.0) == 1.0
    assert one_sided_p(0.0, 1.0) == pytest.approx(0.5)
    assert one_sided_p(3.0, 1.0) == pytest.approx(0.5 * math.erfc(3 / math.sqrt(2)))
