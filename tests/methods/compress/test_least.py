"""The floor: what the smallest network costs with the knobs there are, and nothing where that is not known."""

from __future__ import annotations

import pytest
import torch
from tests.models import zoo

from apportion.core.budget import Budget
from apportion.core.knob import Choice
from apportion.core.meter import Reading
from apportion.cost.calibrate import Anchored
from apportion.errors import InfeasibleError
from apportion.methods.compress.bench import static_meters
from apportion.methods.compress.least import clock_floor, counted_floor, refuse_below
from apportion.methods.compress.lowrank import lowrank_knobs
from apportion.methods.compress.prune import global_knob, prune_knobs
from apportion.methods.compress.quantise import quantise_knob
from apportion.methods.compress.tokens import Depth, depth_knobs
from apportion.models.cut import slice_network
from apportion.models.network import Int8
from apportion.models.partition import Partition

METERS = static_meters()
TOKENS = Choice("tokens", (4, 17), granularity="global")


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    network = zoo.build("vit")
    return network, Partition.of(network)


def read(network):
    return {key: meter.read(network).value for key, meter in METERS.items()}


def floor(vit, knobs, int8=None):
    return {key: reading.value for key, reading in counted_floor(*vit, knobs, METERS, int8).items()}


def test_without_knobs_that_cut_the_floor_is_the_network(vit):
    assert floor(vit, [quantise_knob()]) == read(vit[0])
    in_int8 = floor(vit, [quantise_knob()], Int8())
    assert in_int8["size"] < read(vit[0])["size"]
    assert in_int8["params"] == read(vit[0])["params"]


@pytest.mark.parametrize("whole", [False, True], ids=["modules", "all"])
def test_with_pruning_it_is_every_module_at_its_least(vit, whole):
    network, partition = vit
    sizes = {module.name: module.sizes()[0] for module in partition}
    knobs = [global_knob({0.5: sizes, 1.0: {}})] if whole else prune_knobs(partition)
    assert floor(vit, knobs) == read(slice_network(network, partition, partition.keep(sizes)))


def test_with_depth_alone_it_is_the_first_block(vit):
    network, partition = vit
    (knob,) = depth_knobs(partition)
    assert floor(vit, [knob]) == read(Depth(partition).apply(network, knob, knob.cheapest))


def test_what_is_not_known_is_not_refused(vit):
    network, partition = vit
    assert set(floor(vit, [*prune_knobs(partition), *lowrank_knobs(network)]).values()) == {0.0}
    merged = floor(vit, [*prune_knobs(partition), TOKENS])
    assert merged["flops"] == 0
    assert merged["params"] == floor(vit, prune_knobs(partition))["params"]
    zeros = floor(vit, [Choice("sparse.a", (0.9, 0.0))])
    assert zeros == read(network) | {"size": 0.0}


def anchored(baseline_ms, floor_ms):
    return Anchored(None, None, Reading(value=baseline_ms, unit="ms"), Reading(value=floor_ms, unit="ms"))


def test_the_clocks_floor_is_one_that_the_knobs_lead_to():
    fp32, int8 = anchored(10.0, 3.0), anchored(6.0, 4.0)
    prune, lowrank = Choice("prune.a", (1, 2)), Choice("lowrank.a", (0.5, 1.0))
    assert clock_floor([prune], [fp32, int8]).value == 3.0
    assert clock_floor([Choice("prune-all", (0.5, 1.0))], [fp32]).value == 3.0
    assert clock_floor([Choice("depth.a", (1, 2))], [fp32]).value == 3.0
    assert clock_floor([quantise_knob()], [fp32, int8]).value == 6.0  # nothing is pruned
    assert clock_floor([prune, TOKENS], [fp32]).value == 0.0  # tokens go lower than anything measured
    assert clock_floor([prune, lowrank], [fp32]).value == 0.0


def test_a_limit_under_the_floor_is_refused_with_it():
    baseline, floor = {"params": Reading(value=100.0, unit="")}, {"params": Reading(value=40.0, unit="")}
    refuse_below(floor, Budget.parse("params<=40"), baseline)
    with pytest.raises(InfeasibleError, match="40% of the original"):
        refuse_below(floor, Budget.parse("params<=39"), baseline)
