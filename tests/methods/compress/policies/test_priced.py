"""Priced: weak duality, prices that say what a unit is worth, and a measured gap to exact."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.worlds import run
from tests.methods.compress.policies.instances import choices, least_loss, limits, problems, solvable_problems

from apportion.core.budget import Budget
from apportion.core.knob import Choice
from apportion.core.loop import Outcome
from apportion.methods.compress.policies.exact import Exact
from apportion.methods.compress.policies.priced import Priced, dual_value, shadow_prices
from apportion.methods.compress.policies.problem import Option, Problem
from apportion.methods.compress.policies.sensitivity import Table
from apportion.testing.suites import PolicySuite
from apportion.testing.toys import Additive, Toy, composed_toy, concave_toy


class TestPriced(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return Priced


@settings(deadline=None, max_examples=100)
@given(solvable_problems(max_limits=3), st.lists(st.floats(0.0, 200.0), min_size=3, max_size=3))
def test_the_dual_never_exceeds_the_loss_of_a_choice_within_the_limits(problem, anywhere):
    best = least_loss(problem)
    prices = shadow_prices(problem)
    assert prices.dual <= best + 1e-6
    assert all(price >= 0 for price in prices.per_share)
    # no other prices give a higher bound, so these are the best there are
    assert dual_value(problem, tuple(anywhere[: len(problem.room)])) <= prices.dual + 1e-4


@settings(deadline=None, max_examples=80)
@given(solvable_problems(max_limits=1))
def test_with_one_limit_the_price_is_where_bisection_ends(problem):
    def cost_at(price):
        """The least cost among each knob's best values at a price."""
        total = 0.0
        for options in problem.options:
            priced = [option.loss + price * option.costs[0] for option in options]
            total += min(o.costs[0] for o, p in zip(options, priced, strict=True) if p <= min(priced) + 1e-9)
        return total

    low, high = 0.0, 1e5
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if cost_at(middle) <= problem.room[0] else (middle, high)
    found = shadow_prices(problem).per_share[0]
    assert dual_value(problem, (high,)) == pytest.approx(dual_value(problem, (found,)), abs=1e-4)


@settings(deadline=None, max_examples=100)
@given(solvable_problems(max_limits=1))
def test_with_one_limit_it_loses_at_most_one_knob_more_than_the_dual(problem):
    best = least_loss(problem)
    choice = Priced().solve(problem)
    assert problem.excess(choice) == 0.0
    span = max(max(o.loss for o in options) - min(o.loss for o in options) for options in problem.options)
    assert best <= problem.loss(choice) <= shadow_prices(problem).dual + span + 1e-6


@settings(deadline=None, max_examples=100)
@given(problems(max_limits=2))
def test_where_nothing_meets_the_limits_it_still_goes_down(problem):
    assume(least_loss(problem) is None)
    choice = Priced().solve(problem)
    now = problem.excess(problem.stay)
    if choice is None:
        # no single change saves; that two together might is left to exact
        assert all(problem.excess(c) >= now for c in choices(problem) if sum(map(bool, c)) == 1)
    else:
        assert problem.excess(choice) < now


def test_no_prices_where_no_mix_of_values_meets_the_limits():
    option = Option("a", 0, 1.0, (-0.1,))
    problem = Problem(("latency",), ((Option("a", 1, 0.0, (0.0,)), option),), (-0.5,))
    assert shadow_prices(problem) is None
    assert Priced().solve(problem) == (1,)


def table_problem(toy, budget):
    _, rows = run(toy, budget, Priced())
    table = Table.of(toy.knobs, rows, "quality")
    return Problem.of(table, toy.start, rows[0].readings, budget)


def test_a_price_is_the_quality_that_one_more_unit_buys_back():
    # both knobs lose 3 points per ms up to 4 ms, a loses 7 points per ms from there
    knobs = (Choice("a", (0, 1, 2)), Choice("b", (0, 1)))
    toy = Toy(
        knobs,
        {
            "latency": Additive({"a": {0: 0.0, 1: 4.0, 2: 6.0}, "b": {0: 0.0, 1: 2.0}}, base=1.0),
            "size": Additive({"a": {0: 1.0, 1: 2.0, 2: 3.0}}, unit="B"),
            "quality": Additive({"a": {0: 0.0, 1: 28.0, 2: 34.0}, "b": {0: 0.0, 1: 6.0}}, unit="points"),
        },
    )
    for limit_ms, worth in ((8.0, 3.0), (6.0, 3.0), (4.0, 7.0), (2.0, 7.0)):
        budget = limits(latency_ms=limit_ms, size_bytes=3.0)
        prices = shadow_prices(table_problem(toy, budget))
        assert prices.worth(budget) == pytest.approx({"latency": worth, "size": 0.0}, abs=1e-6)
        # between the steps, a millisecond more lowers the least possible loss by its price
        more = shadow_prices(table_problem(toy, limits(latency_ms=limit_ms + 0.5, size_bytes=3.0)))
        assert prices.dual - more.dual == pytest.approx(0.5 * worth, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_it_comes_close_to_exact_on_larger_problems_with_two_limits(seed):
    generator = random.Random(seed)
    per_knob = []
    for index in range(24):
        options, loss, costs = [Option(f"part{index}", 8, 0.0, (0.0, 0.0))], 0.0, (0.0, 0.0)
        for value in range(7, -1, -1):
            loss += generator.uniform(0.0, 1.0) ** 2
            costs = tuple(cost - generator.uniform(0.0, 0.01) for cost in costs)
            options.append(Option(f"part{index}", value, loss, costs))
        per_knob.append(tuple(options))
    problem = Problem(("latency", "size"), tuple(per_knob), (-0.4, -0.3))
    best = Exact().solve(problem)
    loss = problem.loss(Priced().solve(problem))
    assert best.gap <= 1e-4
    assert shadow_prices(problem).dual <= best.loss <= loss <= 1.03 * best.loss
    assert math.isfinite(loss)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_on_a_concave_toy_ends_within_one_knob_of_the_best(seed):
    toy = concave_toy(random.Random(seed), num_knobs=4, num_values=4)
    limit_ms = 0.5 * toy.meters["latency"].read(toy.start).value
    result, rows = run(toy, limits(latency_ms=limit_ms), Priced())
    assert result.outcome is Outcome.MET
    table = Table.of(toy.knobs, rows, "quality")
    one_knob = max(table.loss(knob, knob.cheapest) for knob in toy.knobs)
    assert toy.best_quality(limit_ms) - one_knob <= result.readings["quality"].value <= toy.best_quality(limit_ms)


def test_it_goes_on_where_costs_multiply_instead_of_adding_up():
    for size in (40, 12, 3):
        result, _ = run(composed_toy(3), Budget.parse(f"{size}B"), Priced())
        assert result.outcome is Outcome.MET, size
