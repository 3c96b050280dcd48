"""Knobs and settings: ordered domains and frozen values."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.core.knob import Choice, Knob, Setting
from apportion.errors import KnobError

domains = st.lists(st.integers() | st.floats(allow_nan=False) | st.text(), min_size=1, max_size=8, unique=True)
settings_of_knobs = st.dictionaries(st.text(min_size=1), st.integers() | st.text(), max_size=5)


def test_choice_is_a_knob_with_its_values_in_the_order_given():
    knob = Choice("conv1.bits", [4, 8, 16], granularity="global")
    assert knob == Knob(name="conv1.bits", values=(4, 8, 16), granularity="global")
    assert (knob.cheapest, knob.dearest) == (4, 16)
    assert Choice("conv1.bits", (4,)).granularity == "module"


@given(domains)
def test_stepping_cheaper_from_the_dearest_value_visits_the_whole_domain_once(values):
    knob = Choice("part", values)
    visited = [knob.dearest]
    while (cheaper := knob.cheaper(visited[-1])) is not None:
        visited.append(cheaper)
    assert visited == values[::-1]


@given(domains)
def test_depth_rises_evenly_from_the_dearest_to_the_cheapest(values):
    knob = Choice("part", values)
    depths = [knob.depth(value) for value in reversed(values)]
    last = len(values) - 1
    assert depths == [index / last if last else 0.0 for index in range(len(values))]


def test_a_value_outside_the_domain_is_refused_with_the_domain():
    knob = Choice("conv1.bits", (4, 8, 16))
    for ask in (knob.check, knob.cheaper, knob.depth):
        with pytest.raises(KnobError, match=r"'conv1.bits' was set to 5, but takes one of \(4, 8, 16\)"):
            ask(5)


@pytest.mark.parametrize(
    ("name", "values", "saying"),
    [("", (1,), "empty name"), ("a", (), "no values"), ("a", (1, 2, 1), "repeats"), ("a", (1, 1.0), "repeats")],
)
def test_a_knob_without_a_name_or_a_proper_domain_is_refused(name, values, saying):
    with pytest.raises(KnobError, match=saying):
        Choice(name, values)


def test_a_knob_can_not_be_changed():
    with pytest.raises(AttributeError):
        Choice("a", (1, 2)).name = "b"


def test_the_dearest_and_cheapest_settings_take_the_ends_of_every_domain():
    knobs = [Choice("b", (1, 2, 3)), Choice("a", ("low", "high"))]
    assert Setting.dearest(knobs) == Setting({"a": "high", "b": 3})
    assert Setting.cheapest(knobs) == Setting({"a": "low", "b": 1})


@given(settings_of_knobs, st.randoms(use_true_random=False))
def test_settings_are_equal_and_hash_alike_in_any_order(values, generator):
    shuffled = list(values.items())
    generator.shuffle(shuffled)
    first, second = Setting(values), Setting(dict(shuffled))
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)
    assert dict(first) == values
    assert list(first) == sorted(values)
    assert pickle.loads(pickle.dumps(first)) == first


@given(settings_of_knobs.filter(bool), st.data())
def test_replacing_one_value_leaves_the_others_and_the_original(values, data):
    original = Setting(values)
    name = data.draw(st.sampled_from(sorted(values)))
    replaced = original.replace(name, "new")
    assert replaced == Setting({**values, name: "new"})
    assert original == Setting(values)


def test_replacing_an_unknown_knob_is_refused_with_the_known_ones():
    with pytest.raises(KnobError, match="no knob is called 'c'; the knobs are a, b"):
        Setting({"a": 1, "b": 2}).replace("c", 3)


def test_a_setting_keeps_its_values_when_the_mapping_it_came_from_changes():
    values = {"a": 1}
    setting = Setting(values)
    values["a"] = 2
    assert setting["a"] == 1
    with pytest.raises(TypeError):
        setting["a"] = 2


def test_a_setting_differs_from_one_with_another_value_or_another_knob():
    assert Setting({"a": 1}) != Setting({"a": 2})
    assert Setting({"a": 1}) != Setting({"a": 1, "b": 1})
    assert Setting({"a": 1}) != {"a": 1}
    assert len({Setting({"a": 1}), Setting({"a": 1}), Setting({"a": 2})}) == 2
