"""Thresholds by definition, iterative hard thresholding against all supports, the group lasso against cvxpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.numerics.convex import minimise, modeller
from apportion.numerics.thresholding import (
    block_norms,
    group_lasso,
    hard_threshold,
    iterative_hard_thresholding,
    largest_penalty,
    shrink_blocks,
)

vectors = st.lists(st.floats(-5, 5), min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))


@settings(deadline=None)
@given(vectors, st.integers(0, 12))
def test_it_is_the_nearest_vector_with_k_entries(value_D, k):
    kept_D = hard_threshold(value_D, k)
    assert int((kept_D != 0).sum()) <= k
    largest = value_D.abs().sort(descending=True).values[:k]
    assert kept_D.norm().item() == pytest.approx(largest.norm().item())
    assert ((kept_D == 0) | (kept_D == value_D)).all()


def test_blocks_are_kept_whole():
    block_D = torch.tensor([0, 0, 1, 1, 2])
    kept_D = hard_threshold(torch.tensor([3.0, 0.1, 2.0, 2.5, 3.1]), 2, block_D)
    assert kept_D.tolist() == pytest.approx([0.0, 0.0, 2.0, 2.5, 3.1])


def least_squares(seed, rows, size, noise=0.0, k=2):
    generator = torch.Generator().manual_seed(seed)
    feature = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    truth = torch.zeros(size, dtype=torch.float64)
    truth[torch.randperm(size, generator=generator)[:k]] = 2.0
    target = feature @ truth + noise * torch.randn(rows, generator=generator, dtype=torch.float64)

    def objective(value):
        rest = feature @ value - target
        return 0.5 * float(rest @ rest) / rows, feature.T @ rest / rows

    return feature, target, truth, objective


@pytest.mark.parametrize("seed", range(5))
def test_iht_finds_the_best_support_of_a_well_conditioned_problem(seed):
    feature, target, _, objective = least_squares(seed, 60, 10, noise=0.3)
    found_D, value = iterative_hard_thresholding(objective, torch.zeros(10, dtype=torch.float64), 2)
    best = min(
        0.5
        * float(
            (feature[:, list(c)] @ torch.linalg.lstsq(feature[:, list(c)], target[:, None]).solution[:, 0] - target)
            .square()
            .sum()
        )
        / 60
        for c in itertools.combinations(range(10), 2)
    )
    assert int((found_D != 0).sum()) <= 2
    assert value <= best + 1e-5


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_iht_never_rises_and_keeps_its_budget(seed, k):
    _, _, _, objective = least_squares(seed, 12, 20, noise=1.0)
    start_D = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found_D, value = iterative_hard_thresholding(objective, start_D, k, max_steps=20)
    assert int((found_D != 0).sum()) <= k
    assert value <= objective(hard_threshold(start_D, k))[0] + 1e-12
    assert value == pytest.approx(objective(found_D)[0])


@pytest.mark.parametrize("penalty", [0.02, 0.2, 1.0])
def test_group_lasso_agrees_with_an_exact_solver(penalty):
    feature, target, _, objective = least_squares(1, 30, 12, noise=0.5)
    block_D = torch.arange(12) // 3
    _, value = group_lasso(objective, torch.zeros(12, dtype=torch.float64), block_D, penalty, tolerance=1e-14)
    cp = modeller()
    variable = cp.Variable(12)
    norms = sum(cp.norm(variable[np.flatnonzero(block_D.numpy() == block)], 2) for block in range(4))
    loss = cp.sum_squares(feature.numpy() @ variable - target.numpy()) / 60 + penalty * norms
    assert minimise(loss, [], tolerance=1e-10) == "optimal"
    assert value == pytest.approx(loss.value, rel=1e-6, abs=1e-8)


def test_nothing_is_active_from_the_largest_penalty_on():
    _, _, _, objective = least_squares(1, 30, 12)
    block_D = torch.arange(12) // 3
    zero_D = torch.zeros(12, dtype=torch.float64)
    edge = largest_penalty(objective(zero_D)[1], block_D)
    assert group_lasso(objective, zero_D, block_D, edge * 1.001)[0].abs().max() == 0
    assert group_lasso(objective, zero_D, block_D, edge * 0.9)[0].abs().max() > 0


def test_shrinking_takes_the_same_from_every_norm():
    block_D = torch.tensor([0, 0, 1])
    value_D = torch.tensor([3.0, 4.0, 0.5])
    before, after = block_norms(value_D, block_D), block_norms(shrink_blocks(value_D, block_D, 1.0), block_D)
    torch.testing.assert_close(after, (before - 1).clamp_min(0))
