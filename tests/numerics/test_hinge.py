"""Hinges: non-negative weights give a monotone convex function with the slopes they sum to."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.hinge import hinge_basis, slopes_of


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4))
def test_weights_on_hinges_give_the_slopes_between_knots(weights):
    knots = (0.25, 0.5, 0.75, 1.0)
    values = hinge_basis(np.array([0.0, *knots]), knots) @ np.array(weights)
    np.testing.assert_allclose(np.diff(values) / 0.25, slopes_of(weights), atol=1e-9)
