"""The budgeted loop: Proposition 1, its named outcomes, what it refuses, and composed methods."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.worlds import STAGED, accepted, ladder, measure, run, table, worlds

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger
from apportion.core.loop import Guard, Outcome, budgeted_loop
from apportion.core.meter import Reading
from apportion.core.policy import Greedy, Proposal, Scheduled
from apportion.errors import BudgetError, KnobError
from apportion.testing.suites import check_proposition_1
from apportion.testing.toys import Additive, Counting, Jittered, Noisy, Scaled, Toy, composed_toy

# Proposition 1


@settings(deadline=None, max_examples=300)
@given(worlds(checked=False))
def test_accepted_costs_fall_strictly_and_the_run_ends_whatever_the_meters_read(world):
    result, rows = run(world.toy, world.budget, **world.options)
    z, max_steps = world.options["z"], world.options["max_steps"]
    check_proposition_1(rows, knobs=world.toy.knobs, budget=world.budget, z=z, max_steps=max_steps)
    costs = [rows[0].cost, *(row.cost for row in accepted(rows))]
    assert all(after < before for before, after in itertools.pairwise(costs))
    assert world.budget.met(result.readings, z) == (costs[-1] == 0)
    floor = world.options["quality_floor"]
    assert result.met == (costs[-1] == 0 and (floor is None or result.readings["quality"].value >= floor))
    assert result.setting == ([rows[0], *accepted(rows)][-1]).setting
    assert result.model == result.setting


@settings(deadline=None, max_examples=600)
@given(worlds(checked=True))
def test_proposition_1_holds_between_checks_and_met_means_measured_within_the_promise(world):
    result, rows = run(world.toy, world.budget, **world.options)
    z, max_steps = world.options["z"], world.options["max_steps"]
    check_proposition_1(rows, knobs=world.toy.knobs, budget=world.budget, z=z, max_steps=max_steps)
    failed = [row for row in rows if row.kind == "check" and not row.accepted]
    assert len(failed) <= world.options["max_checks"]
    assert (result.outcome is Outcome.BUDGET_VIOLATION) == (len(failed) == world.options["max_checks"])
    assert result.budget == world.budget
    if result.met:
        assert world.budget.met(result.measured, z)
        assert rows[-1].kind == "check"
        assert rows[-1].setting == result.setting
        assert rows[-1].readings == result.measured


@settings(deadline=None, max_examples=100)
@given(worlds(checked=False))
def test_no_accepted_move_reads_under_the_quality_floor(world):
    _, rows = run(world.toy, world.budget, **world.options)
    floor = world.options["quality_floor"]
    if floor is not None:
        assert all(row.readings["quality"].value >= floor for row in accepted(rows))


def test_a_noisy_meter_can_not_make_the_loop_run_in_circles():
    toy = table({"a": [5.0] * 5, "b": [5.0] * 5})
    noisy = Noisy(toy.meters["latency"], stderr=1.0, generator=random.Random(0))
    _, rows = run(toy, "1ms", meters={**toy.meters, "latency": noisy})
    costs = [row.cost for row in accepted(rows)]
    assert costs == sorted(costs, reverse=True)
    assert len(rows) <= 1 + 2 * 8 * 2  # no more than a trial and a move of every knob at each of eight levels


def test_doubt_about_a_reading_counts_against_the_budget():
    class InDoubt(Additive):
        def read(self, model):
            return replace(super().read(model), stderr=1.0)

    toy = ladder()
    in_doubt = {**toy.meters, "latency": InDoubt(toy.meters["latency"].terms)}
    assert run(toy, "5.5ms", meters=in_doubt)[0].setting["depth"] == 5
    assert run(toy, "5.5ms", meters=in_doubt, z=1.645)[0].setting["depth"] == 3  # 3 + 1.645 <= 5.5 < 4 + 1.645


def test_every_value_that_a_policy_tries_is_read_for_itself():
    class TriesAll:
        """Looks at every value of a knob before it moves to the one that just meets the budget."""

        def propose(self, state):
            tried = {row.value for row in state.rows_here()}
            untried = [value for value in state.knobs[0].values[:-1] if value not in tried]
            return Proposal("depth", untried[0], commit=False) if untried else Proposal("depth", 6)

    toy = ladder()
    counting = Counting(toy.meters["latency"])
    result, rows = run(toy, "6.5ms", TriesAll(), meters={**toy.meters, "latency": counting})
    assert [row.readings["latency"].value for row in rows] == [10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 6]
    assert len(counting.models) == 10  # the move was read as a trial
    assert result.model == result.setting == Setting({"depth": 6})


# The ways a run ends


def test_a_model_within_the_budget_is_left_as_it_is():
    result, rows = run(ladder(), "10ms")
    assert result.outcome is Outcome.MET
    assert [row.kind for row in rows] == ["start"]
    assert result.measured == {}


def test_a_run_stops_as_soon_as_the_budget_is_met():
    result, _ = run(ladder(), "6ms")
    assert result.outcome is Outcome.MET
    assert result.setting == Setting({"depth": 6})


@pytest.mark.parametrize("policy", [Greedy(), Scheduled()])
def test_early_break_when_no_single_move_saves_cost(policy):
    toy = table({"a": [8.5, 9.0, 8.0], "b": [2.0, 2.0]})
    result, rows = run(toy, "5ms", policy)
    assert result.outcome is Outcome.EARLY_BREAK
    assert not result.met
    assert accepted(rows) == []
    assert {row.note for row in rows if row.kind == "move"} <= {"no progress"}  # greedy sees it when trying
    assert {(row.knob, row.value) for row in rows[1:]} == {("a", 1), ("a", 0), ("b", 0)}


def test_early_break_when_the_cheapest_setting_is_over_the_budget():
    result, _ = run(ladder(), "0.5ms")
    assert result.outcome is Outcome.EARLY_BREAK
    assert result.setting == Setting({"depth": 1})


@pytest.mark.parametrize("policy", [Greedy(), Scheduled()])
def test_quality_collapse_when_the_floor_blocks_every_move(policy):
    result, rows = run(ladder(), "3ms", policy, quality_floor=6.0)
    assert result.outcome is Outcome.QUALITY_COLLAPSE
    assert result.setting == Setting({"depth": 6})
    assert result.readings["quality"].value == 6.0
    assert rows[-1].note == "quality floor"


def test_a_floor_on_one_knob_sends_the_run_to_another():
    toy = table({"fragile": [1, 5], "sturdy": [1, 5]}, {"fragile": [0, 9], "sturdy": [8, 9]})
    result, rows = run(toy, "6ms", Scheduled(), quality_floor=10.0)
    assert result.outcome is Outcome.MET
    assert [(row.knob, row.note) for row in rows if row.kind == "move"] == [
        ("fragile", "quality floor"),
        ("sturdy", ""),
    ]


@pytest.mark.parametrize("max_checks", [1, 2, 5])
def test_budget_violation_when_every_check_measures_above(max_checks):
    checks = []

    def always_above(model):
        checks.append(model)
        return {"latency": Reading(value=8.001, unit="ms")}

    result, rows = run(ladder(100), "8ms", check=always_above, max_checks=max_checks)
    assert result.outcome is Outcome.BUDGET_VIOLATION
    assert not result.met
    assert len(checks) == max_checks
    assert result.measured == {"latency": Reading(value=8.001, unit="ms")}
    assert [row.note for row in rows if row.kind == "check"] == ["measured over budget"] * max_checks
    assert rows[-1].kind == "check"


@settings(deadline=None, max_examples=60)
@given(st.floats(8.0, 1e6, exclude_min=True), st.integers(1, 9), st.sampled_from([Greedy(), Scheduled()]))
def test_a_model_that_always_measures_above_is_never_reported_as_met(measured_ms, max_checks, policy):
    result, rows = run(
        ladder(),
        "8ms",
        policy,
        check=lambda model: {"latency": Reading(value=measured_ms, unit="ms")},
        max_checks=max_checks,
    )
    assert result.outcome in (Outcome.BUDGET_VIOLATION, Outcome.EARLY_BREAK)
    assert sum(row.kind == "check" for row in rows) <= max_checks


def test_a_run_recovers_from_failed_checks_and_ends_measured_within_the_promise():
    toy = ladder()
    result, rows = run(toy, "8ms", check=measure(Scaled(toy.meters["latency"], 1.25)))
    assert result.outcome is Outcome.MET
    checks = [row for row in rows if row.kind == "check"]
    # 8 ms predicted is 10 ms measured; from there 8 / 1.25 = 6.4 ms is the limit, and 6 ms predicted is 7.5 ms measured
    assert [(row.setting["depth"], row.accepted) for row in checks] == [(8, False), (6, True)]
    assert result.measured["latency"].value == 7.5
    assert result.budget == Budget.parse("8ms")
    assert Budget.parse("8ms").met(result.measured)


def test_a_run_recovers_from_several_failed_checks_of_a_device_that_is_slower_the_smaller_the_model():
    toy = ladder(20)
    overhead = Additive({"depth": {value: 3.0 + 0.75 * value for value in range(1, 21)}})
    result, rows = run(toy, "8ms", check=measure(overhead))
    assert result.outcome is Outcome.MET
    assert result.measured["latency"].value <= 8.0
    verdicts = [row.accepted for row in rows if row.kind == "check"]
    assert len(verdicts) >= 2
    assert verdicts == [False] * (len(verdicts) - 1) + [True]


def test_a_looser_aim_lets_checks_lead_a_run_to_the_budget_from_above():
    toy = ladder(100)
    check = measure(Scaled(toy.meters["latency"], 0.9))  # readings overstate
    plain, _ = run(toy, "50ms", check=check)
    result, rows = run(toy, "50ms", check=check, aim=Budget.parse("60ms"), max_checks=20)
    assert plain.setting == Setting({"depth": 50})
    assert result.outcome is Outcome.MET
    assert result.budget == Budget.parse("50ms")
    assert result.setting == Setting({"depth": 55})  # 49.5 ms measured; one more would be 50.4
    assert [row.accepted for row in rows if row.kind == "check"][-2:] == [False, True]


def test_what_saves_no_more_than_rounding_is_no_progress():
    toy = table({"a": (9.0 - 1e-9, 9.0), "b": (1.0, 2.0)})
    result, rows = run(toy, "9ms")
    assert result.outcome is Outcome.EARLY_BREAK
    assert [row.knob for row in accepted(rows)] == ["b"]


def test_a_failed_check_tightens_only_the_limit_it_broke():
    knobs = (Choice("wide", range(1, 11)), Choice("deep", range(1, 11)))
    cost = {value: float(value) for value in range(1, 11)}
    toy = Toy(
        knobs,
        {
            "latency": Additive({"deep": cost}),
            "size": Additive({"wide": cost}, unit="B"),
            "quality": Additive({"deep": cost, "wide": cost}, unit="points"),
        },
    )

    def check(model):
        return {"latency": toy.meters["latency"].read(model), "size": Scaled(toy.meters["size"], 1.5).read(model)}

    result, _ = run(toy, "7ms, 6B", check=check)
    assert result.outcome is Outcome.MET
    assert result.setting == Setting({"deep": 7, "wide": 4})


def test_a_check_that_measures_less_than_predicted_is_taken_at_once():
    toy = ladder()
    result, rows = run(toy, "8ms", check=measure(Scaled(toy.meters["latency"], 0.5)))
    assert result.setting == Setting({"depth": 8})
    assert result.measured["latency"].value == 4.0
    assert sum(row.kind == "check" for row in rows) == 1


def test_a_run_that_is_stuck_above_its_budget_is_measured_before_it_gives_up():
    """Predicted to take a millisecond with nothing left to save, where half of that is an error."""
    toy = ladder()
    result, rows = run(toy, "0.8ms", check=measure(Scaled(toy.meters["latency"], 0.5)))
    assert result.outcome is Outcome.MET
    assert (result.setting["depth"], result.measured["latency"].value) == (1, 0.5)
    result, rows = run(toy, "0.4ms", check=measure(Scaled(toy.meters["latency"], 0.5)))
    assert result.outcome is Outcome.EARLY_BREAK
    assert [row.note for row in rows if row.kind == "check"] == ["measured over budget"]
    result, rows = run(toy, "0.4ms", check=measure(toy.meters["latency"]), max_steps=9)
    assert result.outcome is Outcome.OUT_OF_STEPS


def test_a_check_counts_its_doubt_against_the_promise():
    toy = ladder()
    fresh = Jittered(toy.meters["latency"], stderr=0.5, seed=3)
    result, _ = run(toy, "8ms", check=measure(fresh), z=1.645)
    assert result.met
    assert result.measured["latency"].upper(1.645) <= 8.0


@settings(deadline=None)
@given(st.floats(1.0, 1e6), st.floats(0.5, 1.0))
def test_a_check_over_by_the_least_amount_makes_the_run_go_on(limit_ms, share):
    toy = table({"a": [0.1 * limit_ms, share * limit_ms, 2 * limit_ms]})
    over = {0: 0.1 * limit_ms, 1: math.nextafter(limit_ms, math.inf)}
    budget = Budget((Limit(quantity="latency", value=limit_ms, unit="ms"),))
    result, _ = run(toy, budget, check=lambda model: {"latency": Reading(value=over[model["a"]], unit="ms")})
    assert result.outcome is Outcome.MET
    assert result.setting == Setting({"a": 0})


def test_a_model_predicted_to_cost_nothing_but_measured_above_is_not_met():
    toy = table({"a": [0.0, 9.0]})
    result, _ = run(toy, "8ms", check=lambda model: {"latency": Reading(value=8.5, unit="ms")})
    assert not result.met


@pytest.mark.parametrize("max_steps", [0, 1, 3, 10])
def test_a_run_out_of_steps_says_so_and_goes_on_when_given_more(max_steps):
    whole, rows = run(ladder(), "2ms")
    assert len(rows) > 11
    ledger = Ledger()
    result, some = run(ladder(), "2ms", ledger=ledger, max_steps=max_steps)
    assert result.outcome is Outcome.OUT_OF_STEPS
    assert len(some) == 1 + max_steps
    again, all_rows = run(ladder(), "2ms", ledger=ledger)
    assert (again, all_rows) == (whole, rows)


def test_a_run_without_a_step_left_for_the_check_is_out_of_steps():
    toy = ladder()
    _, unchecked = run(toy, "8ms")
    checks = []
    result, rows = run(toy, "8ms", check=checks.append, max_steps=len(unchecked) - 1)
    assert result.outcome is Outcome.OUT_OF_STEPS
    assert checks == []
    assert rows == unchecked


def test_a_run_out_of_steps_still_shows_what_its_last_check_measured():
    toy = ladder()
    slower = measure(Scaled(toy.meters["latency"], 1.25))
    _, rows = run(toy, "8ms", check=slower)
    result, _ = run(toy, "8ms", check=slower, max_steps=len(rows) - 2)
    assert result.outcome is Outcome.OUT_OF_STEPS
    assert result.measured["latency"].value == 10.0


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_remedy_of_one_line(outcome):
    assert outcome.remedy
    assert "\n" not in outcome.remedy


def test_a_guard_has_the_last_word_on_quality_where_the_clock_agrees():
    def guard(quality):
        return Guard(lambda model: {"quality": Reading(value=quality, unit="points")}, floor=0.5)

    exact = measure(ladder().meters["latency"])
    low, rows = run(ladder(), "3ms", Greedy(), quality_floor=-99.0, check=exact, guard=guard(0.4))
    assert low.outcome is Outcome.QUALITY_COLLAPSE
    assert rows[-1].note == "measured under the quality floor"
    assert low.measured["quality"].value == 0.4
    high, rows = run(ladder(), "3ms", Greedy(), quality_floor=99.0, quality_slack=999.0, check=exact, guard=guard(0.6))
    assert high.met  # though moves were read under the floor
    assert [row.readings["quality"].value for row in rows if row.kind == "check"] == [0.6]


def test_a_guard_reads_only_what_was_measured_within_the_budget_and_needs_a_check():
    def reads(model):
        read.append(model)
        return {"quality": Reading(value=1.0, unit="points")}

    read = []
    slower = measure(Scaled(ladder().meters["latency"], 1.25))
    _, rows = run(ladder(), "8ms", check=slower, guard=Guard(reads, 0.0))
    assert any(row.note == "measured over budget" for row in rows)
    assert len(read) == sum(row.kind == "check" and row.accepted for row in rows) == 1
    with pytest.raises(KnobError, match="give both"):
        run(ladder(), "8ms", guard=Guard(reads, 0.0))


def test_a_confirmation_comes_after_the_guard_and_may_send_the_run_on():
    said = []
    exact, slower = (measure(Scaled(ladder().meters["latency"], by)) for by in (1.0, 1.25))
    guard = Guard(lambda model: said.append("guard") or {"quality": Reading(value=1.0, unit="points")}, 0.0)

    def confirm(model):
        said.append("confirm")
        return slower(model)

    result, rows = run(ladder(), "8ms", check=exact, guard=guard, confirm=confirm)
    assert result.met
    assert result.measured["latency"].value == slower(result.model)["latency"].value <= 8.0
    assert any(row.note == "measured over budget" for row in rows)  # where the check alone had agreed
    assert said == ["guard", "confirm"] * sum(row.kind == "check" for row in rows)
    with pytest.raises(KnobError, match="give both"):
        run(ladder(), "8ms", confirm=confirm)


def test_a_guard_judges_the_reading_it_names_at_its_own_confidence_and_records_all():
    def guard(z):
        readings = {"quality": Reading(value=0.9, unit="ratio"), "kept": Reading(value=0.99, unit="ratio", stderr=0.01)}
        return Guard(lambda model: readings, floor=0.98, key="kept", z=z)

    exact = measure(ladder().meters["latency"])
    value, rows = run(ladder(), "3ms", Greedy(), check=exact, guard=guard(0.0))
    assert value.met
    assert {"quality", "kept"} <= set(rows[-1].readings)
    bound, _ = run(ladder(), "3ms", Greedy(), check=exact, guard=guard(1.645))
    assert bound.outcome is Outcome.QUALITY_COLLAPSE
    assert bound.measured["kept"].value == 0.99


# What is refused


def test_a_proposal_outside_the_domain_or_of_an_unknown_knob_is_refused_before_it_is_read():
    for proposal in (Proposal("depth", 99), Proposal("width", 1)):
        policy = type("Fixed", (), {"propose": lambda self, state, proposal=proposal: proposal})()
        ledger = Ledger()
        with pytest.raises(KnobError):
            run(ladder(), "5ms", policy, ledger=ledger)
        assert [row.kind for row in ledger] == ["start"]


def test_a_budget_that_no_meter_reads_is_refused_before_anything_is_read():
    ledger = Ledger()
    with pytest.raises(KnobError, match="no meter reads size; meters are given for latency, quality"):
        run(ladder(), "5ms, 3B", ledger=ledger)
    with pytest.raises(KnobError, match="no meter reads accuracy"):
        run(ladder(), "5ms", ledger=ledger, quality="accuracy")
    assert list(ledger) == []


def test_knobs_without_a_rule_are_refused():
    toy = ladder()
    with pytest.raises(KnobError, match="has no rule"):
        budgeted_loop(
            toy.start,
            knobs=toy.knobs,
            rules={},
            meters=toy.meters,
            budget=Budget.parse("5ms"),
            policy=Greedy(),
            ledger=Ledger(),
        )


def test_a_relative_budget_is_refused_until_it_is_resolved():
    ledger = Ledger()
    with pytest.raises(BudgetError, match="resolve it"):
        run(ladder(), "60%", ledger=ledger)
    assert list(ledger) == []


def test_the_model_given_is_left_as_it_was():
    toy = composed_toy()
    before = dict(toy.model)
    result, _ = run(toy, "10B")
    assert result.met
    assert toy.model == before
    assert result.model != before


def test_on_row_is_told_of_every_new_row_once_and_of_no_old_one():
    told = []
    ledger = Ledger()
    _, rows = run(ladder(), "5ms", ledger=ledger, on_row=told.append, max_steps=4)
    assert told == rows
    told.clear()
    _, more = run(ladder(), "5ms", ledger=ledger, on_row=told.append)
    assert told == more[len(rows) :]


# Composed methods (Algorithm 10)


@pytest.mark.parametrize("policy", [Greedy(), Scheduled(), STAGED])
@pytest.mark.parametrize("budget", ["24B", "10B", "2B"])
def test_two_methods_compose_on_one_model(policy, budget):
    toy = composed_toy()
    result, rows = run(toy, budget, policy)
    assert result.outcome is Outcome.MET
    check_proposition_1(rows, knobs=toy.knobs, budget=Budget.parse(budget), max_steps=10_000)
    for name, layer in result.model.items():
        assert layer.num_channels == result.setting[f"prune.{name}"]
        assert layer.num_bits == result.setting[f"quantise.{name}"]


def test_the_switch_from_one_method_to_the_next_does_not_end_the_run():
    toy = composed_toy()
    # pruning alone reaches 8 of 32 bytes, so the run has to go on with quantising
    result, rows = run(toy, "3B", STAGED)
    assert result.outcome is Outcome.MET
    methods = [row.knob.split(".")[0] for row in accepted(rows)]
    assert methods == ["prune"] * 4 + ["quantise"] * 3


def switch_toy():
    """Pruning works; the first step of quantising the first layer saves nothing, all others do."""
    return table(
        {
            "prune.conv1": [2, 3, 4],
            "prune.conv2": [2, 3, 4],
            "quantise.conv1": [3, 4, 4],
            "quantise.conv2": [2, 3, 4],
        }
    )


def test_a_first_step_that_saves_nothing_does_not_end_the_run_at_the_switch():
    result, rows = run(switch_toy(), "10ms", STAGED)
    assert result.outcome is Outcome.MET
    assert [(row.knob, row.accepted) for row in rows[1:]] == [
        ("prune.conv1", True),
        ("prune.conv2", True),
        ("prune.conv1", True),
        ("prune.conv2", True),
        ("quantise.conv1", False),
        ("quantise.conv2", True),
        ("quantise.conv1", True),  # the step after the one that saves nothing
    ]


def test_breaking_at_the_first_rejected_move_ends_the_run_at_the_switch_as_algorithm_1_is_written():
    result, rows = run(switch_toy(), "10ms", STAGED, break_on_reject=True)
    assert result.outcome is Outcome.EARLY_BREAK
    assert {row.knob for row in accepted(rows)} == {"prune.conv1", "prune.conv2"}
    assert (rows[-1].knob, rows[-1].accepted, rows[-1].note) == ("quantise.conv1", False, "no progress")
    assert result.readings["latency"].value == 12.0


def test_a_method_whose_moves_are_all_rejected_hands_over_to_the_next():
    toy = table({"prune.a": [5, 5, 5], "prune.b": [6, 6, 5], "quantise.a": [1, 3, 5]})
    result, rows = run(toy, "11ms", STAGED)
    assert result.outcome is Outcome.MET
    assert {row.knob for row in accepted(rows)} == {"quantise.a"}


def test_breaking_at_the_first_rejected_move_names_the_floor_where_that_was_the_reason():
    result, _ = run(ladder(), "3ms", Scheduled(), quality_floor=6.0, break_on_reject=True)
    assert result.outcome is Outcome.QUALITY_COLLAPSE
