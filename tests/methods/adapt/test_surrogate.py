"""The surrogate: primal-dual steps against the convex solver, prices along the frontier, and the closed form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.errors import InfeasibleError
from apportion.methods.adapt.surrogate import HingeCost, Separation, random_surrogate
from apportion.numerics.primal_dual import kkt, primal_dual


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=3, max_size=3), st.just(0.0) | st.floats(0.01, 0.5), st.floats(0.0, 0.99))
def test_costs_are_convex_non_decreasing_and_have_the_slopes_they_say(rises, width, level):
    cost, step = HingeCost((0.0, 0.3, 0.6), tuple(rises), width), 1e-6
    values = np.array([cost(place) for place in np.linspace(0, 1, 41)])
    assert values[0] == 0
    assert np.diff(values).min() >= 0
    assert np.diff(values, 2).min() >= -1e-9
    rise = (cost(level + step) - cost(level)) / step
    assert cost.slope(level) - 1e-6 <= rise <= cost.slope(level + step) + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_loss_and_the_constraints(seed):
    rng = np.random.default_rng(seed)
    made = random_surrogate(rng, width=0.1)
    point_D = rng.uniform(size=made.num_weights + made.num_levels)
    step = 1e-6 * np.eye(len(point_D))
    numeric_D = [(made.loss(point_D + move) - made.loss(point_D - move)) / 2e-6 for move in step]
    np.testing.assert_allclose(made.gradient(point_D), numeric_D, atol=1e-6)
    numeric_DK = [(made.constraints(point_D + move) - made.constraints(point_D - move)) / 2e-6 for move in step]
    np.testing.assert_allclose(made.slopes(point_D), np.array(numeric_DK).T, atol=1e-5)
    draws = [made.sampled_gradient(point_D, rng) for _ in range(4000)]
    stderr = np.std(draws, axis=0) / 4000**0.5
    assert (np.abs(np.mean(draws, axis=0) - made.gradient(point_D)) <= 5 * stderr).all()


@pytest.mark.parametrize("seed", range(2))
def test_the_solver_and_the_steps_agree_on_the_optimum(seed):
    made = random_surrogate(np.random.default_rng(seed), width=0.1)
    exact = made.solve()
    # the solver's own tolerance is 1e-8 on the objective, so about its root on the point
    assert kkt(made, exact.point_D, np.append(exact.price_L, exact.price)).worst < 1e-3
    found = primal_dual(made, 2000, np.random.default_rng(seed))
    assert found.residuals.feasibility < 0.05
    assert made.loss(found.point_D) == pytest.approx(exact.loss, abs=0.02)
    assert found.multiplier_K[-1] == pytest.approx(exact.price, abs=0.1)


def test_a_price_gives_the_point_that_the_budget_of_its_latency_gives():
    made = random_surrogate(np.random.default_rng(0), width=0.1)
    losses, latencies = [], []
    for point in made.trace([0.02, 0.1, 0.3]):
        again = replace(made, budget=point.latency).solve()
        assert again.loss == pytest.approx(point.loss, abs=1e-5)
        assert again.price == pytest.approx(point.price, rel=0.02)
        losses.append(point.loss)
        latencies.append(point.latency)
    assert losses == sorted(losses)
    assert latencies == sorted(latencies, reverse=True)


def test_a_budget_under_the_backbone_is_refused():
    made = random_surrogate(np.random.default_rng(0))
    with pytest.raises(InfeasibleError, match="frozen backbone alone costs 1"):
        replace(made, budget=0.5).solve()


positive = st.floats(0.1, 10.0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=4), st.floats(0.05, 1.2))
def test_the_closed_form_is_the_solvers_optimum_and_never_worse_than_one_level(pairs, share):
    worth, cost = zip(*pairs, strict=True)
    made = Separation(worth, cost, share * sum(cost))
    level_L = made.per_module()
    assert level_L @ np.array(cost) <= made.budget * (1 + 1e-9)
    assert made.loss(level_L) == pytest.approx(made.surrogate().solve().loss, abs=1e-5)
    assert made.gap() >= -1e-9


def test_two_modules_are_separated_by_the_formula_and_not_where_worth_follows_cost():
    made = Separation((10.0, 1.0), (4.0, 1.0), 2.5)
    missing = 5.0 - 2.5
    assert made.gap() == pytest.approx(missing**2 * (11.0 / 25.0 - 1 / (16 / 10 + 1 / 1)))
    assert made.gap() > 0.3
    assert Separation((4.0, 1.0), (4.0, 1.0), 2.5).gap() == pytest.approx(0.0, abs=1e-12)
