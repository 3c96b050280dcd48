"""Turns: two processes never time at once, and a stuck one does not hold up the others for ever."""

from __future__ import annotations

import subprocess
import sys
import time

from apportion.device.turn import turn, wait_for_all

_HOLD = """
import sys, time
from pathlib import Path
from apportion.device.turn import turn
with turn(Path(sys.argv[1])):
    print("holding", flush=True)
    sys.stdin.readline()
"""


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holding\n"
    return process


def test_a_free_turn_is_taken_at_once(tmp_path):
    with turn(tmp_path, max_wait_s=0.0) as waited:
        assert waited < 1.0
    with turn(tmp_path, max_wait_s=0.0):
        pass  # it was given back


def test_a_turn_waits_for_its_holder(tmp_path):
    other = holder(tmp_path)
    with turn(tmp_path, max_wait_s=0.3) as waited:
        assert waited > 0.3  # gave up waiting: the other still holds it
    other.communicate("done\n")
    with turn(tmp_path, max_wait_s=60.0) as waited:
        assert waited < 60.0


def test_a_killed_holder_gives_its_turn_back(tmp_path):
    other = holder(tmp_path)
    other.kill()
    other.communicate()
    with turn(tmp_path, max_wait_s=60.0) as waited:
        assert waited < 60.0


def test_the_gate_opens_when_all_are_ready_or_dead(tmp_path):
    (tmp_path / "1").touch()
    began = time.monotonic()
    wait_for_all(tmp_path, 0, 3, max_wait_s=0.3)
    assert time.monotonic() - began >= 0.3  # the third never came
    (tmp_path / "2").touch()
    began = time.monotonic()
    wait_for_all(tmp_path, 0, 3, max_wait_s=60.0)
    assert time.monotonic() - began < 30.0
