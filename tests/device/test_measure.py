"""Measuring in child processes: results, and deaths as outcomes."""

from __future__ import annotations

import math
import os
import shutil
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from apportion.device import process
from apportion.device.child import time_in_turns
from apportion.device.measure import Candidate, Session, Shape, Timing, measure
from apportion.device.process import Ended, Limits, run_together
from apportion.device.read import read_all
from apportion.device.runtimes import missing_packages, runtime_of
from apportion.device.target import find_target, target_names
from apportion.errors import MeasureError, ModelError, TargetError
from apportion.models.load import load

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
    assert session.conditions["wall_s"] > 0 < session.conditions["cpu_s"]
    low_ms, high_ms = session.interval("a")
    assert low_ms <= reading.value <= high_ms
    assert Session.from_json(session.to_json()) == session


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("crashing", "died", "SIGSEGV"),
        ("illegal", "died", "SIGILL (an instruction this machine does not have)"),
        ("exiting", "failed", "exit code 3"),
        ("hanging", "hung", "killed after 12 s"),
        ("greedy_for_memory", "out of memory", "of 1.0 allowed"),
        ("too_large", "out of memory", "allocate"),
        ("infinite", "non-finite", "not all finite"),
        ("not_a_model", "failed", "must return"),
    ],
)
def test_whatever_becomes_of_a_candidate_is_recorded_and_the_others_are_measured(factory, kind, message):
    candidates = [
        Candidate(name="good", ref="tests.factories:small_cnn"),
        Candidate(name="bad", ref=f"tests.factories:{factory}"),
    ]
    limits = Limits(seconds=12, memory_bytes=2**30)
    session = measure(candidates, TARGET, Shape(), seconds=0.1, limits=limits)
    assert set(session.timings) == {"good"}
    assert session.latency("good").value > 0
    assert session.failures["bad"].kind == kind
    assert message in session.failures["bad"].message
    assert Session.from_json(session.to_json()) == session
    with pytest.raises(MeasureError, match=f"bad could not be measured: {kind}"):
        session.require()


def test_a_death_inside_the_timed_rounds_is_told_of_nobody_else():
    factories = {"a": "small_linear", "bad": "illegal_when_timed", "b": "small_linear", "c": "small_linear"}
    candidates = [Candidate(name=name, ref=f"tests.factories:{factory}") for name, factory in factories.items()]
    session = measure(candidates, TARGET, Shape(), seconds=0.01, tolerance=1.0)
    assert set(session.timings) == {*"abc"}
    assert set(session.failures) == {"bad"}
    assert "SIGILL" in session.failures["bad"].message


def test_a_build_that_fails_is_recorded_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = find_target("ort-cpu-1t")
    if missing_packages(target):
        pytest.skip("ONNX Runtime is not installed")
    candidates = [
        Candidate(name="good", ref="tests.factories:small_cnn"),
        Candidate(name="bad", ref="tests.factories:crashing"),
    ]
    session = measure(candidates, target, Shape(), seconds=0.1, limits=Limits(seconds=60))
    assert set(session.timings) == {"good"}
    assert session.failures["bad"].kind == "died"


@pytest.mark.parametrize(
    "name", ["ort-cpu-1t", "ort-int8-cpu-1t", "ort-int8dyn-cpu-1t", "openvino-cpu-1t", "executorch-cpu-1t"]
)
def test_graph_runtimes_compute_what_torch_computes(name, tmp_path):
    target = find_target(name)
    if missing_packages(target):
        pytest.skip(f"not installed: {missing_packages(target)}")
    network = load("tests.factories:small_cnn")
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = network.replace(inputs={"0": images})
    runtime = runtime_of(target)
    runtime.build(network, tmp_path, target)
    (output,) = runtime.open(tmp_path, target)()
    with torch.no_grad():
        wanted = network.module(images).numpy()
    output = np.asarray(output)
    # int8 activations and weights carry about 1 % of the range as noise; f32 graphs differ by rounding alone
    tolerance = 1e-4 if target.precision == "fp32" else 0.15
    assert abs(output - wanted).max() <= tolerance * abs(wanted).max() + 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_network_computes_what_torch_computes(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    target, network = find_target("compile-cpu-1t"), load("tests.factories:small_cnn")
    images = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    network = network.replace(inputs={"0": images})
    threads = torch.get_num_threads()
    try:
        (output,) = runtime_of(target).open_network(network, target)()
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        wanted = network.module(images)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_candidates_take_turns(names):
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in names}
    result = time_in_turns(steps, seconds=0.01, tolerance=0.0)
    assert len({found["count"] for found in result["candidates"].values()}) == 1
    timed = calls[3 * len(names) :]  # warm-up calls come first
    rounds = [timed[i : i + len(names)] for i in range(0, len(timed), len(names))]
    assert all(sorted(one) == list(names) for one in rounds)
    followed = set(pairwise(timed))
    assert len(followed) == max(1, len(names) * (len(names) - 1))  # each follows every other one, and never itself


def test_the_ratio_cancels_what_slowed_both():
    slow_hour = Session({"base": (timing(10), timing(20)), "ours": (timing(5), timing(10))}, {})
    ratio = slow_hour.ratio("ours", to="base")
    assert ratio.value == pytest.approx(0.5)
    assert ratio.stderr < 0.01
    assert slow_hour.latency("ours").stderr > 1


def test_a_few_disturbed_processes_do_not_move_the_ratio():
    # as measured beside another load: an int8 network lost more than the fp32 one that it is compared with
    base = tuple(map(timing, (0.873, 0.742, 0.858, 0.75, 0.745)))
    ours = tuple(map(timing, (0.28, 0.172, 0.275, 0.177, 0.174)))
    assert Session({"base": base, "ours": ours}, {}).ratio("ours", to="base").value == pytest.approx(0.236, abs=1e-3)


@pytest.mark.parametrize("before", [0, 3])
def test_every_other_process_opens_the_candidates_in_reverse(monkeypatch, before):
    orders = []

    def run_together(jobs, environment, limits):
        names = [[candidate["name"] for candidate in job["candidates"]] for job in jobs]
        orders.extend(names)
        told = [{name: vars(timing(1.0)) for name in some} for some in names]
        conditions = {"tight": True, "wall_s": 1.0, "cpu_s": 1.0, "load": 0.0, "steal_ratio": 0.0, "versions": {}}
        return [Ended(result={"candidates": one, "failures": {}, **conditions}) for one in told]

    monkeypatch.setattr("apportion.device.measure.run_together", run_together)
    candidates = [Candidate(name=name, ref="tests.factories:small_cnn") for name in "ab"]
    session = measure(candidates, TARGET, Shape(), processes=4, before=before)
    assert orders == [[*"ab"], [*"ba"], [*"ab"], [*"ba"]][before % 2 :] + [[*"ab"]] * (before % 2)
    assert session.ratio("a", to="b").value == 1.0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core starts one process at a time")
def test_processes_open_together_and_time_one_after_the_other(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("APPORTION_TEST_LOG", str(log))
    candidates = [Candidate(name=name, ref="tests.factories:logging_its_calls") for name in "abc"]
    session = measure(candidates, TARGET, Shape(), processes=2, seconds=0.05, tolerance=0.0)
    assert all(len(rows) == 2 for rows in session.timings.values())
    made, called = {}, {}
    for line in log.read_text().splitlines():
        pid, what, at = line.split()
        (made if what == "made" else called).setdefault(pid, []).append(int(at))
    assert len(made) == len(called) == 2
    timed = {pid: sorted(calls)[-12 * len(candidates) :] for pid, calls in called.items()}
    assert min(min(calls) for calls in timed.values()) > max(max(some) for some in made.values())
    first, second = sorted(timed.values())
    assert first[-1] < second[0]


def test_what_is_too_much_memory_for_several_at_once_is_asked_again_alone(monkeypatch):
    asked = []

    def together(jobs, environment, limits):
        asked.append(len(jobs))
        return run_together(jobs, environment, limits)

    monkeypatch.setattr(process, "free_bytes", lambda: 100 * 2**20)  # less than torch takes to load
    monkeypatch.setattr("apportion.device.measure.run_together", together)
    monkeypatch.setattr("apportion.device.measure.CROWDED", threading.Event())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    candidates = [Candidate(name="a", ref="tests.factories:small_linear")]
    session = measure(candidates, TARGET, Shape(), processes=2, seconds=0.01, tolerance=1.0)
    assert asked == [2, 1, 1]
    assert len(session.require().timings["a"]) == 2
    measure(candidates, TARGET, Shape(), processes=2, seconds=0.01, tolerance=1.0)
    assert asked == [2, 1, 1, 1, 1]  # once was enough to know


def test_a_candidate_that_dies_in_processes_started_together_is_recorded_once(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    factories = {"good": "small_linear", "bad": "illegal"}
    candidates = [Candidate(name=name, ref=f"tests.factories:{factory}") for name, factory in factories.items()]
    session = measure(candidates, TARGET, Shape(), processes=3, seconds=0.01, tolerance=1.0)
    assert {name: len(rows) for name, rows in session.timings.items()} == {"good": 3}
    assert "SIGILL" in session.failures["bad"].message


def test_processes_can_be_added():
    conditions = {"processes": 1, "tight": True, "wall_per_cpu": 1.0, "load": 0.5, "steal_ratio": 0.0, "versions": {}}
    one = Session({"a": (timing(10),)}, conditions)
    both = one.plus(Session({"a": (timing(12),)}, {**conditions, "tight": False, "load": 2.0}))
    assert both.latency("a").value == 11
    assert both.conditions == {**conditions, "processes": 2, "tight": False, "load": 2.0, "disturbed": "noisy"}


def test_what_was_stored_before_intervals_were_taken_is_read():
    stored = {"median_ms": 1.0, "stderr_ms": 0.1, "mad_ms": 0.1, "p95_ms": 1.2, "count": 20}
    session = Session.from_json({"timings": {"a": [stored]}, "conditions": {"processes": 1}, "failures": {}})
    assert session.latency("a").value == 1.0
    assert session.interval("a") is None
    with pytest.raises(MeasureError, match="it was not asked for"):
        session.energy("a")


def test_the_interval_holds_that_of_every_process():
    rows = (replace(timing(10), low_ms=9.0, high_ms=10.5), replace(timing(11), low_ms=10.0, high_ms=12.0))
    assert Session({"a": rows}, {}).interval("a") == (9.0, 12.0)


def test_energy_is_the_median_over_processes_with_their_spread():
    rows = tuple(replace(timing(10), energy_mj=value, energy_stderr_mj=0.1) for value in (20.0, 22.0, 21.0))
    reading = Session({"a": rows}, {}).energy("a")
    assert (reading.value, reading.unit, reading.count) == (21.0, "mJ", 3)
    assert reading.stderr > 1 / math.sqrt(3)
    beside = tuple(replace(timing(1), energy_mj=value) for value in (10.0, 11.0, 10.5))
    ratio = Session({"a": rows, "b": beside}, {}).ratio("a", "b", "energy")
    assert (ratio.value, ratio.unit) == (2.0, "ratio")  # in every process, whatever moved both
    assert ratio.stderr < 0.01


def test_energy_that_one_process_did_not_read_is_not_measured():
    told = {"energy": {"provenance": "unavailable", "why": "the counter stood still"}}
    session = Session({"a": (replace(timing(10), energy_mj=20.0), timing(10))}, told)
    with pytest.raises(MeasureError, match="of a was not measured: the counter stood still"):
        session.energy("a")


@pytest.mark.parametrize("name", ["torch-cpu-1t", "ort-cpu-1t"])
def test_energy_is_read_in_the_child_beside_the_latency(name, counter):
    target = find_target(name)
    if missing_packages(target):
        pytest.skip(f"not installed: {missing_packages(target)}")
    candidates = [Candidate(name="a", ref="tests.factories:small_cnn")]
    session = measure(candidates, target, Shape(), seconds=0.01, tolerance=1.0, energy_seconds=0.2)
    assert session.conditions["energy"] == {"provenance": "measured", "why": "RAPL, 1 package(s)"}
    reading = session.energy("a")
    assert reading.unit == "mJ"
    assert reading.value > 0


def test_energy_without_a_counter_is_unavailable_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("apportion.device.energy.RAPL", tmp_path)
    candidates = [Candidate(name="a", ref="tests.factories:small_linear")]
    session = measure(candidates, TARGET, Shape(), seconds=0.01, tolerance=1.0, energy_seconds=0.1)
    assert session.conditions["energy"]["provenance"] == "unavailable"
    with pytest.raises(MeasureError, match="shows no RAPL counter"):
        session.energy("a")


def test_one_disturbed_process_of_many_does_not_widen_the_error():
    calm, disturbed = [1.0, 1.01, 0.99, 1.0, 1.02], [1.0, 1.01, 0.99, 1.0, 5.0]
    sessions = [Session({"a": tuple(map(timing, medians))}, {}) for medians in (calm, disturbed)]
    errors = [session.latency("a").stderr for session in sessions]
    assert errors[1] < 0.02
    assert errors == pytest.approx([errors[0]] * 2, rel=0.5)


def test_halves_apart_in_time_have_their_distance_in_the_error():
    def sitting(ms):
        rows = {"a": (timing(ms),) * 3, "b": (timing(10.0),) * 3}
        return Session(rows, {"processes": 3, "tight": True})

    together, apart = sitting(5.0).plus(sitting(5.4)), sitting(5.0).plus(sitting(5.4), later=True)
    assert (together.parts, apart.parts) == ((), (3, 3))
    assert apart.latency("a").stderr == pytest.approx(0.2)  # half the distance, however many processes each half has
    assert apart.ratio("a", "b").stderr == pytest.approx(0.02)
    assert apart.latency("a").stderr > together.latency("a").stderr
    assert apart.latency("b").stderr == together.latency("b").stderr
    assert apart.plus(sitting(5.4)).parts == (3, 6)
    assert Session.from_json(apart.to_json()) == apart


def test_the_error_of_two_processes_holds_their_spread():
    apart = Session({"a": (timing(10), timing(11))}, {})
    assert apart.latency("a").stderr > 0.5 / math.sqrt(2)


def test_every_target_listed_is_found_and_others_are_refused():
    for name in target_names():
        assert find_target(name).name == name
    for name in ("toaster", "torch-cpu-0t", "torch-cpu-01t", "ort-cuda", "torch-cpu-1", "torch"):
        with pytest.raises(TargetError, match="torch-cpu-1t"):
            find_target(name)
    with pytest.raises(TargetError, match="needs 9999 cores"):
        find_target("torch-cpu-9999t")


def test_the_instruction_set_cap_is_part_of_a_targets_identity():
    plain = find_target("openvino-int8-cpu-1t")
    capped = plain.with_isa("AVX2")
    assert capped.identity != plain.identity
    assert capped.environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA" not in plain.environment


def test_a_size_reaches_the_child_and_what_is_counted_and_timed():
    candidate = Candidate(name="a", ref="tests.factories:small_cnn")
    small, large = (read_all(candidate, TARGET, Shape(size=size)).by_name for size in (8, 32))
    assert 8 < large["flops"]["value"] / small["flops"]["value"] < 16.1  # all but the head is over pixels
    assert small["params"] == large["params"]
    with pytest.raises(ModelError, match="no images"):
        read_all(Candidate(name="a", ref="tests.factories:small_linear"), TARGET, Shape(size=8))
    session = measure([candidate], TARGET, Shape(size=32), seconds=0.01, tolerance=1.0)
    assert session.require().latency("a").value > 0


def test_a_shape_of_the_models_own_size_is_kept_as_shapes_were_before_there_were_sizes():
    assert Shape().to_json() == {"batch": 1, "tokens": 64, "seed": 0}
    assert Shape(**Shape().to_json()) == Shape()
    assert Shape(**Shape(size=32).to_json()) == Shape(size=32)
