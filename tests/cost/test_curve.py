"""Curves: value, tensor, slope and JSON agree; monotone and convex by construction."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.cost.curve import Curve
from apportion.cost.sample import CostError

price = st.floats(0.0, 10.0)


@st.composite
def curves(draw):
    inner = sorted(draw(st.sets(st.sampled_from([0.1, 0.25, 0.4, 0.5, 0.75, 0.9]), max_size=4)))
    slopes = np.cumsum(draw(st.lists(price, min_size=len(inner) + 1, max_size=len(inner) + 1)))
    return Curve(draw(price), (*inner, 1.0), tuple(slopes.tolist()))


@settings(deadline=None)
@given(curves(), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_curve_never_falls_and_is_convex_once_awake(curve, one, other, mix):
    low, high = min(one, other), max(one, other)
    assert curve(low) <= curve(high) + 1e-12
    if low > 0:
        middle = mix * low + (1 - mix) * high
        assert curve(middle) <= mix * curve(low) + (1 - mix) * curve(high) + 1e-9


@settings(deadline=None)
@given(curves(), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_numbers_arrays_and_tensors_agree(curve, shares):
    expected = [curve(share) for share in shares]
    np.testing.assert_allclose(curve.values(np.array(shares)), expected, atol=1e-9)
    batch = torch.tensor([shares, shares], dtype=torch.float64)
    np.testing.assert_allclose(curve.tensor(batch).numpy(), [expected, expected], atol=1e-9)


@settings(deadline=None)
@given(curves(), st.floats(0.0, 1.0))
def test_the_gradient_is_the_slope_of_the_last_bit_of_work(curve, share):
    point = torch.tensor(share, dtype=torch.float64, requires_grad=True)
    curve.tensor(point).backward()
    assert point.grad.item() == pytest.approx(curve.slope(share), abs=1e-9)


def test_a_ramp_lets_the_gradient_see_the_jump():
    curve = Curve(2.0, (1.0,), (3.0,))
    share = torch.tensor([0.05, 0.5], dtype=torch.float64, requires_grad=True)
    value = curve.tensor(share, ramp=0.1)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.tensor([1.15, 3.5], dtype=torch.float64))
    torch.testing.assert_close(share.grad, torch.tensor([23.0, 3.0], dtype=torch.float64))


@settings(deadline=None)
@given(curves())
def test_json_keeps_a_curve_exactly(curve):
    assert Curve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


def test_scaling_multiplies_every_price():
    curve = Curve(1.0, (0.5, 1.0), (1.0, 2.0)).scaled(3.0)
    assert curve == Curve(3.0, (0.5, 1.0), (3.0, 6.0))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"jump_ms": -1.0}, "at least 0"),
        ({"jump_ms": 0.0, "slopes_ms": (2.0, 1.0), "knots": (0.5, 1.0)}, "may not fall"),
        ({"jump_ms": 0.0, "slopes_ms": (-1.0,)}, "at least 0"),
        ({"jump_ms": float("nan")}, "finite"),
        ({"jump_ms": 0.0, "slopes_ms": (1.0,), "knots": (0.5, 1.0)}, "one per knot"),
        ({"jump_ms": 0.0, "slopes_ms": (1.0, 2.0), "knots": (0.5, 0.9)}, "end at 1"),
        ({"jump_ms": 0.0, "slopes_ms": (1.0, 2.0), "knots": (1.0, 1.0)}, "rising"),
    ],
)
def test_a_curve_that_could_fall_is_refused_in_one_line(fields, says):
    with pytest.raises(CostError, match=says) as caught:
        Curve(**fields)
    assert "\n" not in str(caught.value)
