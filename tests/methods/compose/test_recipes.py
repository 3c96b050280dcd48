"""Each recipe against its equation computed on whole tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import blocks
from apportion.methods.compose.recipes import Dare, Linear, Slerp, TaskArithmetic, Ties
from apportion.methods.compose.source import Source, Stack


class Held:
    """A source held in memory; counts what is read."""

    def __init__(self, values):
        self.values, self.num_reads = np.asarray(values, np.float32), 0

    def read(self, name, start=0, stop=None):
        self.num_reads += 1
        return self.values[start:stop]


def stack_of(*values, base=None):
    sources = [Source(str(n), str(n), Held(value)) for n, value in enumerate(values)]
    parent = None if base is None else Source("base", "base", Held(base))
    return Stack("t", (len(values[0]),), sources, parent)


def merged(recipe, stack, block=7):
    combine = recipe.plan(stack)
    return np.concatenate([combine(start, stop).copy() for start, stop in blocks(stack.size, block)])


def drawn(seed, count=3, size=50, scale=1.0):
    return scale * np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def test_linear_is_bit_for_bit_the_product_and_sum_in_order():
    value_SN = drawn(0)
    weight_S = np.float32([0.3, 1.7, 2.0])
    want = (torch.from_numpy(weight_S)[:, None] * torch.from_numpy(value_SN)).sum(0) / torch.from_numpy(weight_S).sum()
    np.testing.assert_array_equal(merged(Linear(weight_S=weight_S.tolist()), stack_of(*value_SN)), want.numpy())


def test_linear_does_not_read_sources_of_weight_zero():
    stack = stack_of(*drawn(0))
    merged(Linear(weight_S=(1.0, 0.0, 2.0)), stack)
    assert stack.sources[1].body.num_reads == 0
    assert stack.sources[0].body.num_reads > 0


def test_linear_takes_weights_and_edits_of_single_tensors():
    value_SN = drawn(0, size=20)
    edit_N = np.arange(20, dtype=np.float32)
    recipe = Linear(weight_S=(1, 1, 1), by_tensor={"t": (0, 1, 0)}, edits={"t": edit_N})
    np.testing.assert_array_equal(merged(recipe, stack_of(*value_SN)), value_SN[1] + edit_N)


def test_weights_that_cancel_are_refused():
    with pytest.raises(ModelError, match="sum to 0"):
        merged(Linear(weight_S=(1.0, -1.0)), stack_of(*drawn(0, 2)))


def test_task_arithmetic_adds_scaled_differences():
    value_SN, base_N = drawn(0), drawn(1, 1)[0]
    got = merged(TaskArithmetic(weight_S=(0.5, -1.0, 2.0), scale=0.7), stack_of(*value_SN, base=base_N))
    want = base_N + 0.7 * (np.array([0.5, -1.0, 2.0])[:, None] * (value_SN - base_N)).sum(0)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def ties_by_definition(value_SN, base_N, weight_S, density):
    """Yadav et al. 2023, with whole tensors and a full sort."""
    delta_SN = (value_SN - base_N).astype(np.float64)
    k = max(1, math.floor(density * len(base_N)))
    for delta_N in delta_SN:
        order = np.argsort(-np.abs(delta_N), kind="stable")
        delta_N[order[k:]] = 0
    weighted_SN = np.asarray(weight_S)[:, None] * delta_SN
    sign_N = np.where(weighted_SN.sum(0) >= 0, 1, -1)
    agree_SN = np.sign(weighted_SN) == sign_N
    total_N = (np.asarray(weight_S)[:, None] * agree_SN).sum(0)
    return base_N + (weighted_SN * agree_SN).sum(0) / np.where(total_N == 0, 1, total_N)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 1), st.booleans())
def test_ties_is_trim_elect_merge(seed, density, tied):
    value_SN, base_N = drawn(seed, 4), drawn(seed + 1, 1)[0]
    if tied:  # a few levels only, so that many magnitudes are equal
        base_N = np.zeros_like(base_N)
        value_SN = np.round(value_SN)
    weight_S = (1.0, 0.5, 2.0, 1.0)
    got = merged(Ties(weight_S=weight_S, density=density), stack_of(*value_SN, base=base_N))
    np.testing.assert_allclose(got, ties_by_definition(value_SN, base_N, weight_S, density), rtol=1e-5, atol=1e-5)


def test_dare_keeps_the_expectation_and_the_share():
    size, density = 200_000, 0.3
    base_N, value_N = np.zeros(size, np.float32), np.ones(size, np.float32)
    got = merged(Dare(weight_S=(1.0,), density=density, seed=3), stack_of(value_N, base=base_N), block=10_000)
    kept = got != 0
    share = round(density * 65536) / 65536
    stderr = math.sqrt(share * (1 - share) / size)
    assert abs(kept.mean() - share) < 5 * stderr
    np.testing.assert_allclose(got[kept], 1 / share, rtol=1e-6)


def test_dare_repeats_itself_and_differs_between_sources_seeds_and_blocks():
    base_N, value_N = np.zeros(4000, np.float32), np.ones(4000, np.float32)

    def mask(seed, place=0):
        weight_S = [1.0 if n == place else 0.0 for n in range(2)]
        recipe = Dare(weight_S=weight_S, density=0.5, seed=seed)
        return merged(recipe, stack_of(value_N, value_N, base=base_N), block=1000) != 0

    np.testing.assert_array_equal(mask(0), mask(0))
    for other in (mask(1), mask(0, place=1), np.roll(mask(0), 1000)):
        assert 0.4 < (mask(0) == other).mean() < 0.6


def test_dare_at_full_density_is_task_arithmetic():
    value_SN, base_N = drawn(0), drawn(1, 1)[0]
    full = merged(Dare(weight_S=(1, 2, 3), density=1.0), stack_of(*value_SN, base=base_N))
    np.testing.assert_array_equal(full, merged(TaskArithmetic(weight_S=(1, 2, 3)), stack_of(*value_SN, base=base_N)))


def test_dare_ties_at_full_density_is_ties():
    value_SN, base_N = drawn(0), drawn(1, 1)[0]
    full = merged(Dare(weight_S=(1, 2, 3), density=1.0, elect=True), stack_of(*value_SN, base=base_N))
    np.testing.assert_array_equal(full, merged(Ties(weight_S=(1, 2, 3), density=1.0), stack_of(*value_SN, base=base_N)))


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(0, 1000))
def test_slerp_stays_on_the_arc(t, seed):
    value_SN = drawn(seed, 2).astype(np.float64)
    value_SN /= np.linalg.norm(value_SN, axis=1, keepdims=True)
    got = merged(Slerp(t=t), stack_of(*value_SN)).astype(np.float64)
    angle = math.acos(value_SN[0] @ value_SN[1])
    assert math.isclose(np.linalg.norm(got), 1, abs_tol=1e-5)
    # the arc from the first source is the share t of the whole arc
    assert math.isclose(math.acos(min(1, got @ value_SN[0])), t * angle, abs_tol=2e-3)


def test_slerp_of_parallel_or_zero_tensors_is_the_straight_line():
    ones = np.ones(10, np.float32)
    np.testing.assert_allclose(merged(Slerp(t=0.25), stack_of(ones, 3 * ones)), 1.5)
    np.testing.assert_allclose(merged(Slerp(t=0.25), stack_of(0 * ones, ones)), 0.25)


@pytest.mark.parametrize(
    "make", [lambda: Slerp(t=1.5), lambda: Ties(weight_S=(1,), density=0), lambda: Dare(weight_S=(1,), density=2)]
)
def test_senseless_settings_are_refused(make):
    with pytest.raises(ModelError, match=r"possible|between"):
        make()


def test_slerp_takes_two_sources():
    with pytest.raises(ModelError, match="two sources"):
        Slerp().plan(stack_of(*drawn(0, 3)))
