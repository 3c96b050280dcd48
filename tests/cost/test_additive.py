"""The additive latency model on instances whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.cost.additive import AdditiveCost

WORKS = [
    {"attention": 4.0, "mlp": 8.0},
    {"attention": 2.0, "mlp": 8.0},
    {"attention": 4.0, "mlp": 4.0},
    {"attention": 1.0, "mlp": 1.0},
]
prices = st.floats(0.0, 10.0)


@given(intercept=st.floats(0.1, 10.0), attention=prices, mlp=prices)
def test_an_additive_law_is_recovered(intercept, attention, mlp):
    latencies = [intercept + attention * work["attention"] + mlp * work["mlp"] for work in WORKS]
    cost = AdditiveCost.fit(WORKS, latencies)
    for work, latency in zip(WORKS, latencies, strict=True):
        assert cost.predict(work) == pytest.approx(latency, rel=1e-6)
    assert cost.max_rel_error < 1e-6


@given(st.lists(st.floats(0.5, 20.0), min_size=4, max_size=4), st.sampled_from(["attention", "mlp"]), st.floats(0, 5))
def test_more_work_never_predicts_less_time_whatever_was_measured(latencies, kind, extra):
    cost = AdditiveCost.fit(WORKS, latencies)
    work = WORKS[1]
    assert cost.predict({**work, kind: work[kind] + extra}) >= cost.predict(work)


def test_the_worst_error_on_its_own_points_is_reported():
    works = [{"mlp": 1.0}, {"mlp": 2.0}, {"mlp": 3.0}]
    cost = AdditiveCost.fit(works, [1.0, 4.0, 3.0])
    errors = [abs(cost.predict(work) / latency - 1) for work, latency in zip(works, [1.0, 4.0, 3.0], strict=True)]
    assert cost.max_rel_error == pytest.approx(max(errors))


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError, match="one latency per work"):
        AdditiveCost.fit(WORKS, [1.0])
