"""Depths that a budget allows, and nested choices."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.methods.adapt.depth import LEAST_USE, every_depth, nested_depths, nested_path, sizes_by_depth


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_the_nested_path_is_the_best_of_all_nested_ones(seed):
    rng = np.random.default_rng(seed)
    start_KTL = np.sort(rng.random((4, 3, 2), dtype=np.float32), axis=0)  # keeping one start is always nested
    loss_KT = rng.random((4, 3))
    path = nested_path(start_KTL, loss_KT)

    def nested(path):
        return all((start_KTL[k][a] <= start_KTL[k + 1][b] + 1e-5).all() for k, (a, b) in enumerate(pairwise(path)))

    best = min(sum(loss_KT[range(4), p]) for p in product(range(3), repeat=4) if nested(p))
    assert nested(path)
    assert loss_KT[range(4), path].sum() == pytest.approx(best)


def test_sizes_of_a_depth_keep_the_budget_and_use_it(tiny):
    family, clock = tiny.family(), tiny.clocks[0]
    (place,) = family.block_places
    name = list(tiny.partition)[place].name
    assert every_depth(family) == [(size,) for size in list(tiny.partition)[place].sizes()]
    found = sizes_by_depth(family, torch.full((4,), 0.25), 0.4, clock, None)
    assert len(found) > 1
    for depth, sizes in found.items():
        assert depth == (sizes[name],)
        assert LEAST_USE * 0.4 * clock.whole_ms <= clock.upper_ms(sizes) <= 0.4 * clock.whole_ms


def test_depths_never_fall_and_a_budget_without_any_has_none():
    depths = [(1,), (2,), (3,)]
    judged = [{(1,): 1.0, (2,): 0.0}, {}, {(1,): 0.0, (2,): 0.5, (3,): 0.6}, {(2,): 1.0, (3,): 0.1}]
    assert nested_depths(depths, judged) == [(2,), None, (2,), (3,)]
    assert None in nested_depths(depths, [{(3,): 0.0}, {(1,): 0.0}])  # no nested choice is left
