"""Methods are compared at one measured latency: lines between points, nothing under the first, paired by episode."""

import runpy

import numpy as np
import pytest

frontier = runpy.run_path("benchmarks/adapt_text/frontier.py")
Curve, meet = frontier["Curve"], frontier["meet"]


def line(latency_K, slope_N, offset_N=0.0):
    """A method whose every episode is a straight line over the logarithm of latency."""
    return Curve.of(latency_K, [offset_N + np.log(at) * np.asarray(slope_N) for at in latency_K])


@pytest.mark.parametrize("latency", [0.15, 0.2, 0.3217, 0.99, 1.0])
def test_between_points_every_episode_is_a_line_over_the_logarithm(latency):
    slope_N = np.array([0.1, 0.0, -0.3])
    found_N = line([0.5, 0.15, 1.0], slope_N).at(latency)  # points in any order
    np.testing.assert_allclose(found_N, np.log(latency) * slope_N, atol=1e-12)


def test_under_the_smallest_latency_there_is_nothing_and_above_the_largest_the_last_point():
    curve = line([0.2, 0.8], [0.1, 0.2])
    assert curve.at(0.1999) is None
    np.testing.assert_array_equal(curve.at(0.9), curve.at(0.8))


def test_of_points_with_one_latency_the_last_given_counts():
    curve = Curve.of([0.2, 0.2, 0.4], [np.zeros(2), np.ones(2), np.ones(2)])
    np.testing.assert_array_equal(curve.at(0.2), np.ones(2))


def test_a_method_that_differs_only_in_latency_used_is_level():
    """Both lie on one line, so equal budgets would call the one that uses less of them the worse."""
    slope_N = np.array([0.4, 0.1, 0.3])
    ours, other = line([0.15, 0.3, 0.6, 1.0], slope_N), line([0.12, 0.25, 0.5, 1.0], slope_N)
    for at in ours.latency_K:
        left_N, right_N = meet(ours, other, at)
        np.testing.assert_allclose(left_N, right_N, atol=1e-12)


def test_a_method_that_begins_later_is_met_where_it_begins():
    slope_N = np.array([0.4, 0.1])
    ours, other = line([0.15, 0.3, 1.0], slope_N), line([0.2, 1.0], slope_N, offset_N=-0.1)
    left_N, right_N = meet(ours, other, 0.15)
    np.testing.assert_allclose(right_N, other.at(0.2))
    np.testing.assert_allclose(left_N - right_N, 0.1)


def test_a_method_that_begins_past_the_next_point_has_none():
    ours = line([0.15, 0.3, 1.0], [0.4])
    assert meet(ours, line([0.31, 1.0], [0.4]), 0.15) is None
    assert meet(ours, line([0.31, 1.0], [0.4]), 0.3) is not None


def test_the_area_of_a_line_is_its_middle():
    curve = line([0.25, 0.5, 1.0], [1.0, 3.0])
    np.testing.assert_allclose(curve.mean_from(0.25), 2 * np.log(0.5))
    np.testing.assert_allclose(curve.mean_from(0.36), 2 * np.log(0.6))
