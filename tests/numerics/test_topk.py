"""Streaming selection against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.topk import kth_magnitude

numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0])
)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60), st.data())
def test_it_is_the_kth_of_a_full_sort_and_counts_the_ties(values, data):
    k = data.draw(st.integers(1, len(values)))
    cut = data.draw(st.integers(0, len(values)))
    value_N = np.array(values, np.float32)
    threshold, ties = kth_magnitude(lambda: (value_N[:cut], value_N[cut:]), k)
    ordered = np.sort(np.abs(value_N))[::-1]
    assert threshold == ordered[k - 1]
    assert ties == k - np.count_nonzero(ordered > threshold)


@pytest.mark.parametrize("k", [0, 4])
def test_an_impossible_k_is_refused(k):
    with pytest.raises(ValueError, match="not possible"):
        kth_magnitude(lambda: [np.ones(3, np.float32)], k)
