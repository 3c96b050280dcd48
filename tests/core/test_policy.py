"""Policies: greedy finds the known optimum and reads little, scheduled keeps to its stages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import TOO_NEAR, Outcome, budgeted_loop
from apportion.core.meter import Reading
from apportion.core.policy import Greedy, Proposal, RankedBy, Restoring, Scheduled, State
from apportion.errors import KnobError
from apportion.testing.suites import PolicySuite
from apportion.testing.toys import Additive, Counting, Toy, concave_toy, rough_toy


class TestGreedy(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return Greedy


class TestScheduled(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return Scheduled


class TestScheduledInStages(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Scheduled(stages=("part1", "part0", "*"))


def latency(limit_ms):
    return Budget((Limit(quantity="latency", value=limit_ms, unit="ms"),))


def run(toy, limit_ms, policy, **options):
    ledger = options.pop("ledger", Ledger())
    result = budgeted_loop(
        toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters=options.pop("meters", toy.meters),
        budget=latency(limit_ms),
        policy=policy,
        ledger=ledger,
        **options,
    )
    return result, ledger


def accepted(ledger):
    return [row for row in ledger if row.accepted and row.kind == "move"]


# What a policy sees


def row(step, kind, setting, accepted, knob=None, latency_ms=None):
    """A row whose latency is, unless given, four milliseconds for every unit of the setting's."""
    if latency_ms is None:
        latency_ms = 4.0 * sum(setting.values())
    return Row(
        step=step,
        kind=kind,
        setting=Setting(setting),
        readings={"latency": Reading(value=latency_ms, unit="ms"), "quality": Reading(value=1.0, unit="points")},
        cost=0.5,
        accepted=accepted,
        knob=knob,
        value=None if knob is None else setting[knob],
    )


def state_after(*rows, setting):
    knobs = (Choice("a", (1, 2, 3)), Choice("b", (1, 2)))
    return State(knobs, rows, Setting(setting), rows[-1].readings, latency(6.0), "quality", 0.0)


def test_rows_here_are_those_proposed_from_the_current_setting():
    rows = (
        row(0, "start", {"a": 3, "b": 2}, True),
        row(1, "trial", {"a": 2, "b": 2}, False, "a"),
        row(2, "move", {"a": 2, "b": 2}, True, "a"),
        row(3, "check", {"a": 2, "b": 2}, False),
        row(4, "trial", {"a": 1, "b": 2}, False, "a"),
        row(5, "move", {"a": 1, "b": 2}, False, "a"),
    )
    assert state_after(*rows, setting={"a": 2, "b": 2}).rows_here() == list(rows[3:])
    assert state_after(*rows[:3], setting={"a": 2, "b": 2}).rows_here() == []
    assert state_after(*rows[:2], setting={"a": 3, "b": 2}).rows_here() == [rows[1]]


def test_next_moves_leave_out_what_was_rejected_from_here_and_what_can_go_no_lower():
    start = row(0, "start", {"a": 3, "b": 2}, True)
    rejected = row(1, "move", {"a": 2, "b": 2}, False, "a")
    elsewhere = row(2, "move", {"a": 3, "b": 1}, True, "b")

    def moves(*rows, setting):
        return [(knob.name, value) for knob, value in state_after(*rows, setting=setting).next_moves()]

    assert moves(start, setting={"a": 3, "b": 2}) == [("a", 2), ("b", 1)]
    assert moves(start, row(1, "trial", {"a": 2, "b": 2}, False, "a"), setting={"a": 3, "b": 2}) == [("a", 2), ("b", 1)]
    assert moves(start, rejected, setting={"a": 3, "b": 2}) == [("b", 1)]
    # from the new setting the rejected move is a new one, and b is at its cheapest
    assert moves(start, rejected, elsewhere, setting={"a": 3, "b": 1}) == [("a", 2)]


def test_next_moves_pass_over_values_that_were_read_to_save_nothing():
    start = row(0, "start", {"a": 3, "b": 2}, True)
    for kind in ("trial", "move"):
        nothing = row(1, kind, {"a": 2, "b": 2}, False, "a", latency_ms=20.0)
        state = state_after(start, nothing, setting={"a": 3, "b": 2})
        assert [(knob.name, value) for knob, value in state.next_moves()] == [("a", 1), ("b", 1)]
    saves = row(2, "trial", {"a": 2, "b": 1}, False, "a", latency_ms=11.0)  # after b moved it does save
    moved = row(1, "move", {"a": 3, "b": 1}, True, "b")
    state = state_after(start, nothing, replace(moved, step=2), replace(saves, step=3), setting={"a": 3, "b": 1})
    assert [(knob.name, value) for knob, value in state.next_moves()] == [("a", 2)]


@pytest.mark.parametrize("policy", [Greedy(), Scheduled()])
def test_a_step_that_saves_nothing_does_not_end_the_way(policy):
    steps = Additive({"a": {1: 1.0, 2: 5.0, 3: 5.0, 4: 9.0, 5: 9.0}}, unit="ms")
    toy = Toy(
        (Choice("a", range(1, 6)),), {"latency": steps, "quality": Additive({"a": dict.fromkeys(range(1, 6), 1.0)})}
    )
    result, _ = run(toy, 2.0, policy)
    assert result.met
    assert result.setting["a"] == 1


# Greedy


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 4))
def test_greedy_is_optimal_at_every_cost_it_passes_through_on_a_concave_toy(seed, num_knobs, num_values):
    toy = concave_toy(random.Random(seed), num_knobs=num_knobs, num_values=num_values)
    floor_ms = toy.meters["latency"].read(Setting.cheapest(toy.knobs)).value
    _, path = run(toy, floor_ms, Greedy())
    for passed in accepted(path):
        limit_ms = passed.readings["latency"].value
        result, _ = run(toy, limit_ms, Greedy())
        assert result.outcome is Outcome.MET
        assert result.setting == passed.setting
        assert result.readings["quality"].value == toy.best_quality(limit_ms)


def test_greedy_takes_the_move_that_loses_least_quality_per_cost_saved():
    knobs = (Choice("big", (0, 1)), Choice("small", (0, 1)), Choice("free", (0, 1)))
    toy = Toy(
        knobs,
        {
            # per millisecond saved: big loses 3 / 6, small loses 1 / 1, free gains
            "latency": Additive({"big": {0: 0.0, 1: 6.0}, "small": {0: 0.0, 1: 1.0}, "free": {0: 0.0, 1: 1.0}}, base=2),
            "quality": Additive(
                {"big": {0: 0.0, 1: 3.0}, "small": {0: 0.0, 1: 1.0}, "free": {0: 0.5, 1: 0.0}}, unit="points"
            ),
        },
    )
    _, ledger = run(toy, 2.0, Greedy())
    assert [moved.knob for moved in accepted(ledger)] == ["free", "big", "small"]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_reads_less_than_trying_every_knob_at_every_step(seed):
    toy = concave_toy(random.Random(seed), num_knobs=6, num_values=5)
    counting = Counting(toy.meters["latency"])
    _, ledger = run(
        toy,
        toy.meters["latency"].read(Setting.cheapest(toy.knobs)).value,
        Greedy(),
        meters={**toy.meters, "latency": counting},
    )
    by_trying_all, setting = 1, toy.start
    for moved in accepted(ledger):
        by_trying_all += sum(knob.cheaper(setting[knob.name]) is not None for knob in toy.knobs)
        setting = moved.setting
    assert len(accepted(ledger)) == 6 * 4
    # at least one reading per step is due, and the first step has to try every knob
    assert 1 + 6 * 4 <= len(counting.models) < 0.75 * by_trying_all
    assert len(set(counting.models)) == len(counting.models)


def test_greedy_tries_every_knob_once_before_it_moves_and_moves_without_reading_again():
    toy = concave_toy(random.Random(0), num_knobs=3)
    counting = Counting(toy.meters["quality"])
    _, ledger = run(toy, 1.0, Greedy(), meters={**toy.meters, "quality": counting}, max_steps=4)
    assert [(taken.kind, taken.knob) for taken in ledger[:4]] == [
        ("start", None),
        ("trial", "part0"),
        ("trial", "part1"),
        ("trial", "part2"),
    ]
    assert ledger[4].kind == "move"
    assert ledger[4].readings in [tried.readings for tried in ledger[1:4]]
    assert len(counting.models) == 4


def test_greedy_leaves_moves_that_save_nothing_for_last():
    toy = Toy(
        (Choice("idle", (0, 1)), Choice("dearer", (0, 1)), Choice("useful", (0, 1))),
        {
            "latency": Additive({"dearer": {0: 2.0, 1: 1.0}, "useful": {0: 0.0, 1: 5.0}}, base=4.0),
            "quality": Additive({"dearer": {0: 0.0, 1: 3.0}, "useful": {0: 0.0, 1: 9.0}}, unit="points"),
        },
    )
    result, ledger = run(toy, 5.0, Greedy())
    assert result.outcome is Outcome.MET
    assert [(moved.knob, moved.accepted) for moved in ledger if moved.kind == "move"] == [("useful", True)]
    result, ledger = run(toy, 1.0, Greedy())
    assert result.outcome is Outcome.EARLY_BREAK
    assert [moved.knob for moved in accepted(ledger)] == ["useful"]


# Scheduled


def even_toy(*names, num_values=3):
    """Every step of every knob saves one millisecond and one point."""
    knobs = tuple(Choice(name, range(num_values)) for name in names)
    terms = {name: {value: float(value) for value in range(num_values)} for name in names}
    return Toy(knobs, {"latency": Additive(terms, base=1.0), "quality": Additive(terms, unit="points")})


def test_scheduled_walks_all_knobs_down_in_step():
    toy = even_toy("a", "b", "c")
    _, ledger = run(toy, 1.0, Scheduled())
    assert [(moved.knob, moved.value) for moved in accepted(ledger)] == [
        ("a", 1), ("b", 1), ("c", 1), ("a", 0), ("b", 0), ("c", 0),
    ]  # fmt: skip


def test_scheduled_keeps_knobs_of_different_length_at_the_same_depth():
    knobs = (Choice("long", range(5)), Choice("short", range(3)))
    terms = {knob.name: {value: float(value) for value in knob.values} for knob in knobs}
    toy = Toy(knobs, {"latency": Additive(terms, base=1.0), "quality": Additive(terms, unit="points")})
    _, ledger = run(toy, 1.0, Scheduled())
    depths = [[knob.depth(moved.setting[knob.name]) for knob in knobs] for moved in accepted(ledger)]
    assert max(abs(long - short) for long, short in depths) <= 1 / 2  # one step of the shorter knob


def test_scheduled_finishes_a_stage_before_the_next():
    toy = even_toy("quantise.a", "prune.a", "quantise.b", "prune.b")
    _, ledger = run(toy, 1.0, Scheduled(stages=("prune.*", "quantise.*")))
    methods = [moved.knob.split(".")[0] for moved in accepted(ledger)]
    assert methods == ["prune"] * 4 + ["quantise"] * 4


def test_scheduled_reads_once_per_move():
    toy = even_toy("a", "b")
    counting = Counting(toy.meters["latency"])
    _, ledger = run(toy, 1.0, Scheduled(), meters={**toy.meters, "latency": counting})
    assert len(counting.models) == 1 + len(accepted(ledger)) == len(ledger)


def test_scheduled_never_touches_a_knob_outside_its_stages():
    toy = even_toy("prune.a", "other.a")
    result, ledger = run(toy, 1.0, Scheduled(stages=("prune.*",)))
    assert {moved.knob for moved in accepted(ledger)} == {"prune.a"}
    assert result.outcome is Outcome.EARLY_BREAK


# The suite on what breaks it


class Forgetful:
    """Proposes by its own count of calls, which no ledger holds."""

    def __init__(self):
        self.num_calls = 0

    def propose(self, state):
        self.num_calls += 1
        moves = state.next_moves()
        if not moves:
            return None
        knob, value = moves[self.num_calls % len(moves)]
        return Proposal(knob.name, value)


class StandsStill:
    def propose(self, state):
        knob = state.knobs[0]
        return Proposal(knob.name, state.setting[knob.name]) if len(state.rows) < 5 else None


class OutOfDomain:
    def propose(self, state):
        return Proposal(state.knobs[0].name, -1)


class UnknownKnob:
    def propose(self, state):
        return Proposal("elsewhere", 0)


def test_the_policy_suite_catches_a_policy_with_a_memory_of_its_own():
    toy = rough_toy(random.Random(0))
    with pytest.raises(AssertionError):
        PolicySuite().test_the_same_seed_and_ledger_give_the_same_proposals(Forgetful, toy, latency(5.0))
    with pytest.raises(AssertionError):
        PolicySuite().test_a_resumed_run_goes_on_as_the_undisturbed_one(Forgetful, toy, latency(5.0))


@pytest.mark.parametrize("broken", [StandsStill, OutOfDomain, UnknownKnob])
def test_the_policy_suite_catches_proposals_outside_the_domain(broken):
    with pytest.raises((AssertionError, KnobError)):
        PolicySuite().test_proposals_stay_in_the_domain(broken, rough_toy(random.Random(0)), latency(0.1))


class TestRestoring(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: Restoring(Greedy())


def trainable(turns, won=0.6):
    """Ten units that cost a millisecond each and a point of quality; every training wins back a share of the loss."""
    knobs = (Choice("prune", range(1, 11)), Choice("train", range(turns + 1), granularity="global", restores=True))

    class Quality:
        unit = "points"

        def read(self, model):
            lost = 10 - model["prune"]
            return Reading(value=10 - lost * (1 - won) ** (turns - model["train"]), unit="points")

    class Latency:
        unit = "ms"

        def read(self, model):
            return Reading(value=float(model["prune"]), unit="ms")

    return Toy(knobs, {"latency": Latency(), "quality": Quality()})


def restored(ledger):
    return [row.step for row in accepted(ledger) if row.knob == "train"]


def test_quality_is_restored_on_the_way_and_before_the_last_word():
    result, ledger = run(trainable(turns=3), 2.0, Restoring(Greedy(), share=0.5))
    assert result.met
    assert len(restored(ledger)) == 2  # half-way, and when the budget reads as met
    assert accepted(ledger)[-1].knob == "train"


def test_one_turn_is_kept_for_the_end():
    result, ledger = run(trainable(turns=1), 2.0, Restoring(Greedy(), share=0.2))
    assert result.met
    assert restored(ledger) == [accepted(ledger)[-1].step]


def test_a_floor_that_blocks_is_passed_after_restoring():
    blocked, _ = run(trainable(turns=0), 2.0, Greedy(), quality_floor=5.0)
    assert blocked.outcome is Outcome.QUALITY_COLLAPSE
    result, ledger = run(trainable(turns=3), 2.0, Restoring(Greedy(), share=9.0), quality_floor=5.0)
    assert result.met
    assert result.readings["quality"].value >= 5.0
    assert restored(ledger)


def test_slack_lets_quality_dip_but_never_end_under_the_floor():
    toy = trainable(turns=1, won=0.5)
    low, _ = run(toy, 2.0, Restoring(Greedy(), share=9.0), quality_floor=8.0, quality_slack=10.0)
    assert low.outcome is Outcome.QUALITY_COLLAPSE
    enough, _ = run(toy, 2.0, Restoring(Greedy(), share=9.0), quality_floor=6.0, quality_slack=10.0)
    assert enough.met
    assert enough.readings["quality"].value == 6.0


def test_a_restoring_move_that_wins_nothing_is_rejected_and_not_tried_again_from_there():
    result, ledger = run(trainable(turns=3, won=0.0), 2.0, Restoring(Greedy(), share=9.0))
    assert result.met
    tried = [row for row in ledger if row.knob == "train"]
    assert [row.accepted for row in tried] == [False]
    assert tried[0].note == "nothing restored"


def test_the_clock_is_checked_before_and_after_quality_is_restored():
    toy = trainable(turns=3)
    checked = []

    def check(model):
        checked.append((model["prune"], model["train"]))
        return {"latency": toy.meters["latency"].read(model)}

    result, _ = run(toy, 2.0, Restoring(Greedy(), share=9.0), check=check, quality_floor=5.0, quality_slack=10.0)
    assert result.met
    assert checked == [(2, 3), (2, 2)]


def test_a_check_before_restoring_leaves_the_share_that_is_asked_for_free():
    toy, told = trainable(turns=3), []

    def check(model):
        told.append(model["prune"])
        return {"latency": toy.meters["latency"].read(model)}

    policy = Restoring(Greedy(), share=9.0)
    for spare, sizes in (({}, [4, 4]), ({"latency": 0.1}, [4, 3, 3])):
        told.clear()
        result, ledger = run(toy, 4.1, policy, check=check, spare=spare)
        assert result.met
        assert told == sizes
    assert next(row for row in ledger if row.kind == "check").note == TOO_NEAR
    again, _ = run(toy, 4.1, policy, ledger=ledger, check=check, spare={"latency": 0.1})
    assert again == result  # the limits of the ledger, read again


def test_what_is_within_the_budget_is_enough_where_nothing_more_can_be_saved():
    toy = trainable(turns=3)

    def check(model):
        return {"latency": toy.meters["latency"].read(model)}

    options = {"check": check, "spare": {"latency": 0.1}}
    result, ledger = run(toy, 1.05, Restoring(Greedy(), share=9.0), **options)  # the smallest takes a millisecond
    assert result.met
    assert [(row.accepted, row.note) for row in ledger if row.kind == "check"][:2] == [(False, TOO_NEAR), (True, "")]
    assert turns(ledger)
    again, _ = run(toy, 1.05, Restoring(Greedy(), share=9.0), ledger=ledger, **options)
    assert again == result


def test_a_value_that_saved_nothing_is_tried_again_where_nothing_else_is_left():
    class Longest:
        unit = "ms"

        def read(self, model):  # two branches side by side
            return Reading(
                value=max({1: 4.0, 2: 6.0, 3: 10.0}[model["a"]], {1: 3.0, 2: 5.0, 3: 8.0}[model["b"]]), unit="ms"
            )

    even = Additive({name: dict.fromkeys((1, 2, 3), 1.0) for name in "ab"})
    toy = Toy((Choice("a", (1, 2, 3)), Choice("b", (1, 2, 3))), {"latency": Longest(), "quality": even})
    for policy in (Greedy(), Scheduled()):
        result, _ = run(toy, 4.0, policy)
        assert result.met


def test_a_knob_whose_next_step_saves_nothing_still_competes_with_the_others():
    cost = Additive({"a": {1: 1.0, 2: 9.0, 3: 9.0}, "b": {1: 1.0, 2: 5.0, 3: 9.0}}, unit="ms")
    worth = Additive({"a": {1: 9.0, 2: 9.5, 3: 10.0}, "b": {1: 0.0, 2: 4.0, 3: 10.0}})
    toy = Toy((Choice("a", (1, 2, 3)), Choice("b", (1, 2, 3))), {"latency": cost, "quality": worth})
    _, ledger = run(toy, 10.0, Greedy())
    assert [(row.knob, row.value) for row in accepted(ledger)] == [("a", 1)]  # two steps at once, before b is ruined


def test_an_early_turn_that_restores_nothing_is_not_taken_again_after_every_move():
    toy = trainable(turns=4, won=0.0)
    _, ledger = run(toy, 2.0, Restoring(Greedy(), share=9.0, early=True, fallen=0.3))
    assert sum(row.knob == "train" and row.value == 3 for row in ledger) == 1


def test_what_lost_nothing_by_the_finer_reading_is_not_restored():
    toy = trainable(turns=3)
    even = Additive({"prune": dict.fromkeys(range(1, 11), 0.0), "train": dict.fromkeys(range(4), 0.0)}, unit="nat")
    toy = Toy(toy.knobs, {**toy.meters, "quality": even, "finer": even, "points": toy.meters["quality"]})
    result, ledger = run(toy, 2.0, Restoring(Greedy(), share=9.0, by="finer"))
    assert result.met
    assert not restored(ledger)
    _, plain = run(toy, 2.0, Restoring(Greedy(), share=9.0, by="points"), restored_by="points")
    assert restored(plain)


def turns(ledger):
    return [row.value for row in accepted(ledger) if row.knob == "train"]


def test_an_early_turn_is_taken_when_quality_fell_far():
    result, ledger = run(trainable(turns=4), 2.0, Restoring(Greedy(), share=9.0, early=True, fallen=0.3))
    assert result.met
    assert turns(ledger) == [3, 1]  # 2 is for runs that come to the end without an early turn
    early = next(row for row in ledger if row.knob == "train")
    before = ledger[early.step - 1]
    assert before.readings["quality"].value <= 7.0 < before.readings["quality"].value + 1.0
    assert before.readings["latency"].value > 2.0  # on the way, not at the end


def test_without_a_fall_the_end_takes_the_turn_that_does_both():
    result, ledger = run(trainable(turns=4), 2.0, Restoring(Greedy(), share=9.0, early=True, fallen=0.9))
    assert result.met
    assert turns(ledger) == [2]
    assert accepted(ledger)[-1].knob == "train"


@pytest.mark.parametrize("early", [False, True])
def test_a_run_paused_before_its_last_restoring_goes_on_as_if_it_had_not_been(early):
    toy, policy = trainable(turns=4), Restoring(Greedy(), share=9.0, early=early, fallen=0.3)

    def check(model):
        return {"latency": toy.meters["latency"].read(model)}

    result, whole = run(toy, 2.0, policy, check=check)
    paused, ledger = run(toy, 2.0, policy, check=check, pause_to_restore=True)
    assert paused.met
    assert turns(ledger) == turns(whole)[:-1]
    going_on, _ = run(toy, 2.0, policy, ledger=ledger, check=check)
    assert tuple(ledger) == tuple(whole)
    assert going_on == result


@pytest.mark.parametrize(("fallen", "taken"), [(0.9, [2]), (0.3, [3, 1])])
def test_where_asked_for_an_early_turn_is_tried_at_the_end(fallen, taken):
    policy = Restoring(Greedy(), share=9.0, early=True, fallen=fallen, tries=True)
    paused, ledger = run(trainable(turns=4), 2.0, policy, pause_to_restore=True)
    assert paused.met
    assert turns(ledger) == taken[:-1]
    assert (ledger[-1].kind, ledger[-1].knob, ledger[-1].value) == ("trial", "train", 3)
    assert ledger[-1].setting["prune"] == 2
    _, ledger = run(trainable(turns=4), 2.0, policy)
    assert turns(ledger) == taken
    assert [row.value for row in ledger if row.knob == "train" and row.kind == "trial"] == [3]


def test_a_policy_that_is_stuck_restores_only_when_asked_to():
    going = Restoring(Greedy(), share=9.0)
    stuck = replace(going, when_stuck=False)
    for policy, restores in ((going, True), (stuck, False)):
        result, ledger = run(trainable(turns=3), 2.0, policy, quality_floor=5.0)
        assert bool(turns(ledger)) is restores
        assert result.met is restores


def test_moves_are_ranked_by_the_finer_reading_where_there_is_one():
    knobs = (Choice("a", (1, 2)), Choice("b", (1, 2)))
    cost = Additive({"a": {1: 1.0, 2: 2.0}, "b": {1: 1.0, 2: 2.0}})
    coarse = Additive({"a": {1: 0.0, 2: 0.0}, "b": {1: 0.0, 2: 0.0}}, unit="points")
    finer = Additive({"a": {1: 0.0, 2: 5.0}, "b": {1: 4.0, 2: 5.0}}, unit="nat")
    toy = Toy(knobs, {"latency": cost, "quality": coarse, "finer": finer})
    _, ledger = run(toy, 3.0, RankedBy(Greedy(), "finer"))
    assert [row.knob for row in accepted(ledger)] == ["b"]
    _, ledger = run(toy, 3.0, RankedBy(Greedy(), "unread"))
    assert [row.knob for row in accepted(ledger)] == ["a"]


class TestRankedBy(PolicySuite):
    @pytest.fixture
    def make_policy(self):
        return lambda: RankedBy(Greedy(), "quality")
