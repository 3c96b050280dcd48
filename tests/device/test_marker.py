"""The marker: a parent reads where its child is, even after the child was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from apportion.device.marker import Marker

_AT_B = """
import os, signal, sys
from pathlib import Path
from apportion.device.marker import Marker
marker = Marker(Path(sys.argv[1]), ["a", "b"])
marker.at("a")
marker.at("b")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_last_step_begun_outlives_a_kill(tmp_path):
    marker = Marker(tmp_path / "marker", ["a", "b"])
    assert marker.step is None
    assert subprocess.run([sys.executable, "-c", _AT_B, str(tmp_path / "marker")], check=False).returncode == -9
    assert marker.step == "b"
    assert marker.num_begun == 2


def test_waiting_is_no_step(tmp_path):
    marker = Marker(tmp_path / "marker", ["a"])
    marker.at("a")
    marker.waiting()
    assert marker.is_waiting
    assert marker.step is None
    marker.at("a")
    assert (marker.step, marker.is_waiting, marker.num_begun) == ("a", False, 2)


def test_a_step_that_was_not_announced_is_refused(tmp_path):
    with pytest.raises(KeyError):
        Marker(tmp_path / "marker", ["a"]).at("b")
