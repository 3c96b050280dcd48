"""Export as a process: files that other programs open, and a certificate only beside the bytes that it is about."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import onnxruntime
import openvino
import pytest
import torch
from tests.pipeline.check import assert_one_line

from apportion.models.load import load
from apportion.models.network import forward

CNN = "tests.factories:small_cnn"
FILES = {
    "safetensors": {"model.safetensors", "apportion.json"},
    "onnx": {"model.onnx"},
    "openvino": {"model.xml", "model.bin"},
    "torch-export": {"model.pt2"},
}


def answer(kind, folder, image):
    """What the program of a format answers, opened without a line of ours."""
    if kind == "onnx":
        (path,) = folder.glob("*.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return session.run(None, {session.get_inputs()[0].name: image.numpy()})[0]
    if kind == "openvino":
        return next(iter(openvino.Core().compile_model(folder / "model.xml", "CPU")(image.numpy()).values()))
    if kind == "torch-export":
        return torch.export.load(folder / "model.pt2").module()(image)[0].detach().numpy()
    with torch.no_grad():
        return forward(load(str(folder), factory=CNN).module, {"0": image}).numpy()


def test_a_run_is_exported_in_every_format(apportion, tmp_path, images, generator):
    fitted = apportion.json("fit", CNN, "--budget", "params<=60%", "--data", images, "--rungs", 1, "-o", "run")
    assert fitted["met"] is True
    image = torch.randn(1, 3, 16, 16, generator=generator)
    with torch.no_grad():
        wanted = forward(load(str(tmp_path / "run" / "model"), factory=CNN).module, {"0": image}).numpy()
    for kind, names in FILES.items():
        told = apportion.json("export", "run", "--format", kind, "-o", kind, "--model", CNN)
        assert told["exit"] == 0
        assert set(told["files"]) == names
        for name, digest in told["files"].items():
            assert hashlib.sha256((tmp_path / kind / name).read_bytes()).hexdigest() == digest
        np.testing.assert_allclose(answer(kind, tmp_path / kind, image), wanted, rtol=1e-3, atol=1e-3)
        assert told["certified"] == (kind == "safetensors")  # the run was about torch
        assert (tmp_path / kind / "certificate.json").is_file() == told["certified"]


@pytest.mark.slow
def test_the_certificate_goes_with_the_file_that_was_measured(apportion, tmp_path, images):
    options = ("--target", "ort-cpu-1t", "--rules", "quantise", "--data", images, "--rungs", 1, "-o", "run")
    fitted = apportion.json("fit", CNN, "--budget", "size<=45%", *options)
    assert fitted["met"] is True
    assert fitted["precision"] == "int8"
    told = apportion.json("export", "run", "--format", "onnx", "-o", "out")  # bytes are copied: no code of the model's
    assert told["certified"] is True
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["files"] == told["files"]
    size = sum((tmp_path / "out" / name).stat().st_size for name in told["files"])
    assert size == certificate["measured"]["size"]["value"]
    assert apportion.json("verify", "run", "--model", CNN)["exit"] == 0
    done = apportion("export", "run", "--format", "openvino", "-o", "other", "--model", CNN)
    assert done.returncode == 0
    assert "not certified: the run's certificate is about int8.onnx on ort-cpu-1t" in done.stdout
    (kept,) = (tmp_path / "run" / "rungs" / "1" / "artefact").glob("*.onnx")
    kept.write_bytes(kept.read_bytes() + b" ")
    for command in (("verify", "run", "--model", CNN), ("export", "run", "--format", "onnx", "-o", "third")):
        assert_one_line(apportion(*command, "--json"), 2, "does not hold the files that were certified")
    assert not (tmp_path / "third").exists()


def test_mistakes_are_told_in_one_line(apportion, tmp_path, images):
    assert apportion.json("fit", CNN, "--budget", "params<=80%", "--data", images, "-o", "run")["met"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, part in (
        (("run", "--format", "gguf", "-o", "new"), "possible are safetensors, onnx, openvino, torch-export"),
        (("run", "--format", "onnx", "-o", "full"), "full exists and is not empty"),
        (("run", "--format", "onnx", "-o", "new"), f"the factory {CNN!r}; confirm it with --model"),
        (("nowhere", "--format", "onnx", "-o", "new"), "nowhere holds no run"),
    ):
        assert_one_line(apportion("export", *arguments), 2, part)
        assert not (tmp_path / "new").exists()
