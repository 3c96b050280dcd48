"""The oracle against exact solvers on small instances: weights, residuals, blocks, budgets."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InfeasibleError, KnobError
from apportion.methods.compose.losses import CrossEntropy, Squared
from apportion.methods.compose.oracle import OracleConfig, mix, solve
from apportion.methods.compose.prices import Prices, priced, within
from apportion.numerics.convex import minimise, modeller

DTYPE = torch.float64


def instance(seed, *, sources=4, size=8, rows=60, noise=0.1, k=0, amplitude=2.0):
    """A task whose optimum is a mixture plus a sparse residual."""
    generator = torch.Generator().manual_seed(seed)
    source_SD = torch.randn(sources, size, generator=generator, dtype=DTYPE)
    weight_S = torch.rand(sources, generator=generator, dtype=DTYPE)
    weight_S /= weight_S.sum()
    delta_D = torch.zeros(size, dtype=DTYPE)
    delta_D[torch.randperm(size, generator=generator)[:k]] = amplitude
    feature = torch.randn(rows, size, generator=generator, dtype=DTYPE)
    target = feature @ (weight_S @ source_SD + delta_D) + noise * torch.randn(rows, generator=generator, dtype=DTYPE)
    return Squared(feature, target), source_SD, weight_S, delta_D


def exact_value(loss, source_SD, free=(), active=None):
    """The least loss over mixtures of the active sources plus a residual on free coordinates, by cvxpy."""
    cp = modeller()
    weight = cp.Variable(len(source_SD), nonneg=True)
    delta = cp.Variable(source_SD.shape[1])
    theta = source_SD.numpy().T @ weight + delta
    objective = 0.5 * cp.quad_form(theta, cp.psd_wrap(loss.matrix_DD.numpy())) - loss.linear_D.numpy() @ theta
    shut = [n for n in range(source_SD.shape[1]) if n not in free]
    rules = [cp.sum(weight) == 1, delta[shut] == 0]
    if active is not None:
        rules += [weight[n] == 0 for n in range(len(source_SD)) if n not in active]
    assert minimise(objective, rules, tolerance=1e-10) in ("optimal", "optimal_inaccurate")
    return float(objective.value) + loss.constant


@pytest.mark.parametrize("seed", range(4))
def test_weights_alone_are_exact(seed):
    loss, source_SD, _, _ = instance(seed, noise=1.0)
    found = solve(loss, source_SD)
    assert found.value == pytest.approx(exact_value(loss, source_SD), abs=1e-6)
    assert found.gap <= 1e-7


@pytest.mark.parametrize("residual", ["iht", "group-lasso"])
@pytest.mark.parametrize("seed", range(3))
def test_the_residual_is_as_good_as_the_best_of_all_supports(residual, seed):
    loss, source_SD, _, _ = instance(seed, k=2)
    found = solve(loss, source_SD, OracleConfig(k=2, residual=residual, block_D=torch.arange(8), max_steps=400))
    best = min(exact_value(loss, source_SD, free) for free in itertools.combinations(range(8), 2))
    assert int((found.delta_D != 0).sum()) <= 2
    assert found.value == pytest.approx(best, rel=1e-3, abs=1e-4)


def test_gates_find_the_best_support_more_often_than_not_and_never_lose():
    """The relaxation is not convex: a turn may settle on weights that make up for a wrong support."""
    found_best = 0
    for seed in range(4):
        loss, source_SD, _, _ = instance(seed, k=2)
        found = solve(loss, source_SD, OracleConfig(k=2, residual="hard-concrete", max_steps=300, max_rounds=8))
        assert int((found.delta_D != 0).sum()) <= 2
        assert found.value <= solve(loss, source_SD).value
        best = min(exact_value(loss, source_SD, free) for free in itertools.combinations(range(8), 2))
        found_best += found.value <= best + 0.01
    assert found_best >= 3


def test_blocks_of_the_residual_are_chosen_whole():
    loss, source_SD, _, _ = instance(5, size=12)
    block_D = torch.arange(12) // 3
    generator = torch.Generator().manual_seed(9)
    feature = torch.randn(80, 12, generator=generator, dtype=DTYPE)
    theta_D = source_SD.mean(0) + torch.tensor([0.0] * 6 + [1.5] * 3 + [0.0] * 3, dtype=DTYPE)
    loss = Squared(feature, feature @ theta_D)
    for residual in ("iht", "group-lasso"):
        found = solve(loss, source_SD, OracleConfig(k=1, residual=residual, block_D=block_D))
        assert set(block_D[found.delta_D != 0].tolist()) == {2}
        assert found.value < 1e-6


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 4))
def test_turns_never_lose_and_keep_their_budget(seed, k):
    loss, source_SD, _, _ = instance(seed, rows=10, noise=1.0)
    found = solve(loss, source_SD, OracleConfig(k=k, max_rounds=8))
    assert int((found.delta_D != 0).sum()) <= k
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(found.values))
    assert found.value <= solve(loss, source_SD).value + 1e-9
    assert found.value == pytest.approx(loss.evaluate(found.theta(source_SD))[0], abs=1e-9)


def test_weights_of_blocks_fit_a_task_that_one_mixture_cannot():
    source_SD = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]], dtype=DTYPE)
    mix_block_D = torch.tensor([0, 0, 1, 1])
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(50, 4, generator=generator, dtype=DTYPE)
    loss = Squared(feature, feature @ torch.ones(4, dtype=DTYPE))
    apart = solve(loss, source_SD, OracleConfig(mix_block_D=mix_block_D))
    assert apart.value < 1e-7
    torch.testing.assert_close(
        mix(apart.weight_LS, source_SD, mix_block_D), torch.ones(4, dtype=DTYPE), atol=1e-3, rtol=0
    )
    assert solve(loss, source_SD).value > 0.1


def test_cross_entropy_is_minimised_too():
    generator = torch.Generator().manual_seed(0)
    feature, label = (
        torch.randn(40, 5, generator=generator, dtype=DTYPE),
        torch.randint(0, 3, (40,), generator=generator),
    )
    loss = CrossEntropy(feature, label, 3, ridge=0.1)
    source_SD = torch.randn(4, 15, generator=generator, dtype=DTYPE)
    found = solve(loss, source_SD, OracleConfig(tolerance=1e-7))
    assert found.gap <= 1e-6
    grid = [n / 12 for n in range(13)]
    for weights in itertools.product(grid, repeat=4):  # no point of a grid over the simplex is better
        if math.isclose(sum(weights), 1):
            assert found.value <= loss.evaluate(torch.tensor(weights, dtype=DTYPE) @ source_SD)[0] + 1e-6


def test_no_more_sources_than_allowed():
    loss, source_SD, _, _ = instance(3, sources=6, noise=0.0)
    found = solve(loss, source_SD, OracleConfig(max_active=2))
    assert int((found.weight_S > 0).sum()) <= 2


def priced_instance(seed):
    loss, source_SD, _, _ = instance(seed, sources=3, size=5, k=1, noise=0.2)
    config = OracleConfig(k=2, block_D=torch.arange(5), max_rounds=10)
    prices = Prices(torch.full((5,), 1.0, dtype=DTYPE), torch.full((5,), 3.0, dtype=DTYPE))
    return loss, source_SD, config, prices, solve(loss, source_SD, config)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget", [5.0, 8.0, 13.0, 100.0])
def test_a_budget_is_kept_and_little_is_lost_against_all_choices(seed, budget):
    loss, source_SD, config, prices, start = priced_instance(seed)
    found = within(loss, source_SD, start, prices, budget, config)
    assert prices.cost(found.weight_LS, found.delta_D, torch.arange(5)) <= budget
    best = min(
        exact_value(loss, source_SD, free, active)
        for num in range(1, 4)
        for active in itertools.combinations(range(3), num)
        for num_free in range(3)
        if 5 * num + 3 * num_free <= budget
        for free in itertools.combinations(range(5), num_free)
    )
    assert best - 1e-6 <= found.value <= 2 * best + 0.05  # greedy, so near the best of all and not below it
    if budget == 100.0:
        assert found.value <= 1.05 * best


def test_a_multiplier_meets_the_budget_and_pays_for_itself():
    loss, source_SD, config, prices, start = priced_instance(0)
    block_D = torch.arange(5)

    def cost(solution):
        return prices.cost(solution.weight_LS, solution.delta_D, block_D)

    multipliers = []
    for budget in (100.0, 13.0, 8.0, 5.0):
        found, multiplier = priced(loss, source_SD, start, prices, budget, config)
        assert cost(found) <= budget
        assert found.value + multiplier * cost(found) <= start.value + multiplier * cost(start) + 1e-6
        multipliers.append(multiplier)
    assert multipliers == sorted(multipliers)
    assert multipliers[-1] > 0


def test_a_budget_under_the_floor_is_refused_with_the_floor():
    loss, source_SD, _, _ = instance(0)
    prices = Prices(torch.ones(8, dtype=DTYPE), torch.ones(8, dtype=DTYPE))
    with pytest.raises(InfeasibleError, match="below 8"):
        within(loss, source_SD, solve(loss, source_SD), prices, 7.9, OracleConfig(block_D=torch.arange(8)))


@pytest.mark.parametrize(
    "kwargs", [{"residual": "magic"}, {"k": -1}, {"max_active": 0}, {"k": 1, "residual": "group-lasso"}]
)
def test_senseless_settings_are_refused(kwargs):
    with pytest.raises(KnobError):
        OracleConfig(**kwargs)


def test_start_of_the_router_is_used(generator):
    loss, source_SD, _, _ = instance(0)
    start = torch.full((1, 4), 0.25, dtype=DTYPE)
    assert solve(loss, source_SD, OracleConfig(max_steps=0), start_LS=start).weight_S.tolist() == [0.25] * 4
    assert np.isfinite(solve(loss, source_SD, start_LS=start).value)
