"""Dynamic int8 by torchao: near the original, only where it is asked for, and saved as what it is made from."""

from __future__ import annotations

import pytest
import torch
from tests.models import zoo

from apportion.device.meters import SizeOnDisk
from apportion.models.network import Int8, read_out
from apportion.models.quantise import simulate

pytest.importorskip("torchao")


def test_linear_layers_are_quantised_but_for_those_in_float():
    network = zoo.build("bert")
    network = network.replace(module=network.module.float())
    linear = [name for name, layer in network.module.named_modules() if isinstance(layer, torch.nn.Linear)]
    recipe = Int8(activations="int8", scope="dynamic", in_float=(linear[0],))
    small = network.replace(calibration=(dict(network.inputs),), int8=recipe)
    rounded = simulate(small).module
    for name in linear:
        weight, now = network.module.get_submodule(name).weight, rounded.get_submodule(name).weight
        assert (type(now) is torch.nn.Parameter) == (name == linear[0])
        assert weight.dtype is torch.float32  # the original is left alone
    with torch.inference_mode():
        exact, found = read_out(network, network.inputs), read_out(simulate(small), network.inputs)
    error = (found - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.1
    assert SizeOnDisk().read(small) == SizeOnDisk().read(network)  # the file stays in float
