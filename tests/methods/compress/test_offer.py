"""What rules offer: a knob for each thing that can be decided here, and a line for what can't."""

from __future__ import annotations

import pytest
import torch
from tests.methods.compress.test_repair import examples_of
from tests.models import zoo

from apportion.core.budget import Budget
from apportion.core.rule import check_rules
from apportion.device.target import find_target
from apportion.methods.compress.offer import FINER, cuts, precisions, thinnings
from apportion.methods.compress.quantise import Quantise
from apportion.methods.compress.rulenames import parse_rules
from apportion.methods.compress.rundir import FitConfig
from apportion.models.partition import Partition

TORCH = find_target("torch-cpu-1t")


@pytest.fixture(scope="module")
def vit():
    network = zoo.build("vit", dtype=torch.float32)
    return network, Partition.of(network), examples_of(network, torch.Generator().manual_seed(0), count=16)


def names(offer):
    check_rules(offer.knobs, offer.rules)
    return {knob.name.partition(".")[0] for knob in offer.knobs}


def test_precision_is_one_knob_or_one_for_every_block(vit):
    network, partition, examples = vit
    rule = Quantise(examples)

    def offered(num_mixed, *allowed):
        return precisions(network, partition, rule, num_mixed, frozenset(allowed), "here")

    (knob,) = offered(8, "quantise").knobs
    assert knob.name == "quantise"
    mixed = offered(8, "quantise", "mixed")
    blocks = [name for module in partition for name, _ in module.blocks]
    assert [knob.name for knob in mixed.knobs] == [f"quantise.{name}" for name in (*blocks, "rest")]
    assert names(mixed) == {"quantise"}
    plain = offered(0, "quantise", "mixed")
    assert [knob.values for knob in plain.knobs] == [("int8", "fp32")]
    assert "here can't leave" in plain.left_out[0]


def test_cuts_are_by_module_or_across(vit):
    network, partition, examples = vit
    config = FitConfig(model="x", budget="60%", num_steps=3)

    def offered(rules):
        return cuts(network, partition, examples, config, parse_rules(rules))

    assert names(offered("prune,depth")) == {"prune", "depth"}
    (knob,) = offered("prune-all").knobs
    assert knob.name == "prune-all"
    assert 3 < len(knob.values) <= FINER * 3 + 1  # finer than a module's own
    assert offered("repair").knobs == ()


@pytest.mark.parametrize(
    ("budget", "expected", "told"),
    [("latency<=60%", {"lowrank", "tokens"}, "no latency"), ("size<=60%", {"lowrank", "tokens", "sparse"}, None)],
)
def test_zeros_are_offered_for_bytes_alone(vit, budget, expected, told):
    network, partition, examples = vit
    for rule in ("sparse", "sparse-2:4"):
        allowed = parse_rules(f"lowrank,tokens,{rule}")
        offer = thinnings(network, partition, examples, Budget.parse(budget), allowed, TORCH)
        assert names(offer) == expected
        assert [told in line for line in offer.left_out] == ([True] if told else [])
        values = {knob.values for knob in offer.knobs if knob.name.startswith("sparse.")}
        assert not told or not values
        assert told or (values == {("2:4", "4:4")}) == (rule == "sparse-2:4")
        dense = thinnings(network, partition, examples, Budget.parse(budget), allowed, find_target("ort-cpu-1t"))
        assert names(dense) == {"lowrank", "tokens"}
        assert "ort-cpu-1t opens hold zeros" in dense.left_out[0]


def test_tokens_that_can_not_be_merged_are_told(vit):
    _, _, examples = vit
    network = zoo.build("vit", dtype=torch.float32).replace(readout="token-logits")
    offer = thinnings(network, Partition.of(network), examples, Budget.parse("60%"), frozenset({"tokens"}), TORCH)
    assert offer.knobs == ()
    assert "tokens" in offer.left_out[0]
