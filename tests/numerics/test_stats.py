"""Robust statistics against their definitions and known laws."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.stats import bootstrap_interval, mad, mean_stderr, median_stderr, normal_quantile, quantile

samples = st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=60)


@given(samples, st.floats(0, 1))
def test_quantiles_lie_between_the_extremes_and_rise_with_q(values, q):
    assert min(values) <= quantile(values, q) <= max(values)
    assert quantile(values, q / 2) <= quantile(values, q) + 1e-9 * max(map(abs, values), default=0)


@given(samples)
def test_half_quantile_is_the_median(values):
    assert math.isclose(quantile(values, 0.5), statistics.median(values), rel_tol=1e-9, abs_tol=1e-9)


def test_mad_agrees_with_the_standard_deviation_of_a_normal_law():
    rng = random.Random(0)
    values = [rng.gauss(5, 2) for _ in range(20_000)]
    assert abs(mad(values) - 2) < 0.1  # its own standard error is about 0.02 here


def test_median_interval_covers_the_true_median_as_often_as_it_says():
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        values = [rng.expovariate(1.0) for _ in range(40)]  # skewed: no normal law needed
        covered += abs(statistics.median(values) - math.log(2)) <= 1.96 * median_stderr(values)
    # 95 % by construction, measured from the median and not from the asymmetric order statistics
    assert covered / 2000 > 0.93


def test_median_error_is_unknown_for_few_samples():
    assert median_stderr([1.0] * 5) == math.inf


@given(samples, st.floats(-100, 100), st.floats(0.1, 10))
def test_bootstrap_interval_holds_the_median_and_moves_with_the_samples(values, shift, scale):
    low, high = bootstrap_interval(values, num_draws=100)
    assert min(values) <= low <= statistics.median(values) <= high <= max(values)
    moved = bootstrap_interval([shift + scale * value for value in values], num_draws=100)
    assert moved == pytest.approx((shift + scale * low, shift + scale * high), rel=1e-6, abs=1e-6)


def test_bootstrap_interval_is_that_of_resamples_written_out():
    rng = random.Random(3)
    for n in (12, 25):
        values = [rng.expovariate(1.0) for _ in range(n)]
        medians = [statistics.median(rng.choices(values, k=n)) for _ in range(20_000)]
        wide = (quantile(medians, 0.01), quantile(medians, 0.99))
        narrow = (quantile(medians, 0.05), quantile(medians, 0.95))
        low, high = bootstrap_interval(values, num_draws=5000)
        assert wide[0] <= low <= narrow[0]  # 2.5 % of draws lie below it, give or take 0.2 %
        assert narrow[1] <= high <= wide[1]


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = random.Random(4)
    covered = 0
    for trial in range(500):
        low, high = bootstrap_interval([rng.expovariate(1.0) for _ in range(40)], num_draws=200, seed=trial)
        covered += low <= math.log(2) <= high
    # the percentile interval is known to fall a little short at few samples; five standard errors are 5 %
    assert covered / 500 > 0.89


def test_bootstrap_interval_is_a_function_of_its_seed():
    rng = random.Random(5)
    values = [rng.random() for _ in range(30)]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values[::-1], seed=1)
    assert bootstrap_interval(values, seed=1, num_draws=50) != bootstrap_interval(values, seed=2, num_draws=50)


def test_widened_error_of_few_values_keeps_the_one_sided_level():
    rng = random.Random(2)
    missed = 0
    for _ in range(4000):
        values = [rng.gauss(0, 1) for _ in range(3)]
        missed += statistics.fmean(values) + normal_quantile(0.95) * mean_stderr(values) < 0
    assert abs(missed / 4000 - 0.05) < 5 * math.sqrt(0.05 * 0.95 / 4000)


def test_spread_of_one_value_is_unknown():
    assert mean_stderr([3.0]) == math.inf


@pytest.mark.parametrize(("level", "z"), [(0.5, 0.0), (0.975, 1.959964)])
def test_normal_quantile(level, z):
    assert abs(normal_quantile(level) - z) < 1e-5
