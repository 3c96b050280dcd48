"""OpenVINO's int8: biases are corrected by real inputs, and left alone where inputs are made up to price it."""

from __future__ import annotations

import pytest
import torch

from apportion.device.runtimes.openvino import IR, RUNTIME
from apportion.device.target import find_target
from apportion.models.load import load

nncf = pytest.importorskip("nncf")


@pytest.mark.parametrize("real", [True, False])
def test_biases_are_corrected_where_the_calibration_is_real(real, generator, tmp_path, monkeypatch):
    quantise, asked = nncf.quantize, []

    def watched(*args, **options):
        asked.append(options["advanced_parameters"].disable_bias_correction)
        return quantise(*args, **options)

    monkeypatch.setattr(nncf, "quantize", watched)
    network = load("tests.factories:small_cnn")
    if real:
        batches = tuple({"0": torch.randn(1, 3, 16, 16, generator=generator)} for _ in range(4))
        network = network.replace(calibration=batches)
    RUNTIME.build(network, tmp_path, find_target("openvino-int8-cpu-1t"))
    assert asked == [not real]
    assert (tmp_path / IR).is_file()
