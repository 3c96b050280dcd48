"""Zeros left out of the file: exact to the last bit, only where it is smaller, and not to be tampered with."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models import zoo

from apportion.device.meters import SizeOnDisk
from apportion.models import load, save
from apportion.models.sparse import NUMBERS, PLACES, pack, pays, stored_bytes, unpack

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DENSE = "encoder.layer.0.output.dense"


def bits(tensor):
    return tensor.flatten().contiguous().view(torch.uint8)


@given(
    seed=st.integers(0, 10**6),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_what_is_packed_comes_back_to_the_last_bit_and_takes_what_was_said(seed, shape, share, dtype):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    tensor[torch.rand(shape, generator=generator) < share] = 0.0
    tensor[torch.rand(shape, generator=generator) < 0.1] = -0.0
    tensor[torch.rand(shape, generator=generator) < 0.1] = math.inf
    stored, packed = pack({"w": tensor})
    size_bytes = sum(t.numel() * t.element_size() for t in stored.values())
    assert size_bytes == stored_bytes(tensor) <= tensor.numel() * tensor.element_size()
    assert packed == (["w"] if pays(tensor) else [])
    assert not packed or size_bytes + 160 < tensor.numel() * tensor.element_size()
    back = unpack(Path("x"), stored, packed, {"w": tensor})
    assert back.keys() == {"w"}
    assert back["w"].shape == tensor.shape
    assert torch.equal(bits(back["w"]), bits(tensor))


def test_vectors_integers_and_dense_weights_are_stored_as_they_are():
    tensors = {"bias": torch.zeros(100), "ids": torch.zeros(10, 10, dtype=torch.long), "w": torch.ones(10, 10)}
    stored, packed = pack(tensors)
    assert packed == []
    assert stored == tensors


def test_a_tensor_whose_packed_name_is_taken_is_left():
    tensors = {"w": torch.zeros(30, 30), f"w{PLACES}": torch.ones(3)}
    stored, packed = pack(tensors)
    assert packed == []
    assert stored == tensors


def sparse_network(name="bert", share=0.7):
    network = zoo.build(name, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in network.module.state_dict().values():
            if tensor.dim() >= 2 and tensor.is_floating_point():
                tensor[torch.rand(tensor.shape, generator=generator) < share] = 0.0
    return network


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet-basic"])
def test_a_sparse_network_loads_back_bit_for_bit_from_a_smaller_file(name, tmp_path):
    network = sparse_network(name)
    save(network, tmp_path / "sparse")
    save(zoo.build(name, dtype=torch.float32), tmp_path / "dense")
    loaded = load(str(tmp_path / "sparse"), tokens=zoo.TOKENS)
    first, second = loaded.module.state_dict(), network.module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(bits(first[key]), bits(second[key])) for key in first)
    for a, b in zip(zoo.outputs(loaded, network.inputs), zoo.outputs(network), strict=True):
        assert torch.equal(a, b)
    sizes = {run: (tmp_path / run / "model.safetensors").stat().st_size for run in ("sparse", "dense")}
    # 70 % zeros leave 30 % of the numbers and a bit per place; biases, norms and headers are a few per cent here
    assert sizes["sparse"] < 0.5 * sizes["dense"]
    for run, each in (("sparse", network), ("dense", zoo.build(name, dtype=torch.float32))):
        reading = SizeOnDisk().read(each).value
        assert sizes[run] <= reading <= sizes[run] + 320 * len(second)


def test_an_older_file_without_a_list_of_packed_tensors_loads(tmp_path):
    save(zoo.build("bert", dtype=torch.float32), tmp_path / "model")
    path = tmp_path / "model" / "apportion.json"
    fields = json.loads(path.read_text())
    assert fields.pop("packed") == []
    assert fields.pop("ranks") == {}
    path.write_text(json.dumps(fields))
    load(str(tmp_path / "model"), tokens=8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save(sparse_network(), folder)
    return folder


WEIGHT = f"{DENSE}.weight"


def flip(state):
    state[f"{WEIGHT}{PLACES}"][0] ^= 0xFF


def shorten(state):
    state[f"{WEIGHT}{NUMBERS}"] = state[f"{WEIGHT}{NUMBERS}"][:-1].clone()


def lengthen(state):
    state[f"{WEIGHT}{NUMBERS}"] = torch.ones(10**5)


def narrow(state):
    state[f"{WEIGHT}{PLACES}"] = state[f"{WEIGHT}{PLACES}"][:-1].clone()


def lose(state):
    del state[f"{WEIGHT}{NUMBERS}"]


def double(state):
    state[WEIGHT] = torch.zeros(32, 48)


def halve(state):
    state[f"{WEIGHT}{NUMBERS}"] = state[f"{WEIGHT}{NUMBERS}"].half()


@pytest.mark.parametrize("tamper", [flip, shorten, lengthen, narrow, lose, double, halve])
def test_packed_tensors_that_were_tampered_with_are_refused(tamper, original, tmp_path):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    state = load_file(folder / "model.safetensors")
    tamper(state)
    save_file(state, folder / "model.safetensors")
    with zoo.refused(str(folder), WEIGHT):
        load(str(folder), tokens=8)


@pytest.mark.parametrize("packed", [7, [7], {"a": 1}, ["nope"], [f"{DENSE}.bias"], None, []])
def test_a_list_of_packed_tensors_that_was_tampered_with_is_refused(packed, original, tmp_path):
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    zoo.change_json(folder / "apportion.json", packed=packed)
    with zoo.refused(str(folder)):
        load(str(folder), tokens=8)
