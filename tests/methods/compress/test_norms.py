"""Batch norms: statistics follow a network that was cut, and training keeps them together with the weights."""

from __future__ import annotations

import pytest
import torch
from tests.methods.compress.test_repair import examples_of
from tests.models import zoo
from torch import nn

from apportion.core.knob import Choice
from apportion.methods.compress.norms import batch_norms, renormalised
from apportion.methods.compress.prune import Prune
from apportion.methods.compress.repair import Distil, DistilOptions, repair_knob
from apportion.models.network import Network, Origin, forward
from apportion.models.partition import Partition


@pytest.fixture
def network():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
    ).eval()
    inputs = {"0": torch.zeros(1, 3, 8, 8)}
    return Network(module=module, inputs=inputs, origin=Origin(ref="toy"), readout="logits")


def test_statistics_become_those_of_the_examples(network, generator):
    examples = examples_of(network, generator)
    was = {name: tensor.clone() for name, tensor in network.module.state_dict().items()}
    found = renormalised(network, examples)
    with torch.no_grad():
        before = torch.cat([network.module[0](batch["0"]) for batch in examples.batches])
    torch.testing.assert_close(found.module[1].running_mean, before.mean((0, 2, 3)))
    assert not found.module[1].training
    assert found.module[1].momentum == 0.1
    for name, tensor in network.module.state_dict().items():
        assert torch.equal(tensor, was[name])  # the rule is pure


def test_a_network_without_batch_norms_is_returned_as_it_is(generator):
    network = zoo.build("bert")
    assert not batch_norms(network.module)
    assert renormalised(network, examples_of(network, generator)) is network


def test_pruning_takes_statistics_anew_where_it_is_given_examples(network, generator):
    examples = examples_of(network, generator)
    partition = Partition.of(network)
    knob = Choice(f"prune.{partition.modules[0].name}", partition.modules[0].sizes())
    plain, anew = (Prune(partition, given).apply(network, knob, 8) for given in (None, examples))
    assert torch.equal(plain.module[1].running_mean, torch.zeros(8))
    with torch.no_grad():
        output = torch.cat([anew.module[:2](batch["0"]) for batch in examples.batches])
    torch.testing.assert_close(output.mean((0, 2, 3)), torch.zeros(8), atol=1e-4, rtol=0)


def test_repair_follows_the_batches_and_keeps_statistics_in_its_folder(network, generator, tmp_path):
    examples = examples_of(network, generator)
    teacher = renormalised(network, examples)
    options = DistilOptions(steps=20, batch=16)
    first = Distil(teacher, examples, (), options, tmp_path).apply(network, repair_knob(1), 0)
    assert not torch.equal(first.module[1].running_mean, network.module[1].running_mean)
    kept = Distil(teacher, examples, (), options, tmp_path)
    kept.train = None  # must not be called
    again = kept.apply(network, repair_knob(1), 0)
    batch = examples.batches[0]
    assert torch.equal(forward(first.module, batch), forward(again.module, batch))
