"""Multipliers: projected ascent, clamped, damped where constraints hold, the same after a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.multipliers import Multipliers

residuals = st.lists(st.lists(st.floats(-5.0, 5.0), min_size=3, max_size=3), min_size=1, max_size=30)


@settings(deadline=None)
@given(residuals)
def test_plain_multipliers_are_projected_ascent(rows):
    prices, expected = Multipliers((3,), rate=0.3, limit=2.0), np.zeros(3)
    for row in rows:
        expected = np.minimum(np.maximum(expected + 0.3 * np.array(row), 0.0), 2.0)
        np.testing.assert_array_equal(prices.update(row), expected)


@settings(deadline=None)
@given(residuals, st.integers(0, 29))
def test_a_run_resumed_from_json_goes_on_as_if_never_stopped(rows, stop):
    options = {"rate": 0.3, "limit": 2.0, "window": 3, "damping": 0.5, "pi": (0.7, 1.0)}
    whole, first, second = (Multipliers((3,), **options) for _ in range(3))
    for row in rows:
        whole.update(row)
    for row in rows[:stop]:
        first.update(row)
    second.load(json.loads(json.dumps(first.state())))
    for row in rows[stop:]:
        second.update(row)
    assert second.state() == whole.state()


def test_a_multiplier_with_slack_over_the_whole_window_is_damped_and_its_window_starts_again():
    prices = Multipliers((2,), rate=1e-9, limit=10.0, window=2, damping=0.5)
    prices.load({"shape": [2], "values": [4.0, 4.0], "last": [0.0, 0.0], "quiet": [0, 0]})
    told = [prices.update([-1.0, (-1.0) ** step]) for step in range(4)]  # the second never has slack twice in a row
    np.testing.assert_allclose(np.array(told)[:, 0], [4.0, 2.0, 2.0, 1.0], atol=1e-7)
    np.testing.assert_allclose(np.array(told)[:, 1], 4.0, atol=1e-7)


def test_a_damping_of_nought_resets():
    prices = Multipliers((1,), rate=1.0, limit=10.0, window=1, damping=0.0)
    prices.update([3.0])
    assert prices.update([-0.1]).tolist() == [0.0]


def test_gains_answer_a_change_at_once_and_a_lasting_violation_by_the_integral():
    prices = Multipliers((1,), rate=1.0, limit=100.0, pi=(2.0, 0.5))
    assert prices.update([1.0]).tolist() == [0.5]  # nothing before it, so no change
    assert prices.update([3.0]).tolist() == [0.5 + 1.5 + 4.0]
    assert prices.update([3.0]).tolist() == [6.0 + 1.5]


def test_entries_that_were_not_looked_at_stay():
    prices = Multipliers((2, 2), rate=1.0, limit=10.0)
    prices.update(1.0)
    told = prices.update(torch.full((2, 2), 2.0, requires_grad=True), where=[[True, False], [False, False]])
    assert told.tolist() == [[3.0, 1.0], [1.0, 1.0]]


def test_bad_residuals_and_options_are_refused():
    prices = Multipliers((1,), rate=1.0, limit=10.0)
    with pytest.raises(ValueError, match="not finite"):
        prices.update([float("nan")])
    assert prices.values.tolist() == [0.0]
    with pytest.raises(ValueError, match="rate 0"):
        Multipliers((1,), rate=0, limit=1.0)
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        Multipliers((2,), rate=1.0, limit=1.0).load(prices.state())
