"""The promises of rules that tests of their own don't state: quantising, merging tokens, leaving out blocks."""

from __future__ import annotations

import pytest
import torch
from tests.methods.compress.networks import Networks
from tests.methods.compress.test_repair import examples_of
from tests.models import zoo

from apportion.core.knob import Choice
from apportion.methods.compress.quantise import Quantise, QuantiseParts, mixed_knobs, precision_groups, quantise_knob
from apportion.methods.compress.tokens import Depth, Tokens, depth_knobs
from apportion.models.network import Int8
from apportion.models.partition import Partition
from apportion.models.quantise import quantised_layers, simulate
from apportion.testing.suites import RuleSuite


@pytest.fixture(scope="module")
def vit():
    return zoo.build("vit", dtype=torch.float32)


@pytest.fixture(scope="module")
def partition(vit):
    return Partition.of(vit)


class _OnVit(Networks, RuleSuite):
    __test__ = False

    @pytest.fixture
    def model(self, vit):
        return vit


class TestQuantise(_OnVit):
    __test__ = True

    @pytest.fixture
    def rule(self, vit):
        order = [name for name, layer in vit.module.named_modules() if isinstance(layer, torch.nn.Linear)]
        return Quantise(examples_of(vit, torch.Generator().manual_seed(0), count=16), order=tuple(order))

    @pytest.fixture
    def knob(self):
        return quantise_knob(8)


class TestQuantiseParts(_OnVit):
    __test__ = True

    @pytest.fixture
    def rule(self, vit, partition):
        examples = examples_of(vit, torch.Generator().manual_seed(0), count=16)
        return QuantiseParts(Quantise(examples), precision_groups(vit, partition, Int8()))

    @pytest.fixture
    def knob(self, rule):
        return mixed_knobs(rule.groups)[0]

    def test_every_layer_is_in_one_group_and_goes_with_it(self, rule, model):
        layers = set(quantised_layers(model))
        knobs = mixed_knobs(rule.groups)
        assert [knob.name for knob in knobs][-1] == "quantise.rest"
        network, before = model, set()
        for knob in knobs:
            network = rule.apply(network, knob, "int8")
            covered = set(quantised_layers(network))
            assert covered > before
            before = covered
        assert before == layers
        assert network.int8.in_float == ()
        for knob in knobs:
            network = rule.apply(network, knob, "fp32")
        assert network.precision == "fp32"

    def test_a_block_in_int8_rounds_itself_and_nothing_else(self, rule, knob, model):
        run = simulate(rule.apply(model, knob, "int8")).module.state_dict()
        block = knob.name.removeprefix("quantise.")
        rounded = {name for name, tensor in model.module.state_dict().items() if not torch.equal(tensor, run[name])}
        assert rounded
        assert all(name.startswith(f"{block}.") for name in rounded)


class TestTokens(_OnVit):
    __test__ = True

    @pytest.fixture
    def rule(self, partition):
        return Tokens(partition, 17)

    @pytest.fixture
    def knob(self):
        return Choice("tokens", (4, 8, 17), granularity="global")


class TestDepth(_OnVit):
    __test__ = True

    @pytest.fixture
    def rule(self, partition):
        return Depth(partition)

    @pytest.fixture
    def knob(self, partition):
        (knob,) = depth_knobs(partition)
        return knob
