"""Rules: found by name or prefix, pure; and the suites of ``apportion.testing`` on the toys and on broken ones."""

from __future__ import annotations

import itertools
import random

import pytest

from apportion.core.knob import Choice, Setting
from apportion.core.meter import Reading
from apportion.core.rule import check_rules, rule_for
from apportion.errors import KnobError
from apportion.testing.suites import MeterSuite, RuleSuite
from apportion.testing.toys import (
    Additive,
    Counting,
    Jittered,
    NetworkBytes,
    Noisy,
    PruneLayer,
    QuantiseLayer,
    Scaled,
    Scrambled,
    SetValue,
    composed_toy,
)

# Finding a rule


def test_a_rule_is_found_by_the_longest_prefix_that_ends_at_a_dot():
    rules = {"prune": "by method", "prune.block1": "by block", "prune.block1.heads": "by name"}
    found = {
        name: rule_for(Choice(name, (1,)), rules)
        for name in ("prune.block1.heads", "prune.block1.neurons", "prune.block2", "prune", "prune.block1.heads.q")
    }
    assert found == {
        "prune.block1.heads": "by name",
        "prune.block1.neurons": "by block",
        "prune.block2": "by method",
        "prune": "by method",
        "prune.block1.heads.q": "by name",
    }


@pytest.mark.parametrize("name", ["pruner", "pru", "quantise.conv1", "conv1.prune", "prune_conv1"])
def test_a_prefix_that_does_not_end_at_a_dot_is_no_rule(name):
    with pytest.raises(KnobError, match=f"knob '{name}' has no rule; rules are registered for prune"):
        rule_for(Choice(name, (1,)), {"prune": SetValue()})


def test_a_knob_without_any_rules_is_refused():
    with pytest.raises(KnobError, match="registered for nothing"):
        check_rules([Choice("a", (1,))], {})


def test_knobs_that_share_a_name_are_refused():
    with pytest.raises(KnobError, match="two knobs are called 'a'"):
        check_rules([Choice("a", (1,)), Choice("b", (1,)), Choice("a", (2,))], {"a": SetValue(), "b": SetValue()})


def test_knobs_of_several_methods_each_have_their_rule():
    toy = composed_toy()
    check_rules(toy.knobs, toy.rules)
    assert {type(rule_for(knob, toy.rules)) for knob in toy.knobs if knob.name.startswith("prune")} == {PruneLayer}
    assert {type(rule_for(knob, toy.rules)) for knob in toy.knobs if knob.name.startswith("quan")} == {QuantiseLayer}


# The suites on what keeps their promises


class TestSetValue(RuleSuite):
    @pytest.fixture
    def rule(self):
        return SetValue()

    @pytest.fixture
    def knob(self):
        return Choice("a", (1, 2, 3))

    @pytest.fixture
    def model(self):
        return Setting({"a": 3, "b": 1})


class TestPruneLayer(RuleSuite):
    @pytest.fixture
    def rule(self):
        return PruneLayer()

    @pytest.fixture
    def knob(self):
        return composed_toy().knobs[0]

    @pytest.fixture
    def model(self):
        return composed_toy().model


class TestQuantiseLayer(TestPruneLayer):
    @pytest.fixture
    def rule(self):
        return QuantiseLayer()

    @pytest.fixture
    def knob(self):
        return composed_toy().knobs[-1]


ADDITIVE = Additive({"a": {1: 1.0, 2: 4.0}}, base=0.5)


class TestToyMeters(MeterSuite):
    @pytest.fixture(
        params=[
            ADDITIVE,
            Scrambled(seed=0, unit="B"),
            Jittered(ADDITIVE, stderr=0.1, seed=0),
            Scaled(ADDITIVE, factor=1.5),
            Counting(ADDITIVE),
        ],
        ids=lambda meter: type(meter).__name__,
    )
    def meter(self, request):
        return request.param

    @pytest.fixture
    def model(self):
        return Setting({"a": 2})


class TestNoisy(TestToyMeters):
    deterministic = False

    @pytest.fixture
    def meter(self):
        return Noisy(ADDITIVE, stderr=0.1, generator=random.Random(0))


class TestNetworkMeters(MeterSuite):
    @pytest.fixture(params=["size", "quality"])
    def meter(self, request):
        return composed_toy().meters[request.param]

    @pytest.fixture
    def model(self):
        return composed_toy().model


def test_jitter_is_a_function_of_seed_and_setting_and_has_the_spread_it_states():
    exact = Additive({}, base=5.0)
    jittered = Jittered(exact, stderr=0.5, seed=1)
    settings = [Setting({"a": value}) for value in range(400)]
    values = [jittered.read(setting).value for setting in settings]
    assert values == [Jittered(exact, stderr=0.5, seed=1).read(setting).value for setting in settings]
    assert values != [Jittered(exact, stderr=0.5, seed=2).read(setting).value for setting in settings]
    mean_error = sum(values) / len(values) - 5.0
    assert abs(mean_error) < 5 * 0.5 / len(values) ** 0.5


def test_noise_from_a_generator_differs_from_read_to_read_and_repeats_with_its_seed():
    model = Setting({"a": 2})
    first, second = (Noisy(ADDITIVE, 0.1, random.Random(3)) for _ in range(2))
    values = [first.read(model).value for _ in range(5)]
    assert len(set(values)) == 5
    assert values == [second.read(model).value for _ in range(5)]


# The suites on what breaks them


class PrunesInPlace:
    def apply(self, model, knob, value):
        model[knob.name.removeprefix("prune.")] = value
        return model


class CountsItsCalls:
    def __init__(self):
        self.num_calls = 0

    def apply(self, model, knob, value):
        self.num_calls += 1
        return {**model, "calls": self.num_calls}


class ReusesItsResult:
    """Leaves the model it is given alone, but changes what it handed out before."""

    def __init__(self):
        self.handed_out = {}

    def apply(self, model, knob, value):
        self.handed_out[knob.name] = value
        return self.handed_out


def test_the_rule_suite_catches_a_rule_that_changes_the_model_in_place():
    toy = composed_toy()
    with pytest.raises(AssertionError):
        RuleSuite().test_the_model_given_is_left_as_it_was(PrunesInPlace(), toy.knobs[0], toy.model)


def test_the_rule_suite_catches_a_rule_that_remembers():
    toy = composed_toy()
    with pytest.raises(AssertionError):
        RuleSuite().test_the_same_value_gives_the_same_model(CountsItsCalls(), toy.knobs[0], toy.model)


def test_the_rule_suite_catches_a_rule_that_changes_what_it_handed_out():
    toy = composed_toy()
    with pytest.raises(AssertionError):
        RuleSuite().test_a_model_handed_out_is_not_changed_by_later_calls(ReusesItsResult(), toy.knobs[0], toy.model)


class Lying:
    """Says bytes, reads milliseconds, never the same, and prunes while reading."""

    unit = "B"
    counter = itertools.count(1)

    def read(self, model):
        model["conv1"] = None
        return Reading(value=float(next(self.counter)), unit="ms")


@pytest.mark.parametrize(
    "promise",
    [
        "test_a_reading_is_finite_and_in_the_unit_of_the_meter",
        "test_two_reads_of_a_deterministic_meter_agree",
        "test_reading_leaves_the_model_as_it_was",
    ],
)
def test_the_meter_suite_catches_a_meter_that_breaks_its_promises(promise):
    with pytest.raises(AssertionError):
        getattr(MeterSuite(), promise)(Lying(), dict(composed_toy().model))


def test_the_meter_suite_passes_an_honest_meter():
    MeterSuite().test_reading_leaves_the_model_as_it_was(NetworkBytes(), composed_toy().model)
