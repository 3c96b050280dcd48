"""The cache of built artefacts: the same content is built once, what differs is built again, and a limit holds."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from apportion.device import build as building
from apportion.device.build import BUILT, build_all
from apportion.device.measure import Candidate, Shape, measure
from apportion.device.process import Ended, Failure, Limits
from apportion.device.target import find_target
from apportion.models.load import load
from apportion.models.save import save

ORT, INT8 = find_target("ort-cpu-1t"), find_target("ort-int8-cpu-1t")


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Builds with a child that writes the name of what it builds; returns the folders and the names of those built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = []

    def run_child(job, environment, limits):
        for candidate in job["candidates"]:
            names.append(candidate["name"])
            folder = Path(candidate["folder"])
            folder.mkdir()
            (folder / "model.onnx").write_text(candidate["name"])
            (folder / BUILT).touch()
        return Ended({"failures": {}})

    monkeypatch.setattr(building, "run_child", run_child)

    def run(*refs, target=ORT, shape=None):
        names.clear()
        jobs = [asdict(Candidate(name=str(ref), ref=str(ref), factory="tests.factories:small_cnn")) for ref in refs]
        done = build_all(jobs, target, asdict(shape or Shape()), Limits(), lambda: None)
        return [done[str(ref)] for ref in refs], sorted(names)

    return run


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    save(load("tests.factories:small_cnn"), folder)
    return folder


def test_the_same_content_is_built_once_wherever_it_lies(built, model, tmp_path):
    (first,), names = built(model)
    assert names == [str(model)]
    copy = model.rename(tmp_path / "elsewhere")
    assert built(copy) == ([first], [])


def test_what_changes_the_artefact_is_built_again(built, model):
    (first,), _ = built(model)
    targets, shapes = (INT8, find_target("openvino-cpu-1t")), (Shape(batch=2), Shape(size=8))
    for changed in (*({"target": target} for target in targets), *({"shape": shape} for shape in shapes)):
        (other,), names = built(model, **changed)
        assert names == [str(model)]
        assert other != first
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    (other,), names = built(model)
    assert names == [str(model)]
    assert other != first


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core")
def test_threads_do_not_change_the_artefact(built, model):
    first, _ = built(model)
    assert built(model, target=find_target("ort-cpu-2t")) == (first, [])


def test_a_build_that_died_is_not_in_the_cache(built, model, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(building, "run_child", lambda *_: Ended(None, Failure("died", "killed"), str(model)))
        assert built(model)[0] == [Failure("died", "killed")]
    assert built(model)[1] == [str(model)]


def test_the_cache_keeps_to_its_limit_and_to_what_is_used_now(built, model, monkeypatch):
    monkeypatch.setattr(building, "MAX_CACHE_BYTES", 0)
    (first,), _ = built(model)
    (second,), _ = built(model, shape=Shape(batch=2))
    assert second.is_dir()
    assert not first.exists()


def test_what_is_compiled_is_shared_out_and_compiled_once(model, tmp_path, monkeypatch):
    asked = []

    def run_child(job, environment, limits):
        asked.append([candidate["name"] for candidate in job["candidates"]])
        return Ended({}) if len(asked) == 1 else Ended(None, Failure("died", "killed"), asked[-1][0])

    monkeypatch.setattr(building, "run_child", run_child)
    monkeypatch.setattr(building, "_compiled", set())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(building, "free_bytes", lambda: 100 * 2**30)
    target, shape = find_target("compile-cpu-1t"), asdict(Shape())
    other = tmp_path / "other"
    save(load("tests.factories:small_regressor"), other)
    jobs = [asdict(Candidate(name=name, ref=str(ref))) for name, ref in (("a", model), ("b", other), ("c", model))]
    building.compile_all(jobs, target, shape, Limits())
    assert sorted(asked) == [["b"], ["c"]]  # the same content once, whatever became of the other
    building.compile_all(jobs, target, shape, Limits())
    assert len(asked) == 2
    building.compile_all(jobs, target, asdict(Shape(batch=2)), Limits())
    assert len(asked) == 4  # other inputs are compiled for anew


def test_few_build_at_a_time_where_memory_is_short(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    wanted = [{"name": name} for name in "abcde"]
    shares = {}
    for free in (0, 7 * 2**30, 100 * 2**30):
        monkeypatch.setattr(building, "free_bytes", lambda free=free: free)
        shares[free] = building._shares(wanted)
    assert [len(some) for some in shares.values()] == [1, 2, 5]
    assert all(sorted(one["name"] for share in some for one in share) == [*"abcde"] for some in shares.values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_processes_that_time_find_what_was_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(building, "_compiled", set())
    target, candidates = find_target("compile-cpu-1t"), [Candidate(name="a", ref="tests.factories:small_cnn")]
    building.compile_all([asdict(one) for one in candidates], target, asdict(Shape()), Limits())
    kernels = {path.name for path in tmp_path.rglob("*.so")}
    assert kernels
    measure(candidates, target, Shape(), processes=2, seconds=0.01, tolerance=1.0).require()
    assert {path.name for path in tmp_path.rglob("*.so")} == kernels
