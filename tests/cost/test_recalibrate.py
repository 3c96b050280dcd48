"""Recalibration: what few runs may change, monotone whatever they say, the same in numbers and tensors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from apportion.cost.recalibrate import Affine, Isotonic, Margin, recalibrate, recalibration_from_json
from apportion.cost.sample import CostError

ms = st.floats(0.5, 50.0)
runs = st.lists(st.tuples(ms, ms), min_size=1, max_size=12)
HOWS = ["affine", "isotonic", "margin"]


@pytest.mark.parametrize("how", HOWS)
@settings(deadline=None)
@given(rows=runs, one=st.floats(0.1, 100.0), other=st.floats(0.1, 100.0))
def test_a_correction_never_turns_an_order_round(how, rows, one, other):
    correction = recalibrate(*zip(*rows, strict=True), how)
    assert correction(min(one, other)) <= correction(max(one, other)) * (1 + 1e-9) + 1e-12
    assert recalibration_from_json(json.loads(json.dumps(correction.to_json()))) == correction
    point = torch.tensor([one, other], dtype=torch.float64)
    np.testing.assert_allclose(correction.tensor(point), [correction(one), correction(other)], rtol=1e-9, atol=1e-12)


def test_an_affine_drift_is_found_from_many_runs_and_trusted_little_from_one():
    predictions = np.linspace(2.0, 20.0, 40)
    found = Affine.fit(predictions.tolist(), (1.5 + 1.3 * predictions).tolist())
    assert found.offset_ms == pytest.approx(1.5, rel=0.1)
    assert found.slope == pytest.approx(1.3, rel=0.01)
    single = Affine.fit([10.0], [13.0])
    assert 12.8 < single(10.0) < 13.0  # nearly reached, and mostly by the slope
    assert single.slope - 1 > abs(single.offset_ms) / 10.0
    same = Affine.fit([4.0, 8.0], [4.0, 8.0])
    assert (same.offset_ms, same.slope) == pytest.approx((0.0, 1.0), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_affine_fit_is_the_minimum_of_its_objective(seed):
    rng = np.random.default_rng(seed)
    predicted, latency = rng.uniform(1, 10, 6), rng.uniform(1, 10, 6)
    middle = np.median(latency)

    def objective(x):
        shrink = (0.02 / 0.3) ** 2 * (x[1] - 1) ** 2 + (0.02 / 0.1) ** 2 * (x[0] / middle) ** 2
        return np.sum(((x[0] + x[1] * predicted) / latency - 1) ** 2) + shrink

    found = Affine.fit(predicted.tolist(), latency.tolist())
    best = minimize(objective, [0.0, 1.0], bounds=[(None, None), (0.0, None)], method="L-BFGS-B", tol=1e-14)
    assert objective([found.offset_ms, found.slope]) <= best.fun + 1e-9


def test_isotonic_follows_a_bend_and_goes_on_in_proportion():
    predictions = [1.0, 2.0, 3.0, 4.0]
    found = Isotonic.fit(predictions, [1.0, 2.0, 6.0, 8.0])
    assert found(3.5) == pytest.approx(7.0)
    assert found(8.0) == pytest.approx(16.0)
    assert found(0.5) == pytest.approx(0.5)
    assert found.scale == pytest.approx(2.0)


def test_a_margin_holds_on_its_runs_or_at_its_rate():
    predictions, latencies = [1.0] * 19, [1 + i / 100 for i in range(19)]
    assert Margin.fit(predictions, latencies).factor == pytest.approx(1.18)
    assert Margin.fit(predictions, latencies, alpha=0.1).factor == pytest.approx(1.17)
    with pytest.raises(CostError, match="too few"):
        Margin.fit([1.0], [1.0], alpha=0.1)


def test_corrections_that_could_fall_are_refused():
    for wrong in ({"kind": "affine", "offset_ms": 0.0, "slope": -1.0}, {"kind": "margin", "factor": math.inf}):
        with pytest.raises(CostError):
            recalibration_from_json(wrong)
    with pytest.raises(CostError, match="not falling"):
        recalibration_from_json({"kind": "isotonic", "inputs_ms": [1.0, 2.0], "outputs_ms": [2.0, 1.0]})
    with pytest.raises(CostError, match="affine, isotonic and margin"):
        recalibration_from_json({"kind": "cubic"})
    with pytest.raises(CostError, match="affine, isotonic or margin"):
        recalibrate([1.0], [1.0], "cubic")
