"""Calibration error: nought for honest confidences, the gap itself for constant ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.calibration import calibration_error


@given(st.floats(0, 1), st.lists(st.booleans(), min_size=1, max_size=50))
def test_a_constant_confidence_is_off_by_its_gap(confidence, answers):
    right_N = np.array(answers)
    error = calibration_error(np.full(len(right_N), confidence), right_N)
    assert abs(error - abs(confidence - right_N.mean())) < 1e-9


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_it_is_a_share_whatever_the_bins(seed, num_bins):
    rng = np.random.default_rng(seed)
    error = calibration_error(rng.random(40), rng.random(40) < 0.5, num_bins=num_bins)
    assert 0 <= error <= 1


def test_honest_confidences_have_almost_none():
    rng = np.random.default_rng(0)
    confidence_N = rng.random(200_000)
    error = calibration_error(confidence_N, rng.random(200_000) < confidence_N)
    # each of 15 bins has a gap of standard error about 0.5 / sqrt(13,333)
    assert error < 5 * 0.5 / np.sqrt(200_000 / 15)


def test_more_bins_never_hide_a_gap_that_fewer_show():
    confidence_N = np.array([0.95, 0.55])
    right_N = np.array([False, True])
    assert calibration_error(confidence_N, right_N, num_bins=1) <= calibration_error(confidence_N, right_N, num_bins=2)


@pytest.mark.parametrize("confidence", [[1.2], [-0.1], [0.5, 0.5], []])
def test_senseless_input_is_refused(confidence):
    with pytest.raises(ValueError, match="got"):
        calibration_error(np.array(confidence), np.array([True] * (1 if confidence else 0)))
