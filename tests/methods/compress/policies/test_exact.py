"""Exact: equal to exhaustive search where readings add up, on tables and through the loop."""

from __future__ import annotations

import ctypes
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.worlds import accepted, run
from tests.methods.compress.policies.instances import additive_toys, choices, least_loss, limits, problems

from apportion.core.budget import Budget
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger
from apportion.core.loop import Outcome
from apportion.core.policy import Greedy
from apportion.methods.compress.policies.exact import Exact
from apportion.numerics.highs import silenced
from apportion.testing.suites import PolicySuite
from apportion.testing.toys import Additive, Counting, Jittered, Scaled, Toy, composed_toy, concave_toy


class TestExact(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return Exact


@settings(deadline=None, max_examples=150)
@given(problems())
def test_a_solution_loses_as_little_as_the_best_of_all_choices(problem):
    solution = Exact().solve(problem)
    best = least_loss(problem)
    if best is not None:
        assert solution.excess == 0.0
        assert solution.loss == problem.loss(solution.choice) == best
        assert solution.bound == pytest.approx(best, abs=1e-4)
        assert solution.gap == pytest.approx(0.0, abs=1e-4)
        return
    now = problem.excess(problem.stay)
    least = min((problem.excess(choice) for choice in choices(problem)), default=now)
    if least < now:
        assert solution.excess == pytest.approx(least)
        assert math.isnan(solution.gap)
    else:
        assert solution is None


def best_quality(toy, budget):
    """The best quality of any setting within the budget, or None."""
    within = [s for s in toy.settings() if budget.met({key: toy.meters[key].read(s) for key in budget.keys})]
    return max((toy.meters["quality"].read(setting).value for setting in within), default=None)


@settings(deadline=None, max_examples=60)
@given(additive_toys(), st.integers(4, 60))
def test_a_run_with_one_limit_ends_at_the_best_setting_there_is(toy, limit_ms):
    # with one limit every move that saves is accepted; a value that does not save is never worth its place unless it
    # gains quality, so the toy's gains are taken out
    terms = toy.meters["quality"].terms
    falling = {
        knob.name: {value: -abs(terms[knob.name][value]) if value != knob.dearest else 0.0 for value in knob.values}
        for knob in toy.knobs
    }
    toy = Toy(toy.knobs, {**toy.meters, "quality": Additive(falling, unit="points")})
    budget = limits(latency_ms=float(limit_ms))
    result, _ = run(toy, budget, Exact())
    best = best_quality(toy, budget)
    if best is None:
        assert not result.met
    else:
        assert result.outcome is Outcome.MET
        assert result.readings["quality"].value == best


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 0.9))
def test_a_run_under_two_limits_ends_at_the_best_setting_there_is(seed, share):
    generator = random.Random(seed)
    toy = concave_toy(generator, num_knobs=3, num_values=4)
    sizes = {knob.name: {value: float(value * generator.randint(1, 5)) for value in knob.values} for knob in toy.knobs}
    toy = Toy(toy.knobs, {**toy.meters, "size": Additive(sizes, unit="B", base=1.0)})
    cheapest, dearest = Setting.cheapest(toy.knobs), toy.start

    def between(key):
        low, high = (toy.meters[key].read(setting).value for setting in (cheapest, dearest))
        return low + share * (high - low)

    budget = limits(latency_ms=between("latency"), size_bytes=between("size"))
    result, _ = run(toy, budget, Exact())
    assert result.outcome is Outcome.MET
    assert result.readings["quality"].value == best_quality(toy, budget)


def greedy_trap():
    """Greedy takes the cheap-looking small step first and has to take the big one all the same."""
    return Toy(
        (Choice("small", (0, 1)), Choice("big", (0, 1))),
        {
            "latency": Additive({"small": {0: 0.0, 1: 2.0}, "big": {0: 0.0, 1: 6.0}}, base=2.0),
            "quality": Additive({"small": {0: 0.0, 1: 1.0}, "big": {0: 0.0, 1: 6.0}}, unit="points"),
        },
    )


def test_it_avoids_what_greedy_regrets():
    greedy, _ = run(greedy_trap(), limits(latency_ms=4.0), Greedy())
    exact, _ = run(greedy_trap(), limits(latency_ms=4.0), Exact())
    assert greedy.met
    assert exact.met
    assert greedy.readings["quality"].value == 0.0
    assert exact.readings["quality"].value == 1.0


def test_a_failed_check_is_planned_for_again_from_the_same_table():
    toy = concave_toy(random.Random(4), num_knobs=4, num_values=4)
    counting = Counting(toy.meters["quality"])
    slower = Scaled(toy.meters["latency"], 1.2)
    limit_ms = 0.6 * toy.meters["latency"].read(toy.start).value
    result, rows = run(
        toy,
        limits(latency_ms=limit_ms),
        Exact(),
        meters={**toy.meters, "quality": counting},
        check=lambda model: {"latency": slower.read(model)},
    )
    assert result.outcome is Outcome.MET
    assert [row.accepted for row in rows if row.kind == "check"][-1]
    assert any(row.kind == "check" and not row.accepted for row in rows)
    after = [row for row in rows if row.step > next(r.step for r in rows if r.kind == "check")]
    assert {row.kind for row in after} <= {"move", "check"}
    assert len(set(counting.models)) == len(counting.models)


def test_a_resumed_run_reads_nothing_twice():
    toy = concave_toy(random.Random(5), num_knobs=3, num_values=4)
    budget = limits(latency_ms=0.5 * toy.meters["latency"].read(toy.start).value)
    whole, rows = run(toy, budget, Exact())
    for num_rows in (1, 4, len(rows) - 1):
        ledger = Ledger()
        for row in rows[:num_rows]:
            ledger.append(row)
        counting = Counting(toy.meters["latency"])
        again, _ = run(toy, budget, Exact(), ledger=ledger, meters={**toy.meters, "latency": counting})
        assert again == whole
        assert not set(counting.models) & {row.setting for row in rows[:num_rows]}


def test_it_goes_on_where_costs_multiply_instead_of_adding_up():
    toy = composed_toy(3)
    for size in (40, 12, 3):  # of 48 bytes; 3 is the least there is
        budget = Budget.parse(f"{size}B")
        result, rows = run(toy, budget, Exact())
        assert result.outcome is Outcome.MET, size
        assert len({row.setting for row in accepted(rows)}) == len(accepted(rows))


def test_moves_under_the_quality_floor_are_replaced_by_others():
    toy = Toy(
        (Choice("a", (0, 1)), Choice("b", (0, 1)), Choice("c", (0, 1))),
        {
            "latency": Additive({name: {0: 0.0, 1: 2.0} for name in "abc"}, base=1.0),
            # alone, a loses least; but not in the model, whose quality falls under the floor by it
            "quality": Additive({"a": {0: -0.2, 1: 0.0}, "b": {0: 0.0, 1: 0.3}, "c": {0: 0.0, 1: 0.4}}, unit="points"),
        },
    )
    result, rows = run(toy, limits(latency_ms=5.0), Exact(), quality_floor=0.45)
    assert not result.met or result.readings["quality"].value >= 0.45
    assert [(row.knob, row.note) for row in rows if row.kind == "move"] == [("a", "")]
    result, rows = run(toy, limits(latency_ms=5.0), Exact(), quality_floor=0.6)
    assert result.outcome is Outcome.QUALITY_COLLAPSE
    assert {row.knob for row in rows if row.kind == "move"} == {"a", "b", "c"}


def test_noise_of_the_meters_does_not_stop_it():
    toy = concave_toy(random.Random(6), num_knobs=4, num_values=4)
    cost = Jittered(toy.meters["latency"], stderr=0.1, seed=2)
    start_ms = cost.read(toy.start).value
    result, _ = run(toy, limits(latency_ms=0.5 * start_ms), Exact(), meters={**toy.meters, "latency": cost}, z=1.645)
    assert result.met
    assert result.readings["latency"].upper(1.645) <= 0.5 * start_ms


@pytest.mark.skipif(sys.platform == "win32", reason="no C library by that name")
def test_what_the_solver_prints_does_not_reach_the_output(capfd):
    libc = ctypes.CDLL(None)
    print("before")
    with silenced():
        libc.puts(b"stray")
    print("after")
    libc.puts(b"own")
    libc.fflush(None)
    sys.stdout.flush()
    assert set(capfd.readouterr().out.split()) == {"before", "after", "own"}
