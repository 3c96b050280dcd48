"""The time limit of a child: each step has it to itself, however many there are, and waiting is not counted."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest

from apportion.device import process
from apportion.device.marker import Marker
from apportion.device.process import Limits

LIMITS = Limits(seconds=10)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Watches a process that is made up: a second passes between two looks, and it marks where it is at each."""

    def run(*places):
        names = sorted({place for place in places if place} | {"a"})
        marker, left = Marker(tmp_path / "marker", names), list(places)
        clock = SimpleNamespace(now=0.0)

        def wait(timeout):
            if not left:
                return 0
            clock.now += 1.0
            place = left.pop(0)
            if place == "wait":
                marker.waiting()
            elif place:
                marker.at(place)
            raise subprocess.TimeoutExpired("child", timeout)

        monkeypatch.setattr(process.time, "monotonic", lambda: clock.now)
        made_up = SimpleNamespace(wait=wait, pid=-1)
        return process._watch(made_up, LIMITS, marker, len(names)), clock.now, marker.step

    return run


def test_every_candidate_has_the_time_limit_to_itself(watched):
    assert watched("a", *[None] * 8, "b", *[None] * 8, "c", *[None] * 8)[0] is None


def test_one_step_too_long_is_told_of_it_alone(watched):
    failure, seconds, culprit = watched("a", None, "b", *[None] * 50)
    assert (failure.kind, culprit) == ("hung", "b")
    assert failure.message == "killed after 10 s"
    assert seconds <= 15  # and not the 20 s that both may take together


def test_short_steps_without_end_are_stopped(watched):
    failure, seconds, _ = watched(*["a", "b"] * 50)
    assert failure.message == "killed after 20 s"
    assert seconds == 21


def test_waiting_for_a_turn_is_not_held_against_a_candidate(watched):
    assert watched("a", None, "wait", *[None] * 100, "a", None)[0] is None
