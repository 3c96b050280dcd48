"""Importance scores against definitions: magnitude by hand, Taylor by removing units for real."""

from __future__ import annotations

import copy

import pytest
import torch

from apportion.core.knob import Choice
from apportion.methods.compress.importance import magnitude, order_by_importance, self_loss, taylor
from apportion.methods.compress.prune import Prune, prune_knobs
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples
from apportion.testing.suites import RuleSuite


@pytest.fixture(scope="module")
def network():
    return load("tests.factories:small_cnn")


@pytest.fixture(scope="module")
def partition(network):
    return Partition.of(network)


@pytest.fixture(scope="module")
def examples():
    generator = torch.Generator().manual_seed(0)
    return Examples(tuple({"0": torch.randn(16, 3, 16, 16, generator=generator)} for _ in range(2)), "noise")


def test_magnitude_is_the_norm_of_what_reads_and_writes_a_channel(network, partition):
    block = network.module.blocks[0]
    written = block.first.weight.detach().square().mean((1, 2, 3)).sqrt()
    read = block.second.weight.detach().square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(magnitude(network, partition)["blocks.0.first"], written + read)


def test_taylor_is_the_slope_of_the_loss_when_a_unit_is_scaled(network, partition, examples):
    """The gradient at a gate of one, against a central difference made by scaling the weights themselves."""
    scores = taylor(network, partition, examples)["blocks.1.first"]
    step = 1e-2
    weight = network.module.blocks[1].second.weight
    for unit in (0, 17, 63):
        slopes = []
        for batch in examples.batches:
            losses = []
            for scale in (1 + step, 1 - step):
                kept = weight.detach().clone()
                with torch.no_grad():
                    weight[:, unit] *= scale
                    losses.append(self_loss(network, batch).item())
                    weight.copy_(kept)
            slopes.append(abs(losses[0] - losses[1]) / (2 * step))
        # float32 losses of order one leave about 1e-5 of noise in the difference quotient
        assert abs(scores[unit].item() - sum(slopes) / 2) < 3e-5 + 0.02 * scores[unit].item()


def test_a_dead_channel_comes_last(network, partition, examples):
    module = copy.deepcopy(network.module)
    with torch.no_grad():
        module.blocks[0].first.weight[5] = 0
        module.blocks[0].first.bias[5] = 0
    dead = network.replace(module=module)
    ordered = order_by_importance(dead, partition, "taylor", examples)
    assert ordered["blocks.0.first"].order[-1] == 5


def test_there_is_a_knob_for_every_module_from_smallest_to_whole(partition):
    knobs = {knob.name: knob for knob in prune_knobs(partition, num_steps=4)}
    assert set(knobs) == {f"prune.{module.name}" for module in partition}
    assert knobs["prune.blocks.0.first"].values[-1] == 64
    assert all(value % 8 == 0 for value in knobs["prune.blocks.0.first"].values)
    assert len(knobs["prune.blocks.0.first"].values) == 5


class TestPrune(RuleSuite):
    @pytest.fixture
    def rule(self, partition):
        return Prune(partition)

    @pytest.fixture
    def knob(self):
        return Choice("prune.blocks.0.first", (16, 64))

    @pytest.fixture
    def model(self, network):
        return network

    def snapshot(self, model):
        return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}

    def same(self, one, other):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
