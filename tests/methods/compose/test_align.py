"""A copy whose heads, neurons and channels were shuffled aligns back exactly, and mixing it then does no harm."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from tests.models import zoo

from apportion.errors import ModelError
from apportion.methods.compose.align import align, align_folders, permute_units

NAMES = ("bert", "vit", "gpt2", "llama", "resnet-basic", "mobilenetv2", "fused-by-part", "vgg")


def shuffled(network, partition, seed=0):
    """A copy with the units of every part in random order."""
    generator = torch.Generator().manual_seed(seed)
    other = network.replace(module=copy.deepcopy(network.module))
    for part in partition:
        if part.kind != "blocks":
            permute_units(other.module, part, torch.randperm(part.num_units, generator=generator))
    return other


@pytest.mark.parametrize("name", NAMES)
def test_shuffling_changes_weights_and_not_the_function(name):
    network, partition = zoo.network(name), zoo.partition(name)
    other = shuffled(network, partition)
    assert zoo.largest_difference(zoo.outputs(network), zoo.outputs(other)) <= zoo.tolerance(name)
    pairs = zip(network.module.state_dict().values(), other.module.state_dict().values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("by", ["weights", "activations"])
@pytest.mark.parametrize("name", NAMES)
def test_a_permuted_copy_aligns_back_exactly(name, by):
    network, partition = zoo.network(name), zoo.partition(name)
    other = shuffled(network, partition)
    align(network, other, partition, by=by, batches=[zoo.inputs_for(name, seed=seed) for seed in range(12)])
    for key, tensor in network.module.state_dict().items():
        assert torch.equal(other.module.state_dict()[key], tensor), key


def test_alignment_rescues_the_average_of_a_noisy_permuted_copy():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    other = shuffled(network, partition)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, dtype=parameter.dtype)

    def average_error():
        mixed = copy.deepcopy(network.module)
        mixed.load_state_dict(
            {
                key: (tensor + other.module.state_dict()[key]) / 2 if tensor.is_floating_point() else tensor
                for key, tensor in network.module.state_dict().items()
            }
        )
        return zoo.largest_difference(zoo.outputs(network), zoo.outputs(network.replace(module=mixed)))

    before = average_error()
    orders = align(network, other, partition)
    assert any(list(order) != sorted(order) for order in orders.values())
    assert average_error() < 0.3 * before


def test_folders_are_aligned_on_disk(tmp_path):
    network = zoo.build("bert", dtype=torch.float32)
    network.module.save_pretrained(tmp_path / "one")
    shuffled(network, zoo.partition("bert")).module.save_pretrained(tmp_path / "other")
    result = align_folders(str(tmp_path / "one"), str(tmp_path / "other"), tmp_path / "aligned")
    assert result["distance_before"] > 0.1
    assert result["distance_after"] == 0
    first, again = (
        load_file(tmp_path / "one" / "model.safetensors"),
        load_file(tmp_path / "aligned" / "model.safetensors"),
    )
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name


def test_a_copy_stays_as_it_is():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    orders = align(network, network.replace(module=copy.deepcopy(network.module)), partition)
    assert all(list(order) == sorted(order) for order in orders.values())


def test_activations_need_inputs():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    with pytest.raises(ModelError, match="needs inputs"):
        align(network, network, partition, by="activations")
