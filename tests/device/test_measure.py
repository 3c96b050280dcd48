"""Measuring in child processes: results, and deaths as outcomes."""

from __future__ import annotations

import math

import pytest

from apportion.device.child import time_in_turns
from apportion.device.measure import Candidate, Session, Shape, Timing, measure
from apportion.device.target import available_targets, find_target
from apportion.errors import MeasureError, TargetError

TARGET = find_target("torch-cpu-1t")


def timing(median_ms: float, stderr_ms: float = 0.01) -> Timing:
    return Timing(median_ms, stderr_ms, 0.1, median_ms * 1.1, 20)


def test_a_measured_model_has_a_positive_latency_with_its_conditions():
    candidates = [Candidate(name="a", ref="tests.factories:small_cnn")]
    session = measure(candidates, TARGET, Shape(), seconds=0.2)
    reading = session.latency("a")
    assert reading.value > 0
    assert reading.unit == "ms"
    assert reading.count >= 12
    assert session.conditions["processes"] == 1
    assert Session.from_json(session.to_json()) == session


@pytest.mark.parametrize(
    ("factory", "message"),
    [("crashing", "killed by SIGSEGV"), ("exiting", "failed"), ("not_a_model", "must return")],
)
def test_a_dying_candidate_is_one_clear_error(factory, message):
    with pytest.raises(MeasureError, match=message):
        measure([Candidate(name="a", ref=f"tests.factories:{factory}")], TARGET, Shape(), seconds=0.1)


def test_a_hanging_candidate_is_killed():
    with pytest.raises(MeasureError, match="hung and was killed after 8 s"):
        measure([Candidate(name="a", ref="tests.factories:hanging")], TARGET, Shape(), seconds=0.1, timeout_s=8)


def test_candidates_take_turns():
    calls = []
    steps = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    result = time_in_turns(steps, seconds=0.01, tolerance=0.5)
    assert result["candidates"]["a"]["count"] == result["candidates"]["b"]["count"]
    pairs = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert all(sorted(pair) == ["a", "b"] for pair in pairs)


def test_the_ratio_cancels_what_slowed_both():
    slow_hour = Session({"base": (timing(10), timing(20)), "ours": (timing(5), timing(10))}, {})
    ratio = slow_hour.ratio("ours", to="base")
    assert ratio.value == pytest.approx(0.5)
    assert ratio.stderr < 0.01
    assert slow_hour.latency("ours").stderr > 1


def test_processes_can_be_added():
    conditions = {"processes": 1, "tight": True, "wall_per_cpu": 1.0, "load": 0.5, "steal_ratio": 0.0, "versions": {}}
    one = Session({"a": (timing(10),)}, conditions)
    both = one.plus(Session({"a": (timing(12),)}, {**conditions, "tight": False, "load": 2.0}))
    assert both.latency("a").value == 11
    assert both.conditions == {**conditions, "processes": 2, "tight": False, "load": 2.0}


def test_the_error_of_two_processes_holds_their_spread():
    apart = Session({"a": (timing(10), timing(11))}, {})
    assert apart.latency("a").stderr > 0.5 / math.sqrt(2)


def test_every_target_listed_is_found_and_others_are_refused():
    for name in available_targets():
        assert find_target(name).name == name
    for name in ("toaster", "torch-cpu-999t", "torch-cpu-0t"):
        with pytest.raises(TargetError, match="torch-cpu-1t"):
            find_target(name)
