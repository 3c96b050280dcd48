"""Simulated int8: exact on what int8 can hold, within half a step elsewhere, and saved with the network."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from apportion.errors import ModelError
from apportion.models import quantise
from apportion.models.load import CALIBRATION_FILE, load
from apportion.models.network import Int8, read_out
from apportion.models.quantise import fake_quantise_input, fake_quantise_weight, input_ranges, simulate
from apportion.models.save import save

CNN = "tests.factories:small_cnn"


def test_weights_that_int8_can_hold_stay_as_they_are(generator):
    whole = torch.randint(-127, 128, (5, 7), generator=generator).float()
    whole[:, 0] = 127
    scale = torch.rand(5, 1, generator=generator) + 0.1
    torch.testing.assert_close(fake_quantise_weight(whole * scale), whole * scale)


def test_weights_move_by_at_most_half_a_step_of_their_channel(generator):
    weight = torch.randn(6, 3, 3, 3, generator=generator)
    step = weight.abs().amax((1, 2, 3), keepdim=True) / 127
    assert ((fake_quantise_weight(weight) - weight).abs() <= step / 2 + 1e-6).all()
    sideways = fake_quantise_weight(weight.transpose(0, 1), dim=1)
    torch.testing.assert_close(sideways.transpose(0, 1), fake_quantise_weight(weight))


@given(low=st.floats(-5, 3), width=st.floats(0.1, 10), seed=st.integers(0, 100))
def test_inputs_in_range_move_by_at_most_a_step_and_zero_stays(low, width, seed):
    high = low + width
    x = torch.empty(50).uniform_(low, high, generator=torch.Generator().manual_seed(seed))
    step = (max(high, 0) - min(low, 0)) / 255
    moved = fake_quantise_input(x, low, high)
    assert (moved - x).abs().max() <= step * 1.01
    assert fake_quantise_input(torch.zeros(1), low, high) == 0


def test_inputs_out_of_range_are_clipped():
    clipped = fake_quantise_input(torch.tensor([-9.0, 9.0]), -1.0, 1.0)
    assert clipped.abs().max() <= 1.01


def quantised(generator, count=4):
    batches = tuple({"0": torch.randn(1, 3, 16, 16, generator=generator)} for _ in range(count))
    return load(CNN).replace(calibration=batches)


@pytest.mark.parametrize(("saturates", "least", "most"), [(False, 1e-5, 0.1), (True, 0.02, 0.2)])
def test_a_simulated_network_is_near_the_original_and_not_the_same(monkeypatch, generator, saturates, least, most):
    monkeypatch.setattr(quantise, "int8_saturates", lambda: saturates)
    network = quantised(generator)
    assert network.precision == "int8"
    batch = {"0": torch.randn(20, 3, 16, 16, generator=generator)}
    with torch.inference_mode():
        exact, rounded = read_out(network, batch), read_out(simulate(network), batch)
    error = (rounded - exact).norm() / exact.norm()
    assert least < error < most
    assert simulate(network).precision == "fp32"


def test_ranges_cover_what_was_seen(generator):
    network = quantised(generator)
    ranges = input_ranges(network.module, network.calibration)
    seen = torch.cat([batch["0"] for batch in network.calibration])
    assert ranges["stem"] == pytest.approx((seen.min().item(), seen.max().item()))
    assert ranges["blocks.0.second"][0] == 0.0  # after a ReLU


def test_calibration_is_saved_with_the_network(generator, tmp_path):
    network = quantised(generator)
    save(network, tmp_path / "model")
    again = load(str(tmp_path / "model"), factory=CNN)
    assert again.precision == "int8"
    for ours, theirs in zip(network.calibration, again.calibration, strict=True):
        assert torch.equal(ours["0"], theirs["0"])
    plain = load(CNN)
    save(plain, tmp_path / "plain")
    assert load(str(tmp_path / "plain"), factory=CNN).precision == "fp32"


def test_calibration_of_another_model_is_refused(generator, tmp_path):
    save(quantised(generator), tmp_path / "model")
    path = tmp_path / "model" / CALIBRATION_FILE
    tensors = load_file(path)
    save_file({name.replace(".0", ".other"): tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(ModelError, match="no input of this model"):
        load(str(tmp_path / "model"), factory=CNN)


def test_layers_in_float_are_not_simulated_and_the_choice_is_saved(generator, tmp_path):
    network = quantised(generator).replace(int8=Int8(activations="int8", scope="graph", in_float=("blocks.0", "head")))
    rounded = simulate(network).module
    for name, layer in network.module.named_modules():
        if name.startswith("blocks.") and hasattr(layer, "weight"):
            same = torch.equal(layer.weight, rounded.get_submodule(name).weight)
            assert same == name.startswith("blocks.0.")
    save(network, tmp_path / "model")
    assert load(str(tmp_path / "model"), factory=CNN).int8 == network.int8
    path = tmp_path / "model" / "apportion.json"
    for wrong in ({"scope": "all"}, {"in_float": [1]}, [], {"activations": None}):
        path.write_text(json.dumps({**json.loads(path.read_text()), "int8": wrong}))
        with pytest.raises(ModelError, match="unknown kind of int8"):
            load(str(tmp_path / "model"), factory=CNN)
