"""Backtracking: prune then quantise reaches budgets where plain schedules stop early (the paper's third experiment)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.worlds import STAGED, accepted, run
from tests.methods.compress.policies.instances import limits

from apportion.core.budget import Budget
from apportion.core.knob import Choice
from apportion.core.loop import Outcome
from apportion.core.policy import Greedy, Proposal, Scheduled
from apportion.errors import KnobError
from apportion.methods.compress.policies import policy_named
from apportion.methods.compress.policies.composed import Backtracking
from apportion.methods.compress.policies.exact import Exact
from apportion.testing.suites import PolicySuite, check_proposition_1
from apportion.testing.toys import Additive, Counting, Toy, composed_toy, rough_toy

STAGES = (Scheduled(stages=("prune.*",)), Scheduled(stages=("quantise.*",)))


class TestBacktracking(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Backtracking((Scheduled(stages=("part0",)), Scheduled(stages=("part1", "*"))))


class TestBacktrackingInOrder(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Backtracking((Scheduled(),), patience=math.inf)


class TestBacktrackingAroundGreedy(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Backtracking((Greedy(),))


class TestBacktrackingAroundExact(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Backtracking((Exact(),))


def table(costs, qualities):
    """A toy from the cost and quality of every value of every knob, cheapest value first."""
    knobs = tuple(Choice(name, range(len(terms))) for name, terms in costs.items())
    cost, quality = (
        {name: dict(enumerate(map(float, terms))) for name, terms in side.items()} for side in (costs, qualities)
    )
    return Toy(knobs, {"latency": Additive(cost), "quality": Additive(quality, unit="points")})


def plateau_toy():
    """The first step of quantising either layer saves nothing; the second does."""
    costs = {
        "prune.conv1": [2, 3, 4],
        "prune.conv2": [2, 3, 4],
        "quantise.conv1": [2, 4, 4],
        "quantise.conv2": [1, 4, 4],
    }
    return table(costs, {name: [0, 1, 2] for name in costs})


@pytest.mark.parametrize("patience", [1.0, math.inf])
@pytest.mark.parametrize("break_on_reject", [True, False])
def test_a_switch_that_stops_a_plain_schedule_as_written_does_not_stop_it(patience, break_on_reject):
    toy, budget = plateau_toy(), limits(latency_ms=7.0)
    plain, _ = run(toy, budget, STAGED, break_on_reject=break_on_reject)
    assert plain.met is not break_on_reject  # else it passes over the first step
    if break_on_reject:
        assert plain.outcome is Outcome.EARLY_BREAK
        assert plain.readings["latency"].value == 12.0  # all pruned, nothing quantised
    result, rows = run(toy, budget, Backtracking(STAGES, patience=patience), break_on_reject=break_on_reject)
    assert result.outcome is Outcome.MET
    assert result.setting["quantise.conv1"] == result.setting["quantise.conv2"] == 0
    assert all(row.accepted for row in rows if row.kind == "move")


def floor_toy():
    """Pruning's last step ruins the model; quantising costs one point, and has to find that point still there."""
    return table(
        {"prune.conv": [2, 4, 6, 8], "quantise.conv": [1, 8]},
        {"prune.conv": [-9, -3, -1, 0], "quantise.conv": [-1, 0]},
    )


def test_the_first_method_does_not_use_up_the_quality_that_the_second_needs():
    toy, budget = floor_toy(), limits(latency_ms=7.0)
    options = {"quality_floor": -3.5}
    plain, _ = run(toy, budget, STAGED, **options)
    assert plain.outcome is Outcome.QUALITY_COLLAPSE
    assert plain.readings["latency"].value == 12.0
    result, rows = run(toy, budget, Backtracking(STAGES, quality_floor=-3.5), break_on_reject=True, **options)
    assert result.outcome is Outcome.MET
    assert result.readings["quality"].value == -2.0
    assert [row.knob for row in accepted(rows)] == ["quantise.conv", "prune.conv"]


def test_patience_keeps_the_order_of_methods_while_it_costs_no_more_than_that():
    # a step of pruning loses twice as much per millisecond as quantising
    toy = table(
        {"prune.conv": [1, 2, 3], "quantise.conv": [1, 2, 3]}, {"prune.conv": [0, 2, 4], "quantise.conv": [0, 1, 2]}
    )

    def order(patience):
        _, rows = run(toy, limits(latency_ms=2.0), Backtracking(STAGES, patience=patience))
        return [row.knob.split(".")[0] for row in accepted(rows)]

    assert order(1.0) == order(1.9) == ["quantise", "quantise", "prune", "prune"]
    assert order(2.0) == order(math.inf) == ["prune", "prune", "quantise", "quantise"]


def test_infinite_patience_does_not_read_later_methods_before_their_turn():
    toy = floor_toy()
    counting = Counting(toy.meters["quality"])
    run(
        toy,
        limits(latency_ms=12.0),
        Backtracking(STAGES, patience=math.inf),
        meters={**toy.meters, "quality": counting},
    )
    assert {model["quantise.conv"] for model in counting.models} == {1}
    assert len(counting.models) == 3  # the start and two steps of pruning


@dataclass(frozen=True)
class Plunge:
    """Proposes the cheapest value of each knob at once."""

    def propose(self, state):
        rejected = {(row.knob, row.value) for row in state.rows_here() if row.kind == "move"}
        for knob in state.knobs:
            if state.setting[knob.name] != knob.cheapest and (knob.name, knob.cheapest) not in rejected:
                return Proposal(knob.name, knob.cheapest)
        return None


def test_finer_steps_are_taken_where_a_coarse_one_falls_under_the_floor():
    toy = floor_toy()
    plain, _ = run(toy, limits(latency_ms=5.0), Plunge(), quality_floor=-5.0)
    assert plain.outcome is Outcome.QUALITY_COLLAPSE
    result, _ = run(
        toy,
        limits(latency_ms=5.0),
        Backtracking((Plunge(),), quality_floor=-5.0),
        quality_floor=-5.0,
        break_on_reject=True,
    )
    assert result.outcome is Outcome.MET
    assert result.setting["prune.conv"] == 1


def test_without_the_floor_it_is_told_of_it_by_rejected_moves_and_ends():
    result, rows = run(floor_toy(), limits(latency_ms=0.5), Backtracking(STAGES), quality_floor=-5.0)
    assert result.outcome is Outcome.QUALITY_COLLAPSE
    assert len(rows) < 20


def test_knobs_of_no_method_are_left_alone():
    toy = table({"prune.a": [1, 2], "other.a": [1, 2]}, {"prune.a": [0, 1], "other.a": [0, 1]})
    result, rows = run(toy, limits(latency_ms=2.0), Backtracking((STAGES[0],)))
    assert result.outcome is Outcome.EARLY_BREAK
    assert {row.knob for row in rows[1:]} == {"prune.a"}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 3.0, math.inf]), st.floats(0.2, 0.9), st.floats(0.0, 0.9))
def test_no_move_of_it_is_rejected_and_no_knob_is_left_that_could_go_on(seed, patience, share, floor):
    toy = rough_toy(random.Random(seed))
    budget = limits(latency_ms=share * toy.meters["latency"].read(toy.start).value)
    policy = Backtracking((Scheduled(("part0",)), Scheduled(("*",))), quality_floor=floor, patience=patience)
    result, rows = run(toy, budget, policy, quality_floor=floor, break_on_reject=True)
    assert all(row.accepted for row in rows if row.kind == "move")
    check_proposition_1(rows, knobs=toy.knobs, budget=budget, max_steps=10_000)
    if result.met:
        return
    for knob in toy.knobs:  # a next step that saves and keeps to the floor would have been taken
        value = knob.cheaper(result.setting[knob.name])
        if value is not None:
            after = result.setting.replace(knob.name, value)
            saves = toy.meters["latency"].read(after).value < result.readings["latency"].value
            assert not (saves and toy.meters["quality"].read(after).value >= floor)


@pytest.mark.parametrize("size", [24, 10, 2])
def test_two_methods_compose_on_one_model(size):
    result, _ = run(composed_toy(), Budget.parse(f"{size}B"), Backtracking(STAGES), break_on_reject=True)
    assert result.outcome is Outcome.MET


@pytest.mark.parametrize(("policies", "patience"), [((), 1.0), (STAGES, 0.5), (STAGES, math.nan)])
def test_what_makes_no_sense_is_refused(policies, patience):
    with pytest.raises(KnobError):
        Backtracking(policies, patience=patience)


def test_the_backtracking_of_fit_moves_the_knobs_of_every_rule():
    names = ("prune.a", "prune-all", "depth.b", "tokens", "lowrank.c", "sparse.d", "quantise")
    toy = table(dict.fromkeys(names, (0, 1)), dict.fromkeys(names, (1, 1)))
    result, _ = run(toy, Budget.parse("latency<=0.5ms"), policy_named("backtracking"))
    assert result.met
    assert set(result.setting.values()) == {0}
