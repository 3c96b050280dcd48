"""Radii: the anytime ones hold at every count on simulated streams, the fixed one does not; spending sums to delta."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.multiple import binomial_upper
from apportion.numerics.radius import (
    bernstein_radius,
    fixed_radius,
    mixture_radius,
    mixture_rho,
    spend,
    stitched_radius,
    student_radius,
    sub_gaussian_scale,
    union_radius,
)

DELTA, LENGTH, STREAMS = 0.1, 400, 2000
ANYTIME = {"union": union_radius, "stitched": stitched_radius, "mixture": mixture_radius}


def ever_missed(streams, radius_N, first=1):
    """Share of streams whose running mean leaves the radius at some count."""
    counts = np.arange(1, streams.shape[1] + 1)
    off = np.abs(np.cumsum(streams, axis=1) / counts)[:, first - 1 :] > radius_N[..., first - 1 :]
    return int(off.any(axis=1).sum())


@pytest.fixture(scope="module")
def streams():
    return np.random.default_rng(0).normal(size=(STREAMS, LENGTH))


@pytest.mark.parametrize("name", ANYTIME)
def test_anytime_radii_hold_at_every_count(name, streams):
    radius_N = np.array([ANYTIME[name](n, 1.0, DELTA) for n in range(1, LENGTH + 1)])
    missed = ever_missed(streams, radius_N)
    # the exact binomial test at 1e-6 that the share of misses is at most delta
    assert 1.0 - binomial_upper(STREAMS - missed, STREAMS, 1.0 - 1e-6) <= DELTA


def test_the_fixed_radius_does_not_hold_at_every_count(streams):
    radius_N = np.array([fixed_radius(n, 1.0, DELTA) for n in range(1, LENGTH + 1)])
    assert ever_missed(streams, radius_N) / STREAMS > 1.5 * DELTA


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_student_radius_holds_at_every_count_whatever_the_scale(streams, scale):
    scaled = scale * streams
    counts = np.arange(1, LENGTH + 1)
    mean = np.cumsum(scaled, axis=1) / counts
    variance = (np.cumsum(scaled**2, axis=1) - counts * mean**2) / np.maximum(counts - 1, 1)
    one = np.array([student_radius(n, 1.0, DELTA) for n in range(1, LENGTH + 1)])
    with np.errstate(invalid="ignore"):
        missed = int((np.abs(mean)[:, 1:] > (np.sqrt(np.maximum(variance, 0)) * one)[:, 1:]).any(axis=1).sum())
    assert 1.0 - binomial_upper(STREAMS - missed, STREAMS, 1.0 - 1e-6) <= DELTA
    assert missed > 0  # and it is not vacuous


def test_bernstein_radius_holds_for_bounded_samples_of_small_variance():
    rng = np.random.default_rng(1)
    streams = (rng.random((STREAMS, LENGTH)) < 0.02).astype(float)
    counts = np.arange(1, LENGTH + 1)
    mean = np.cumsum(streams, axis=1) / counts
    variance = mean * (1 - mean) * counts / np.maximum(counts - 1, 1)
    radius = np.array(
        [[bernstein_radius(n, v, 1.0, DELTA) for n, v in zip(counts, row, strict=True)] for row in variance[:100]]
    )
    assert not (np.abs(mean[:100] - 0.02) > radius).any()
    # at a small variance it beats the radius that knows only the width of the interval
    assert bernstein_radius(4000, 0.02, 1.0, DELTA) < union_radius(4000, 0.5, DELTA)


@given(st.integers(1, 10_000), st.floats(1e-9, 0.5), st.floats(0.01, 10.0))
def test_radii_scale_with_sigma_and_the_fixed_one_is_the_narrowest(count, delta, sigma):
    for radius in (union_radius, stitched_radius, mixture_radius):
        assert radius(count, sigma, delta) == pytest.approx(sigma * radius(count, 1.0, delta))
        assert radius(count, sigma, delta) > fixed_radius(count, sigma, delta)


@given(st.integers(1, 1000), st.floats(1e-9, 0.5))
def test_rho_makes_the_mixture_smallest_where_asked(best_at, delta):
    def radius(rho):
        return math.sqrt((best_at + rho) * math.log((best_at + rho) / (rho * delta**2)))

    rho = mixture_rho(best_at, delta)
    assert radius(rho) <= min(radius(rho * 1.1), radius(rho / 1.1))


def test_student_radius_tends_to_the_mixture_with_a_known_scale():
    assert student_radius(20_000, 1.0, 0.05) == pytest.approx(mixture_radius(20_000, 1.0, 0.05), rel=0.01)
    assert student_radius(1, 0.0, 0.05) == student_radius(2, 1.0, 1e-9) == math.inf


@given(st.floats(1e-6, 1.0), st.integers(1, 500))
def test_spending_never_exceeds_delta(delta, number):
    assert math.fsum(spend(delta, i) for i in range(1, number + 1)) == pytest.approx(delta * number / (number + 1))


def test_the_scale_of_a_population_is_that_of_two_points_and_never_below_its_deviation():
    assert sub_gaussian_scale(np.array([-2.0, 2.0])) == pytest.approx(2.0)  # known: half the distance
    rng = np.random.default_rng(2)
    skewed = rng.exponential(size=500)
    skewed -= skewed.mean()
    sigma = sub_gaussian_scale(skewed)
    assert sigma > skewed.std()
    for t in (-3.0, -0.5, 0.1, 1.0, 2.0):
        assert np.exp(t * skewed).mean() <= np.exp(sigma**2 * t**2 / 2) * (1 + 1e-3)
