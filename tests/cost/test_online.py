"""Online updates: the correction equals the batch fit and follows drift; the running bound keeps its rate."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.online import AdaptiveBound, OnlineAffine
from apportion.cost.recalibrate import Affine
from apportion.cost.sample import CostError


def test_without_forgetting_it_is_the_batch_fit():
    rng = np.random.default_rng(0)
    predicted, latency = rng.uniform(1, 10, 9), rng.uniform(5, 10, 9)
    state = OnlineAffine(float(np.median(latency)), forgetting=1.0)
    for p, y in zip(predicted.tolist(), latency.tolist(), strict=True):
        state = state.update(p, y)
    batch = Affine.fit(predicted.tolist(), latency.tolist())
    assert state.correction().offset_ms == pytest.approx(batch.offset_ms, rel=1e-6)
    assert state.correction().slope == pytest.approx(batch.slope, rel=1e-6)
    assert OnlineAffine.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_forgetting_follows_a_device_that_slows_down():
    rng = np.random.default_rng(1)
    states = {forgetting: OnlineAffine(10.0, forgetting=forgetting) for forgetting in (1.0, 0.9)}
    for step in range(120):
        predicted = float(rng.uniform(5, 15))
        latency = predicted * (1.0 if step < 60 else 1.4)
        states = {forgetting: state.update(predicted, latency) for forgetting, state in states.items()}
    error = {forgetting: abs(state.correction()(10.0) / 14.0 - 1) for forgetting, state in states.items()}
    assert error[0.9] < 0.01 < 0.05 < error[1.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=120), st.floats(0.05, 0.4), st.floats(0.01, 0.2))
def test_the_share_of_misses_tends_to_alpha_on_any_stream(ratios, alpha, gamma):
    state = AdaptiveBound(alpha, gamma, scores=(1.0, 1.1))
    for ratio in ratios:
        state = state.update(2.0, 2.0 * ratio)
    limit = (max(alpha, 1 - alpha) + gamma) / (len(ratios) * gamma)
    assert abs(state.num_missed / state.count - alpha) <= limit + 1e-9
    assert AdaptiveBound.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_drift_that_breaks_a_fixed_bound_does_not_break_the_running_one():
    rng = np.random.default_rng(2)
    start = tuple(np.exp(0.02 * rng.standard_normal(100)).tolist())
    state, fixed_misses = AdaptiveBound(0.1, 0.02, scores=start), 0
    fixed = AdaptiveBound(0.1, scores=start).upper(1.0)
    for step in range(1500):
        ratio = float(np.exp(0.02 * rng.standard_normal() + 1e-4 * step))
        fixed_misses += ratio > fixed
        state = state.update(1.0, ratio)
    assert fixed_misses / 1500 > 0.5
    assert state.num_missed / state.count == pytest.approx(0.1, abs=(0.9 + 0.02) / (1500 * 0.02) + 1e-9)


def test_out_of_range_levels_promise_all_or_nothing():
    assert AdaptiveBound(scores=(1.0,), alpha_now=-0.01).upper(1.0) == math.inf
    assert AdaptiveBound(scores=(1.0,), alpha_now=1.01).upper(1.0) == 0.0
    assert AdaptiveBound().upper(1.0) == math.inf
    with pytest.raises(CostError, match="gamma above 0"):
        AdaptiveBound(gamma=0.0)
    with pytest.raises(CostError, match="forgetting"):
        OnlineAffine(1.0, forgetting=0.0)
