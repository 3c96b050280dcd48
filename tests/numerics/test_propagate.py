"""Error propagation: exact against brute force; the paper's first-order form is valid where it is said to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.numerics.propagate import drift, first_order_band, first_order_valid, safe_band, true_band

TAU, ETA = st.floats(0.0, 0.5), st.floats(0.0, 0.6)


def brute(tau, eta, anchor_eta):
    """Extremes of g'/g over a grid of errors and of estimates inside the band."""
    error = np.linspace(-1, 1, 41)
    anchor_hat = 1 + anchor_eta * error  # the true anchor costs 1
    estimate = anchor_hat[:, None] * (1 + tau * error)
    true = estimate[..., None] / (1 + eta * error)
    return 1 - true.min(), true.max() - 1


@given(TAU, ETA, st.sampled_from([None, 0.0]))
def test_true_band_is_what_brute_force_finds(tau, eta, anchor_eta):
    below, above = brute(tau, eta, eta if anchor_eta is None else anchor_eta)
    band = true_band(tau, eta, anchor_eta=anchor_eta)
    assert band.below == pytest.approx(below, abs=1e-12)
    assert band.above == pytest.approx(above, abs=1e-12)


@given(TAU, ETA)
def test_the_first_order_form_covers_the_exact_band_exactly_where_it_says(tau, eta):
    slack = first_order_band(tau, eta) - true_band(tau, eta).widest
    if abs(slack) > 1e-9:
        assert first_order_valid(tau, eta) == (slack > 0)


@given(TAU, ETA)
def test_a_safe_estimate_keeps_the_true_cost_within_the_tolerance(tau, eta):
    band = safe_band(tau, eta)
    if band is None:
        assert eta > tau
        return
    for estimate in (1 - band.below, 1 + band.above):
        for error in (-eta, eta):
            assert abs(estimate / (1 + error) - 1) <= tau + 1e-12 or estimate == 0


def test_drift_compounds_step_by_step():
    assert drift(0.1, 2).above == pytest.approx(0.21)
    assert drift(0.1, 2).below == pytest.approx(0.19)
    assert drift(0.1, 0) == (0.0, 0.0)


@pytest.mark.parametrize(("tau", "eta"), [(-0.1, 0.0), (1.0, 0.0), (0.1, 1.0), (float("nan"), 0.0)])
def test_tolerances_and_errors_outside_their_range_are_refused(tau, eta):
    with pytest.raises(ValueError, match="must lie in"):
        true_band(tau, eta)
