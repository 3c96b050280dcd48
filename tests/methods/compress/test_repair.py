"""Repair: distillation brings a cut network back towards the original, the same each time, and never trains twice."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import zoo

from apportion.methods.compress.repair import Distil, DistilOptions, answer_loss, repair_knob
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples

OPTIONS = DistilOptions(steps=40, learning_rate=1e-3, batch=16)


def examples_of(network, generator, count=96):
    batches = []
    for _ in range(count // 16):
        batch = {}
        for name, like in network.inputs.items():
            shape = (16, *like.shape[1:])
            if like.is_floating_point():
                batch[name] = torch.randn(shape, generator=generator)
            elif name == "attention_mask":
                batch[name] = torch.ones(shape, dtype=torch.long)
            else:
                batch[name] = torch.randint(0, 50, shape, generator=generator)
        batches.append(batch)
    return Examples(tuple(batches), "noise")


@pytest.fixture(scope="module", params=["small-cnn", "bert", "gpt2"])
def cut(request):
    torch.manual_seed(0)
    network = load("tests.factories:small_cnn") if request.param == "small-cnn" else zoo.build(request.param)
    partition = Partition.of(network, multiple={"neurons": 4, "channels": 4})
    half = {m.name: min(m.sizes(), key=lambda size: abs(size - m.num_units / 2)) for m in partition}
    half = {name: size for name, size in half.items() if partition[name].kind != "blocks"}
    return network, partition, slice_network(network, partition, partition.keep(half))


def loss(teacher, student, examples):
    with torch.inference_mode():
        return sum(
            answer_loss(read_out(student, b), read_out(teacher, b), teacher.readout, b.get("attention_mask")).item()
            for b in examples.batches
        )


def test_distillation_brings_answers_back_on_examples_it_has_not_seen(cut, generator):
    network, partition, small = cut
    blocks = [name for module in partition for name, _ in module.blocks]
    rule = Distil(network, examples_of(network, generator), blocks, OPTIONS)
    unseen = examples_of(network, generator)
    before = {name: p.clone() for name, p in small.module.named_parameters()}
    repaired = rule.apply(small, repair_knob(1), 0)
    assert loss(network, repaired, unseen) < 0.8 * loss(network, small, unseen)
    assert repaired.edits == small.edits
    assert not repaired.module.training
    for name, parameter in small.module.named_parameters():
        assert torch.equal(parameter, before[name])  # the rule is pure
    assert all(not p.requires_grad for p in repaired.module.parameters())


def test_the_same_again_and_from_the_folder(cut, generator, tmp_path):
    network, _, small = cut
    training = examples_of(network, generator)
    first = Distil(network, training, (), OPTIONS, tmp_path).apply(small, repair_knob(1), 0)
    again = Distil(network, training, (), OPTIONS).apply(small, repair_knob(1), 0)
    kept = Distil(network, training, (), OPTIONS, tmp_path)
    kept.train = None  # must not be called
    from_folder = kept.apply(small, repair_knob(1), 0)
    for one, two, three in zip(*(n.module.parameters() for n in (first, again, from_folder)), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


def test_a_network_that_agrees_already_has_nothing_to_learn(generator):
    network = zoo.build("bert")
    training = examples_of(network, generator)
    repaired = Distil(network, training, (), DistilOptions(steps=5, batch=16)).apply(network, repair_knob(1), 0)
    assert loss(network, repaired, training) < 1e-3 * len(training.batches)


@pytest.mark.parametrize("readout", ["embedding", "logits", "token-logits"])
def test_the_loss_is_zero_at_the_teachers_answers_and_above_elsewhere(readout, generator):
    shape = (6, 4, 9) if readout == "token-logits" else (6, 9)
    target = torch.randn(shape, generator=generator)
    if readout == "embedding":
        target = torch.nn.functional.normalize(target, dim=-1)
    assert answer_loss(target, target, readout).item() == pytest.approx(0, abs=1e-6)
    other = torch.nn.functional.normalize(target + torch.randn(shape, generator=generator), dim=-1)
    assert answer_loss(other, target, readout).item() > 0.01


def test_zeros_stay_zero(generator):
    network = load("tests.factories:small_cnn")
    module = copy.deepcopy(network.module)
    with torch.no_grad():
        module.stem.weight[:, :, 0] = 0  # a third
    training = examples_of(network, generator)
    options = DistilOptions(steps=3, batch=16)
    repaired = Distil(network, training, (), options).apply(network.replace(module=module), repair_knob(1), 0)
    assert (repaired.module.stem.weight[:, :, 0] == 0).all()
    assert not torch.equal(repaired.module.stem.weight[:, :, 1], module.stem.weight[:, :, 1])
