"""The table of sensitivities: read once from the start, and exact where readings add up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from tests.core.worlds import run
from tests.methods.compress.policies.instances import additive_toys, limits

from apportion.core.budget import Budget
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger
from apportion.core.meter import Reading
from apportion.methods.compress.policies.exact import Exact
from apportion.methods.compress.policies.problem import Problem
from apportion.methods.compress.policies.sensitivity import Table
from apportion.testing.toys import Additive, Counting, Jittered, Toy, concave_toy


def whole_table(toy):
    """The table of a toy, and the rows it was read from."""
    _, rows = run(toy, limits(latency_ms=0.001), Exact())
    return Table.of(toy.knobs, rows, "quality"), rows


@settings(deadline=None, max_examples=30)
@given(additive_toys())
def test_predictions_are_exact_where_readings_add_up(toy):
    table, _ = whole_table(toy)
    assert table.missing() == []
    start = toy.meters["quality"].read(toy.start).value
    for setting in toy.settings():
        assert table.predict_loss(setting) == start - toy.meters["quality"].read(setting).value
        for key in ("latency", "size"):
            assert table.predict_cost(setting, key) == toy.meters[key].read(setting).value


def test_every_value_is_read_once_and_from_the_start():
    toy = concave_toy(random.Random(0), num_knobs=3, num_values=4)
    counting = Counting(toy.meters["latency"])
    _, rows = run(toy, limits(latency_ms=0.001), Exact(), meters={**toy.meters, "latency": counting})
    trials = [row for row in rows if row.kind == "trial"]
    assert [row.setting for row in trials] == [
        toy.start.replace(knob.name, value) for knob in toy.knobs for value in reversed(knob.values[:-1])
    ]
    assert rows[1 : 1 + len(trials)] == trials
    assert counting.models[: 1 + len(trials)] == [toy.start, *(row.setting for row in trials)]
    assert len(set(counting.models)) == len(counting.models)


def test_what_was_read_after_the_run_left_its_start_is_no_sensitivity():
    toy = concave_toy(random.Random(1), num_knobs=2, num_values=3)
    ledger = Ledger()
    run(toy, limits(latency_ms=0.001), Exact(), ledger=ledger)
    first_move = next(row.step for row in ledger if row.kind == "move")
    before, after = ledger[: first_move + 1], ledger[:]
    assert len(after) > len(before)
    assert Table.of(toy.knobs, after, "quality") == Table.of(toy.knobs, before, "quality")


def test_a_table_that_is_not_whole_names_what_is_missing():
    toy = concave_toy(random.Random(1), num_knobs=2, num_values=3)
    _, rows = whole_table(toy)
    table = Table.of(toy.knobs, rows[:3], "quality")
    assert [(knob.name, value) for knob, value in table.missing()] == [("part1", 1), ("part1", 0)]
    assert table.knows(toy.knobs[1], 2)
    assert not table.knows(toy.knobs[1], 1)


def test_costs_are_judged_with_their_doubt():
    toy = Toy(
        (Choice("a", (0, 1)),),
        {
            "latency": Jittered(Additive({"a": {0: 4.0, 1: 8.0}}), stderr=0.5, seed=1),
            "quality": Additive({"a": {0: 0.0, 1: 1.0}}, unit="points"),
        },
    )
    table, rows = whole_table(toy)
    cheap, dear = rows[1].readings["latency"], rows[0].readings["latency"]
    assert table.cost(toy.knobs[0], 0, "latency", z=2.0) == cheap.upper(2.0) - dear.upper(2.0)
    assert table.predict_cost(Setting({"a": 0}), "latency", z=2.0) == pytest.approx(cheap.value + 1.0)


def test_a_problem_offers_only_cheaper_values_that_save_and_starts_from_what_was_read():
    knobs = (Choice("a", (0, 1, 2, 3)), Choice("b", (0, 1)))
    toy = Toy(
        knobs,
        {
            "latency": Additive({"a": {0: 1.0, 1: 5.0, 2: 4.0, 3: 9.0}, "b": {0: 1.0, 1: 1.0}}),
            "quality": Additive({"a": {0: 0.0, 1: 3.0, 2: 4.0, 3: 6.0}}, unit="points"),
        },
    )
    table, _ = whole_table(toy)
    # the table says that (a=2, b=1) costs 5 ms; it was read as 6 ms, so 2 ms have to go
    readings = {"latency": Reading(value=6.0, unit="ms")}
    problem = Problem.of(table, Setting({"a": 2, "b": 1}), readings, Budget.parse("4ms"))
    assert [[option.value for option in options] for options in problem.options] == [[2, 0], [1]]
    assert problem.options[0][1].loss == 4.0
    assert problem.options[0][1].costs == (-0.75,)
    assert problem.room == (-0.5,)
    assert problem.excess((0, 0)) == 0.5
    assert problem.excess((1, 0)) == 0.0


def test_knobs_that_restore_quality_are_not_read():
    toy = concave_toy(random.Random(0), num_knobs=2, num_values=3)
    restoring = Choice("distil", (0, 1), restores=True)
    _, rows = run(Toy((*toy.knobs, restoring), toy.meters), limits(latency_ms=0.001), Exact())
    assert {row.knob for row in rows[1:]} == {"part0", "part1"}
    assert Table.of((*toy.knobs, restoring), rows, "quality").missing() == []
