"""Depths that a budget allows, and nested choices."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.methods.adapt.depth import (
    LEAST_USE,
    as_wide_as_can_be,
    balanced_depths,
    every_depth,
    near_depths,
    near_sizes,
    nested_depths,
    nested_path,
    sizes_by_depth,
    surely_least,
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_the_nested_path_is_the_best_of_all_nested_ones(seed):
    rng = np.random.default_rng(seed)
    depth_TJ = rng.integers(1, 4, (3, 2))
    loss_KT = rng.random((4, 3))
    path = nested_path(depth_TJ, loss_KT)

    def nested(path):
        return all((depth_TJ[a] <= depth_TJ[b]).all() for a, b in pairwise(path))

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


def test_near_depths_are_the_steps_beside_the_settled_one(tiny):
    family = tiny.family()
    assert near_depths(family, 0.4) == []
    for settled, near in ((1, [(2,)]), (2, [(1,), (3,)]), (3, [(2,)])):
        family.depth_KJ.fill_(settled)
        assert near_depths(family, 0.4) == near


def test_where_the_whole_fits_the_choice_beside_it_is_one_block_less_at_full_width(tiny):
    family, clock = tiny.family(), tiny.clocks[0]
    assert near_sizes(family, torch.full((4,), 0.25), 1.0, clock, None) == []
    family.depth_KJ[3] = 2
    (sizes,) = near_sizes(family, torch.full((4,), 0.25), 1.0, clock, None)
    (place,) = family.block_places
    blocks = list(tiny.partition)[place]
    assert sizes[blocks.name] == 2
    assert as_wide_as_can_be(clock, sizes)
    assert clock.upper_ms(sizes) < LEAST_USE * clock.whole_ms
    thinner = sizes | {next(m.name for m in tiny.partition if m.kind == "heads"): 1}
    assert not as_wide_as_can_be(clock, thinner)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(-3, 3))
def test_another_choice_than_the_first_needs_more_than_luck(seed, shift):
    generator = torch.Generator().manual_seed(seed)
    loss_TS = [torch.randn(12, generator=generator) + shift * place for place in range(3)]
    chosen = surely_least(loss_TS)
    assert surely_least([loss_S + 7.0 for loss_S in loss_TS]) == chosen
    less_S = loss_TS[0] - loss_TS[chosen]
    if chosen:
        assert less_S.mean() > less_S.std() / len(less_S) ** 0.5
        assert all(loss_TS[chosen].mean() <= loss_S.mean() for loss_S in loss_TS)
    assert surely_least(loss_TS[:1]) == 0


def surely(row):
    """Losses of two episodes that leave no doubt."""
    return {(depth,): np.array([loss, loss]) for depth, loss in row.items()}


def test_depths_never_fall_and_a_budget_without_any_has_none():
    depths, usual = [(1,), (2,), (3,)], [(2.0,)] * 4
    judged = [surely(row) for row in ({1: 1.0, 2: 0.0}, {}, {1: 0.0, 2: 0.5, 3: 0.6}, {2: 1.0, 3: 0.1})]
    assert nested_depths(depths, judged, usual) == [(2,), None, (2,), (3,)]
    assert None in nested_depths(depths, [surely({3: 0.0}), surely({1: 0.0})], usual[:2])  # no nested choice is left


def test_of_depths_that_luck_can_not_tell_apart_the_balanced_one_is_taken():
    rng = np.random.default_rng(0)
    shared_E, luck_TE = rng.normal(1.0, 0.5, 16), rng.normal(0.0, 0.1, (3, 16))
    luck_TE -= luck_TE.mean(1, keepdims=True)
    judged = {(depth,): shared_E + luck_E + 1e-3 * depth for depth, luck_E in enumerate(luck_TE, start=1)}
    for usual in (1, 2, 3):
        assert nested_depths([*judged], [judged], [(usual + 0.2,)]) == [(usual,)]
    surely_less = {depth: loss_E * 0 + 2e-4 * depth[0] for depth, loss_E in judged.items()}
    assert nested_depths([*judged], [surely_less], [(3.0,)]) == [(1,)]  # however small
    clearly = {**judged, (1,): judged[1,] - 0.2}
    assert nested_depths([*judged], [clearly], [(3.0,)]) == [(1,)]


def test_balanced_depths_rise_with_the_budget_to_all_blocks(tiny):
    family = tiny.family()
    (place,) = family.block_places
    depths = [depth for (depth,) in balanced_depths(family)]
    assert depths == sorted(depths)
    assert depths[0] >= 1
    assert depths[-1] == pytest.approx(list(tiny.partition)[place].num_units)
