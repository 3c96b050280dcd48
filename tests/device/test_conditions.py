"""Conditions: a busy machine is told from noisy timings, and sessions add up."""

from __future__ import annotations

from datetime import datetime

import pytest

from apportion.device.conditions import conditions_of, disturbance, explain, merged


def run(**changed):
    """What a process tells of its conditions."""
    calm = {"tight": True, "wall_s": 2.0, "cpu_s": 2.0, "load": 0.5, "steal_ratio": 0.0, "versions": {"torch": "2"}}
    return calm | changed


@pytest.mark.parametrize(
    ("threads", "changed", "kind"),
    [
        (1, {}, None),
        (1, {"wall_s": 9.0}, None),  # medians that are tight all the same
        (1, {"tight": False}, "noisy"),
        (1, {"tight": False, "wall_s": 3.6}, "busy"),
        (1, {"tight": False, "steal_ratio": 0.2}, "busy"),
        (2, {"tight": False, "cpu_s": 4.0}, "noisy"),
        (2, {"tight": False, "cpu_s": 2.2, "load": 99.0}, "busy"),
        (2, {"tight": False, "cpu_s": 2.2, "load": 0.0}, "noisy"),  # its threads wait for each other
    ],
)
def test_a_busy_machine_is_told_from_noise(threads, changed, kind):
    conditions = conditions_of([run(), run(**changed)], threads)
    assert conditions["disturbed"] == kind
    line = explain(conditions)
    assert (line is None) == (kind is None)
    if line:
        assert line.startswith({"busy": "machine too busy: wall/CPU", "noisy": "noisy: "}[kind])
        assert f"wall/CPU {conditions['wall_per_cpu']:.1f} per thread" in line


def test_times_add_up_and_the_ratio_is_the_worst_processes_per_thread():
    conditions = conditions_of([run(cpu_s=4.0), run(cpu_s=2.0)], threads=2)
    assert (conditions["wall_s"], conditions["cpu_s"]) == (4.0, 6.0)
    assert conditions["wall_per_cpu"] == 2.0


def test_merging_sessions_keeps_what_disturbed_either():
    calm, busy = conditions_of([run()], 1), conditions_of([run(tight=False, wall_s=4.0)], 1)
    both = merged(calm, busy)
    assert both["disturbed"] == "busy"
    assert (both["processes"], both["wall_s"], both["wall_per_cpu"]) == (2, 6.0, 2.0)
    assert merged(calm, calm)["disturbed"] is None


def test_without_a_process_there_is_nothing_to_tell():
    assert disturbance(conditions_of([], 1)) is None


def test_where_energy_is_missing_in_one_process_it_is_missing():
    measured = {"provenance": "measured", "why": "RAPL"}
    missing = {"provenance": "unavailable", "why": "it needs root"}
    assert conditions_of([run(energy=measured), run(energy=missing)], 1)["energy"] == missing
    assert "energy" not in conditions_of([run()], 1)
    assert merged({"energy": measured}, {"energy": missing})["energy"] == missing
    assert "energy" not in merged({}, {})


def test_a_session_that_goes_on_later_was_measured_then():
    first, then = conditions_of([run()], 1), conditions_of([run()], 1) | {"measured_at": "9999-01-01T00:00:00+00:00"}
    assert datetime.fromisoformat(first["measured_at"]).tzinfo is not None
    assert merged(first, then)["measured_at"] == then["measured_at"]
