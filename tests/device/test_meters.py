"""Meters without a clock, against counts done by hand and against the file written."""

from __future__ import annotations

import torch
from torch import nn

from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk, flops_by_part
from apportion.models.load import load
from apportion.models.network import Network, Origin
from apportion.models.save import save


def linear_network() -> Network:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Network(module=module, inputs={"0": torch.zeros(3, 4)}, origin=Origin(ref="x"), readout="logits")


def test_parameters_are_counted_once():
    network = linear_network()
    assert ParameterCount().read(network).value == 4 * 8 + 8 + 8 * 2 + 2
    network.module[2].weight = nn.Parameter(torch.zeros(2, 8))
    network.module.register_parameter("alias", network.module[2].weight)
    assert ParameterCount().read(network).value == 4 * 8 + 8 + 8 * 2 + 2


def test_flops_of_linear_layers_are_twice_the_products():
    network = linear_network()
    assert FlopCount().read(network).value == 2 * 3 * (4 * 8 + 8 * 2)
    assert flops_by_part(network)["0"] == 2 * 3 * 4 * 8


def test_size_bounds_the_file_closely(tmp_path):
    network = load("tests.factories:small_cnn")
    predicted = SizeOnDisk().read(network).value
    save(network, tmp_path / "model")
    actual = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert actual <= predicted <= 1.02 * actual
