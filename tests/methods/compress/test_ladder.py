"""The ladder: the best rung within a moving budget, switched at once, and honest when none is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.core.meter import Reading
from apportion.device.answers import build
from apportion.device.build import model_files
from apportion.device.measure import Candidate, Shape
from apportion.device.target import find_target
from apportion.errors import ApportionError, InfeasibleError
from apportion.methods.compress.ladder import Ladder, retarget
from apportion.methods.compress.rundir import FitConfig, RunDir
from apportion.methods.compress.serve import serve_ladder
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.models.safefile import file_digest, folder_digest
from apportion.models.save import save

CNN = "tests.factories:small_cnn"
MS = {1: 8.0, 2: 6.0, 3: 4.0}
QUALITY = {1: 0.98, 2: 0.95, 3: 0.90}


def certificate(model, latency_ms, quality, target="torch-cpu-1t", files=None, isa=None):
    budget = Budget.parse(f"latency<={latency_ms}ms@{target}")
    return Certificate(
        asked=str(budget),
        budget=budget,
        baseline={f"latency@{target}": Reading(value=10.0, unit="ms")},
        measured={f"latency@{target}": Reading(value=latency_ms, unit="ms", stderr=0.01)},
        quality={"before": Reading(value=1.0, unit="ratio"), "after": Reading(value=quality, unit="ratio")},
        artefact=folder_digest(model),
        target=target,
        files={"model.safetensors": file_digest(model / "model.safetensors")} if files is None else files,
        conditions={"isa": isa},
        measured_at="2026-01-01T00:00:00+00:00",
        confidence=0.95,
        z=1.0,
    )


@pytest.fixture
def run(tmp_path):
    """A run of three rungs whose certificates say 8, 6 and 4 ms of 10."""
    rundir = RunDir(tmp_path / "run")
    rundir.start(FitConfig(model=CNN, budget="latency<=40%@torch-cpu-1t", rungs=3), CNN, {})
    network = load(CNN)
    partition = Partition.of(network)
    module = next(m for m in partition if m.kind == "channels")
    for rung, ms in MS.items():
        keep = partition.keep({module.name: module.sizes()[-rung]})
        save(slice_network(network, partition, keep), rundir.rung(rung).model)
        rundir.rung(rung).write("certificate.json", certificate(rundir.rung(rung).model, ms, QUALITY[rung]).to_json())
    rundir.use(3)
    return rundir.path


@pytest.mark.parametrize(
    ("budget", "rung"),
    [("8.5ms", 1), ("8ms", 2), ("latency<=7ms", 2), ("65%", 2), ("latency<=50%@torch-cpu-1t", 3), ("4.02ms", 3)],
)
def test_the_best_rung_within_the_budget_is_chosen(run, budget, rung):
    # 8ms does not hold the first rung: its certified 8 ms has an error
    assert Ladder.load(run).choose(Budget.parse(budget)).rung == rung


def test_retargeting_links_the_model_and_its_certificate(run):
    told = retarget(run, "6.5ms")
    assert told["rung"] == 2
    assert os.readlink(run / "model") == os.path.join("rungs", "2", "model")
    assert RunDir(run).certificate().measured["latency@torch-cpu-1t"].value == 6.0
    retarget(run, "9ms")
    assert RunDir(run).certificate().measured["latency@torch-cpu-1t"].value == 8.0
    assert (run / "model" / "model.safetensors").is_file()


def test_the_command_switches_without_loading_torch(run):
    script = (
        "import sys\n"
        f"sys.argv = ['apportion', 'retarget', {str(run)!r}, '--budget', '6.5ms', '--json']\n"
        "from apportion.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'cvxpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rung"] == 2
    assert os.readlink(run / "model") == os.path.join("rungs", "2", "model")


def test_a_budget_under_the_last_rung_is_refused_and_changes_nothing(run):
    with pytest.raises(InfeasibleError, match=r"smallest measures up to 4\.01ms"):
        retarget(run, "3ms")
    assert os.readlink(run / "model") == os.path.join("rungs", "3", "model")


def test_a_refusal_tells_the_limit_that_is_broken(run):
    rung = RunDir(run).rung(3)
    fields = rung.read("certificate.json")
    fields["measured"]["size"] = Reading(value=5e6, unit="B").to_json()
    for place in (1, 2, 3):
        RunDir(run).rung(place).write("certificate.json", fields)
    with pytest.raises(InfeasibleError, match="smallest measures up to 5MB"):
        retarget(run, "latency<=100ms, size<=1MB")


def test_model_and_certificate_switch_at_once(run):
    """The certificate is found through the link to the model, so that no moment has those of two rungs."""
    assert (run / "certificate.json").resolve() == (run / "rungs" / "3" / "certificate.json").resolve()
    (run / "model").unlink()
    (run / "model").symlink_to(os.path.join("rungs", "1", "model"))
    assert RunDir(run).certificate().measured["latency@torch-cpu-1t"].value == 8.0


def test_what_was_not_measured_can_not_be_judged(run):
    with pytest.raises(ApportionError, match="not on ort-cpu-1t"):
        retarget(run, "5ms@ort-cpu-1t")
    with pytest.raises(ApportionError, match="did not measure energy"):
        retarget(run, "energy<=5mJ")


def test_a_folder_without_rungs_is_refused(tmp_path):
    with pytest.raises(ApportionError, match="holds no run"):
        Ladder.load(tmp_path)


def test_a_square_wave_of_budgets_is_followed_without_reset(run):
    wave = [9.0 if (call // 5) % 2 == 0 else 4.5 for call in range(40)]
    asked = iter(wave)
    serve = serve_ladder(run, signal=lambda: next(asked), factory=CNN)
    inputs = {"0": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    expected = {
        rung: load(str(run / "rungs" / str(rung) / "model"), factory=CNN).module(inputs["0"]) for rung in (1, 3)
    }
    rungs = []
    for limit_ms in wave:
        output = serve(inputs)
        rungs.append(serve.rung)
        assert MS[serve.rung] <= limit_ms
        assert torch.equal(output, expected[serve.rung])
    assert rungs == [1 if limit == 9.0 else 3 for limit in wave]
    assert serve.num_switches == 7
    assert serve.within_budget


def test_a_served_ladder_says_when_even_its_last_rung_is_too_slow(run):
    serve = serve_ladder(run, factory=CNN)
    assert serve.rung == 1
    assert serve.retarget(2.0) == 3
    assert not serve.within_budget
    assert serve.retarget(None) == 1
    assert serve.within_budget
    assert serve.retarget("70%") == 2


def test_signals_may_be_any_numbers_and_count_to_the_last_digit(run):
    serve = serve_ladder(run, factory=CNN)
    certified = Ladder.load(run).steps[2].certificate
    limit_ms = certified.measured["latency@torch-cpu-1t"].upper(certified.z)
    for number in (limit_ms, np.float64(limit_ms), Budget.parse(f"{limit_ms!r}ms")):
        assert serve.retarget(number) == 3
        assert serve.within_budget
        serve.retarget(Budget.parse(f"{limit_ms - 1e-6!r}ms"))
        assert not serve.within_budget
    assert serve.retarget(np.float32(7.0)) == 2
    for nothing in (0.0, -1.0):
        assert serve.retarget(nothing) == 3
        assert not serve.within_budget


def on_runtime(run, target):
    """The same rungs, as certified on a graph runtime."""
    rundir = RunDir(run)
    for rung, ms in MS.items():
        folder = rundir.rung(rung)
        candidate = Candidate(name=str(rung), ref=str(folder.model), factory=CNN)
        shutil.copytree(build(candidate, find_target(target), Shape()), folder.artefact)
        files = {path.name: file_digest(path) for path in model_files(folder.artefact)}
        folder.write("certificate.json", certificate(folder.model, ms, QUALITY[rung], target, files).to_json())
    return rundir


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ort-cpu-1t", "openvino-cpu-1t"])
def test_served_on_a_graph_runtime_are_the_certified_files(run, target):
    rundir = on_runtime(run, target)
    serve = serve_ladder(run, factory=CNN)
    inputs = dict(load(CNN).inputs)
    for budget, rung in (("9ms", 1), ("4.5ms", 3)):
        serve.retarget(budget)
        (found,) = serve(inputs)
        expected = load(str(rundir.rung(rung).model), factory=CNN).module(*inputs.values())
        assert serve.rung == rung
        torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-4, atol=1e-4)
    file = model_files(rundir.rung(2).artefact)[0]
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ApportionError, match="does not hold the files that were certified"):
        serve_ladder(run, factory=CNN)


def test_files_measured_under_a_cap_of_instructions_are_served_under_it_only(run, monkeypatch):
    rundir = RunDir(run)
    for rung, ms in MS.items():
        folder = rundir.rung(rung)
        folder.write("certificate.json", certificate(folder.model, ms, 1.0, "ort-cpu-1t", isa="AVX2").to_json())
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    with pytest.raises(ApportionError, match="ONEDNN_MAX_CPU_ISA=AVX2"):
        serve_ladder(run, factory=CNN)


@pytest.mark.parametrize(
    ("target", "files", "said"),
    [
        ("ort-cpu-1t", {"model.onnx": "0" * 64}, "is gone"),
        ("compile-cpu-1t", {}, "can't be served"),
    ],
)
def test_what_is_not_as_certified_is_not_served(run, target, files, said):
    folder = RunDir(run).rung(1)
    folder.write("certificate.json", certificate(folder.model, 8.0, 0.98, target, files).to_json())
    with pytest.raises(ApportionError, match=said):
        serve_ladder(run, factory=CNN)


def test_a_model_that_was_changed_is_not_served(run):
    (RunDir(run).rung(2).model / "more.json").write_text("{}")
    with pytest.raises(ApportionError, match="not the model that was certified"):
        serve_ladder(run, factory=CNN)
