"""Masked slices in simulated int8, as the adapt benchmarks judge them."""

import runpy

import numpy as np
import pytest
import torch

from apportion.models.network import read_out
from apportion.models.quantise import simulate

int8_features = runpy.run_path("benchmarks/adapt_text/rounded.py")["int8_features"]


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_masked_slice_rounds_as_the_sliced_network_does(tiny, monkeypatch, share):
    monkeypatch.setattr("apportion.models.quantise.int8_saturates", lambda: False)
    family, num_support = tiny.family(), 6
    with torch.no_grad():
        for bundle in family.stacks:
            bundle.delta.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    sizes = {m.name: max(s for s in m.sizes() if s <= max(share * m.num_units, m.sizes()[0])) for m in tiny.partition}
    alpha_M = torch.tensor([0.4, 0.3, 0.2, 0.1])
    inputs = tiny.pools["a"].at(np.arange(20))
    with torch.inference_mode():
        found_NF = int8_features(family, inputs, num_support, family.gates(alpha_M), family.keep_of(sizes))
        support = {name: tensor[:num_support] for name, tensor in inputs.items()}
        sliced = family.sliced(alpha_M, sizes).replace(calibration=(support,))
        wanted_NF, float_NF = read_out(simulate(sliced), inputs), read_out(sliced, inputs)
    # a number that lies between two levels may round either way: steps of a level are left, others are not
    assert (found_NF - wanted_NF).norm() < 0.2 * (wanted_NF - float_NF).norm()
