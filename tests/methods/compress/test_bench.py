"""A check takes as many processes as it needs, and a quantised model is judged by what its artefact answers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.methods.compress.test_repair import examples_of
from tests.models import zoo

from apportion.core.budget import Budget
from apportion.cost.parts import View
from apportion.device.measure import Session, Shape, Timing
from apportion.device.process import Failure
from apportion.device.store import Store
from apportion.device.target import find_target
from apportion.errors import BudgetError, Exit, LostError, MeasureError
from apportion.methods.compress import bench
from apportion.methods.compress.bench import Bench, budget_target, contents_of, counted_anywhere, read_artefact
from apportion.methods.compress.quantise import Quantise
from apportion.methods.compress.rundir import FitConfig, identity
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.save import save
from apportion.tasks.agreement import Agreement
from apportion.tasks.quality import Likelihood


@pytest.fixture
def measured(monkeypatch):
    """Runs a check whose model takes so many milliseconds in every process; returns the processes it took."""
    asked = []

    def measure(candidates, target, shape, *, processes, before, **_):
        asked.append((processes, before))
        timing = Timing(median_ms=candidates[1], stderr_ms=0.1, mad_ms=0.1, p95_ms=candidates[1], count=9)
        conditions = {"processes": processes, "tight": True, "wall_per_cpu": 1.0, "load": 0.0, "steal_ratio": 0.0}
        return Session({"final": (timing,) * processes}, conditions, {})

    def run(model_ms, processes, again=False, **options):
        asked.clear()
        config = SimpleNamespace(processes=processes)
        stand = SimpleNamespace(original=None, target=None, shape=None, config=config, energy_seconds=0.0)
        stand.candidate = lambda *_: model_ms
        for name in ("_more", "_until"):
            setattr(stand, name, partial(getattr(Bench, name), stand))
        session = Bench.measure(stand, None, over=lambda session: session.latency("final").value > 10, **options)
        if again:
            session = Bench.measure_again(stand, session, None, options.get("clear", lambda session: True))
        assert not session.parts or sum(session.parts) == len(session.timings["final"])
        return len(session.timings["final"]), asked

    monkeypatch.setattr(bench, "measure", measure)
    return run


def test_two_processes_are_enough_for_what_is_far_over(measured):
    assert measured(11.0, 6) == (2, [(2, 0)])


@pytest.mark.parametrize(("processes", "asked"), [(6, [(2, 0), (2, 2), (2, 4)]), (2, [(2, 0)]), (1, [(1, 0)])])
def test_others_take_as_many_as_asked_for_and_keep_turning_the_order(measured, processes, asked):
    assert measured(9.0, processes) == (processes, asked)


def test_an_unclear_check_takes_one_more_at_a_time_up_to_three_times_as_many(measured):
    count, asked = measured(9.0, 4, clear=lambda session: False)
    assert count == 12
    assert asked == [(2, 0), (2, 2), *((1, before) for before in range(4, 12))]


@pytest.mark.parametrize(
    ("processes", "first", "then"),
    [(6, [(2, 0), (2, 2)], [(2, 4)]), (8, [(2, 0), (2, 2)], [(4, 4)]), (2, [(2, 0)], [])],
)
def test_what_is_within_after_half_of_the_processes_is_measured_in_the_others_later(measured, processes, first, then):
    assert measured(9.0, processes, within=lambda session: True)[1] == first
    assert measured(9.0, processes, again=True, within=lambda session: True) == (processes, first + then)


def test_halves_that_are_not_clear_together_take_more(measured):
    count, asked = measured(
        9.0, 4, again=True, within=lambda s: True, clear=lambda s: len(s.timings["final"]) in (2, 7)
    )
    assert count == 7
    assert asked == [(2, 0), (2, 2), *((1, before) for before in range(4, 7))]


def test_what_was_measured_under_another_instruction_cap_is_measured_again(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    plain = find_target("openvino-int8-cpu-1t")
    session, caps = Session({}, {"processes": 1}), []

    def check(target):
        def measure(*_):
            caps.append(target.isa)
            return session

        stand = SimpleNamespace(run="run", target=target, store=Store(tmp_path / "store.sqlite"), measure=measure)
        Bench.session(stand, tmp_path / "model", None, None, None)

    for target in (plain, plain.with_isa("AVX2"), plain, plain.with_isa("AVX2")):
        check(target)
    assert caps == [None, "AVX2"]


def test_both_halves_are_kept_so_that_a_resumed_run_measures_neither_again(tmp_path):
    (tmp_path / "model").mkdir()
    taken = []

    def half(name):
        def measure(*_):
            taken.append(name)
            return Session({}, {"processes": 2}, parts=(1, 1) if name == "second" else ())

        return measure

    stand = SimpleNamespace(run="run", target=find_target("torch-cpu-1t"), store=Store(tmp_path / "store.sqlite"))
    stand.measure, stand.measure_again = half("first"), half("second")
    for twice in (False, True, True, False):
        session = Bench.session(stand, tmp_path / "model", None, None, None, twice=twice)
        assert session.parts == ((1, 1) if twice else ())
    assert taken == ["first", "second"]


@pytest.mark.parametrize(
    ("isa", "size", "told"),
    [
        ("AVX2", None, r"is about openvino-int8-cpu-1t\+AVX2, .* the run about openvino-int8-cpu-1t, "),
        (None, 96, r"is about .*, 64 tokens, images of 96 pixels a side, the run about .*, 64 tokens; calibrate"),
    ],
)
def test_a_profile_of_another_instruction_cap_or_size_is_refused(monkeypatch, isa, size, told):
    plain = find_target("openvino-int8-cpu-1t")
    profile = SimpleNamespace(target=plain.with_isa(isa), shape=Shape(size=size), view=View())
    monkeypatch.setattr(bench.Profile, "load", lambda path: profile)
    stand = SimpleNamespace(config=SimpleNamespace(profile="p.json"), target=plain, shape=Shape())
    parts = SimpleNamespace(seen=lambda _: None)
    with pytest.raises(BudgetError, match=told):
        Bench.known(stand, None, parts)


@pytest.mark.parametrize("at_once", [1, 100], ids=["one-by-one", "all"])
def test_a_quantised_language_model_is_judged_by_its_artefact(monkeypatch, generator, at_once):
    network = zoo.build("gpt2", dtype=torch.float32).replace(readout="token-logits")
    examples = examples_of(network, generator, count=32)
    small = Quantise(examples).quantised(network)
    other = network.replace(
        module=zoo.build("gpt2", dtype=torch.float32, seed=1).module
    )  # stands for an artefact, so that it is known who was asked
    asked = []

    def answers(artefact, target, batches):
        asked.append(len(batches))
        with torch.inference_mode():
            return [[read_out(other, batch)] for batch in batches]

    stand = SimpleNamespace(target=None)
    for name in ("token_sample", "answers", "_opened", "_answers"):
        setattr(stand, name, partial(getattr(Bench, name), stand))
    monkeypatch.setattr(bench, "answers", answers)
    logits_bytes = 4 * read_out(network, network.inputs).numel()
    monkeypatch.setattr(bench, "MAX_ANSWER_BYTES", at_once * logits_bytes)
    for meter in (Likelihood(network, examples), Agreement(network, examples)):
        asked.clear()
        reading = Bench.read_quality(stand, meter, examples, small, None, artefact=Path("there"))
        assert reading.value == pytest.approx(meter.read(other).value)
        assert reading.value != meter.read(network).value
        assert max(asked) == min(at_once, sum(asked))
        assert sum(asked) * len(network.inputs["input_ids"]) >= len(examples)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("ort-int8-cpu-2t", "ort-cpu-2t"),
        ("ort-int8dyn-cpu-1t", "ort-cpu-1t"),
        ("compile-int8-cpu-1t", "compile-cpu-1t"),
    ],
)
def test_int8_is_no_target_but_a_choice_of_the_run(name, same):
    with pytest.raises(BudgetError, match=f"{name} is in int8.*name {same}$"):
        budget_target(Budget.parse(f"60%@{name}"), None)


def test_what_is_counted_is_counted_on_every_target():
    budget = counted_anywhere(Budget.parse("8ms@ort-cpu-1t, size<=20MB@ort-cpu-1t, memory<=9MB@ort-cpu-1t"))
    assert budget.keys == ("latency@ort-cpu-1t", "size", "memory@ort-cpu-1t")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_size_is_that_of_what_the_runtime_opens(tmp_path, precision):
    network = load("tests.factories:small_cnn")
    save(network, tmp_path / "model")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "model.onnx").write_bytes(b"x" * 1234)
    (tmp_path / "built" / "inputs.npz").write_bytes(b"x" * 99)
    if precision == "int8":
        network = network.replace(calibration=(network.inputs,))
    target, asked = find_target("ort-cpu-1t"), Budget.parse("size<=1MB")
    found = read_artefact(network, tmp_path / "model", asked, target, {}, None, tmp_path / "built")
    assert found["size"].value == 1234
    plain = read_artefact(network, tmp_path / "model", asked, target, {}, None)
    assert plain["size"].value == (tmp_path / "model" / "model.safetensors").stat().st_size


def test_what_was_measured_elsewhere_is_measured_again(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    asked = []

    def measured(*_):
        asked.append(bench.machine()["processor"])
        return Session({}, {"processes": 1})

    stand = SimpleNamespace(run="run", target=find_target("torch-cpu-1t"), store=Store(tmp_path / "store.sqlite"))
    stand.measure = measured
    for processor in ("this", "that", "this"):
        monkeypatch.setattr(bench, "machine", lambda processor=processor: {"processor": processor})
        Bench.session(stand, tmp_path / "model", None, None, None)
    assert asked == ["this", "that"]


@pytest.mark.parametrize(("lost", "error"), [({"final"}, LostError), ({"baseline", "final"}, MeasureError)])
def test_a_model_that_can_not_be_measured_breaks_its_budget_and_an_original_that_can_not_breaks_the_run(
    monkeypatch, tmp_path, lost, error
):
    failures = {name: Failure("died", "by signal 9") for name in sorted(lost)}
    monkeypatch.setattr(bench, "measure", lambda *_, **__: Session({}, {"processes": 1}, failures))
    stand = SimpleNamespace(original=None, target=find_target("torch-cpu-1t"), shape=None, energy_seconds=0.0)
    stand.candidate = lambda *_: None
    with pytest.raises(MeasureError, match="died: by signal 9") as told:
        Bench._more(stand, 1, tmp_path)
    assert type(told.value) is error
    assert told.value.exit_code == (Exit.NOT_MET if error is LostError else Exit.BAD_INPUT)


def test_contents_of_files_are_part_of_a_run(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("text,label")
    config = FitConfig(model="x", budget="60%", data=str(tmp_path / "data"), policy="learned")
    first = contents_of(config)
    assert first.keys() == {"data"}
    (tmp_path / "data" / "a.csv").write_text("text,labels")
    assert contents_of(config) != first
    assert identity(config, "model", contents_of(config)) != identity(config, "model", first)
    assert contents_of(replace(config, data="digits")) == {}
