"""Low rank: the best on the layer's own outputs, saved and sliced like the layer it stands for."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.methods.compress.networks import Networks
from tests.models import zoo
from torch import nn

from apportion.core.knob import Choice
from apportion.device.meters import FlopCount, ParameterCount
from apportion.errors import KnobError
from apportion.methods.compress.importance import CRITERIA, importance
from apportion.methods.compress.lowrank import LowRank, factor, factorable, lowrank_knobs, rank_at
from apportion.methods.compress.rows import observe
from apportion.models import Partition, load, mask, save, slice_network
from apportion.models.factored import Factored, break_even, factored, fill, matrix, replace_layer, work_shares
from apportion.tasks.batches import Examples
from apportion.testing.suites import RuleSuite

DENSE = "encoder.layer.1.output.dense"  # 48 inputs, 32 outputs, a bias
# an architecture, one of its layers, and the rank to give it; 1x1, 3x3 and strided convolutions among them
LAYERS = {
    "bert": (DENSE, 8),
    "gpt2": ("transformer.h.1.mlp.c_proj", 8),
    "llama": ("model.layers.0.mlp.down_proj", 8),
    "resnet-basic": ("resnet.encoder.stages.1.layers.0.layer.0.convolution", 8),
    "mobilenetv2": ("mobilenet_v2.layer.1.expand_1x1.convolution", 4),
    "vgg": ("conv2", 8),
}


def examples_of(network, *, seed=5, num_batches=2):
    name = network.origin.ref
    batches = tuple(zoo.inputs_for(name, seed=seed + i) for i in range(num_batches))
    return Examples(batches, "noise")


def outputs_of(network, name, examples):
    """What a layer writes, as rows."""
    seen = []
    observe(network, examples, [name], lambda _name, _x, y: seen.append(y))
    return torch.cat(seen)


def output_error(network, changed, name, examples):
    """Mean square by which a layer's own outputs differ; all layers before it are the same in both."""
    difference = outputs_of(network, name, examples) - outputs_of(changed, name, examples)
    return difference.square().sum(1).mean().item()


def plain_svd(network, name, rank):
    """The same layer cut by a plain singular value decomposition, blind to the data."""
    module = copy.deepcopy(network.module)
    layer = module.get_submodule(name)
    u, s, v = torch.linalg.svd(matrix(layer), full_matrices=False)
    pair = factored(layer, rank)
    bias = layer.bias.detach() if layer.bias is not None else None
    fill(pair, s[:rank, None] * v[:rank], u[:, :rank], bias)
    replace_layer(module, name, pair)
    return network.replace(module=module)


# ---------------------------------------------------------------- what is computed


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_least_that_a_rank_can_lose_of_a_layer_s_outputs(name):
    network = zoo.network(name)
    (layer, rank), examples = LAYERS[name], examples_of(network)
    changed = factor(network, layer, rank, examples)
    y_RO = outputs_of(network, layer, examples)
    if network.module.get_submodule(layer).bias is not None:
        y_RO = y_RO - y_RO.mean(0)
    least = torch.linalg.svdvals(y_RO)[rank:].square().sum().item() / len(y_RO)  # Eckart-Young on the outputs
    found = output_error(network, changed, layer, examples)
    total = y_RO.square().sum(1).mean().item()
    assert least > 1e-6 * total  # there was something to lose
    assert least - 1e-9 * total <= found <= least + 1e-5 * total  # directions not seen weigh 1e-6
    assert found < output_error(network, plain_svd(network, layer, rank), layer, examples)


def test_directions_that_no_example_shows_go_by_their_weight():
    """With one example the data say one direction; the others must be those of the plain decomposition."""
    module = nn.Sequential(nn.Linear(12, 12, bias=False), nn.ReLU(), nn.Linear(12, 3)).double().eval()
    zoo.enliven(module, seed=3)
    network = zoo.wrap(module, {"0": torch.zeros(1, 12, dtype=torch.float64)})
    silent = Examples(({"0": torch.zeros(1, 12, dtype=torch.float64)},), "silence")
    changed = factor(network, "0", 5, silent).module.get_submodule("0")
    u, s, v = torch.linalg.svd(matrix(module[0]), full_matrices=False)
    torch.testing.assert_close(matrix(changed), u[:, :5] * s[:5] @ v[:5])


def test_a_bias_takes_over_the_mean_of_what_is_lost():
    network = zoo.network("bert")
    examples = examples_of(network)
    changed = factor(network, DENSE, 4, examples)
    before, after = (outputs_of(each, DENSE, examples) for each in (network, changed))
    torch.testing.assert_close(before.mean(0), after.mean(0))


def test_factoring_twice_is_factoring_once():
    network = zoo.network("bert")
    examples = examples_of(network)
    twice = factor(factor(network, DENSE, 12, examples), DENSE, 6, examples)
    once = factor(network, DENSE, 6, examples)
    assert twice.edits == once.edits
    assert zoo.largest_difference(zoo.outputs(twice), zoo.outputs(once)) < 1e-6


# ---------------------------------------------------------------- knobs


def test_knobs_are_shares_of_the_break_even_rank_that_save_what_they_say():
    network = zoo.network("bert")
    knobs = {knob.name: knob for knob in lowrank_knobs(network)}
    assert set(knobs) == {
        f"lowrank.{name}" for name, layer in network.module.named_modules() if type(layer) is nn.Linear
    }
    knob, rule = knobs[f"lowrank.{DENSE}"], LowRank(examples_of(network))
    dense = network.module.get_submodule(DENSE)
    whole, flops = ParameterCount().read(network).value, FlopCount().read(network).value
    assert knob.dearest == 1.0
    last = 0
    for share in knob.values[:-1]:
        changed = rule.apply(network, knob, share)
        rank = changed.edits.ranks[DENSE]
        assert last < rank <= share * break_even(dense)
        last = rank
        saved = whole - ParameterCount().read(changed).value
        assert saved == 32 * 48 - rank * (32 + 48)
        assert work_shares(changed.module) == {DENSE: pytest.approx(1 - saved / (32 * 48))}
        tokens = zoo.TOKENS * 2
        assert flops - FlopCount().read(changed).value == 2 * tokens * saved
    assert rule.apply(network, knob, 1.0) is network


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(384, 384), (1536, 384), (64, 48), (7, 3)])
def test_ranks_are_multiples_that_fit_the_hardware(num_inputs, num_outputs):
    layer = nn.Linear(num_inputs, num_outputs)
    ranks = [rank_at(layer, share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
    assert ranks == sorted(ranks)
    if break_even(layer) >= 64:
        assert all(rank % 16 == 0 for rank in ranks)
    assert all(0 < rank < break_even(layer) for rank in ranks)


def test_a_layer_s_share_is_of_the_layer_as_it_stands():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    rule, knob = LowRank(examples_of(network)), Choice(f"lowrank.{DENSE}", (0.5, 1.0))
    name = "encoder.layer.1.intermediate.dense"
    thin = slice_network(network, partition, {name: tuple(range(8))})
    changed = rule.apply(thin, knob, 0.5)
    assert changed.edits.ranks[DENSE] * (8 + 32) <= 0.5 * 8 * 32


def test_a_rank_that_pruning_left_below_the_next_share_stays():
    """A share of 0.48 rounds down to rank 16; once pruned, ranks are finer, and the smaller share 0.4 would be 24."""
    module = zoo.enliven(nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()), seed=0)
    network = zoo.wrap(module.double().eval(), {"0": torch.randn(4, 8, dtype=torch.float64)})
    rule = LowRank(Examples((dict(network.inputs),), "noise"))
    knob = Choice("lowrank.2", (0.4, 0.48, 1.0))
    factored_once = rule.apply(network, knob, 0.48)
    partition = Partition.of(network)
    pruned = slice_network(factored_once, partition, {"0": tuple(range(113))})
    assert rank_at(pruned.module[2], 0.4) > pruned.module[2].rank == 16
    assert rule.apply(pruned, knob, 0.4) is pruned


def test_a_layer_that_went_with_its_block_is_left():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    without = slice_network(network, partition, {"encoder.layer.blocks": (0, 2)})
    rule, knob = LowRank(examples_of(network)), Choice(f"lowrank.{DENSE}", (0.5, 1.0))
    assert rule.apply(without, knob, 0.5) is without


class LooksAtWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.called = nn.Linear(8, 8), nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.called(self.seen(x.to(self.seen.weight.dtype)))


def test_layers_that_are_looked_at_or_tied_or_never_run_are_not_offered():
    assert factorable(zoo.wrap(LooksAtWeight(), {"0": torch.zeros(1, 8)})) == ["called"]
    assert "embeddings.patch_embeddings.projection" not in factorable(zoo.network("vit"))  # asks for the weight's type
    assert "lm_head" not in factorable(zoo.network("gpt2"))  # shares its weight with the embedding


def test_what_makes_no_sense_is_refused():
    network = zoo.network("bert")
    examples = examples_of(network)
    with zoo.refused("between 0 and 1", error=KnobError):
        lowrank_knobs(network, shares=(0.5, 1.5))
    for rank in (0, 20):
        with zoo.refused(DENSE, f"rank {rank}", "1 to 19"):
            factor(network, DENSE, rank, examples)
    knob, rule = Choice(f"lowrank.{DENSE}", (0.25, 0.5, 1.0)), LowRank(examples)
    low = rule.apply(network, knob, 0.25)
    assert rule.apply(low, knob, 0.5) is low
    with zoo.refused(DENSE, "can't rise", error=KnobError):
        rule.apply(low, knob, 1.0)


# ---------------------------------------------------------------- saved, loaded, sliced


def single(name):
    """A network in single precision with some layers factored."""
    network = zoo.build(name, dtype=torch.float32)
    batch = zoo.inputs_for(name, seed=5, dtype=torch.float32)
    knobs = lowrank_knobs(network, shares=(0.5,))
    rule = LowRank(Examples((batch,), "noise"))
    for knob in knobs[:: max(1, len(knobs) // 6)]:
        network = rule.apply(network, knob, 0.5)
    assert network.edits.ranks
    return network


def assert_same(loaded, written):
    first, second = loaded.module.state_dict(), written.module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert loaded.edits == written.edits
    for a, b in zip(zoo.outputs(loaded, written.inputs), zoo.outputs(written), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet-basic", "mobilenetv2", "vit"])
@pytest.mark.parametrize("order", ["factor", "slice then factor", "factor then slice"])
def test_it_loads_back_bit_for_bit(name, order, tmp_path):
    partition = zoo.partition(name)
    keep = zoo.random_keep(partition, seed=3)
    network = zoo.build(name, dtype=torch.float32)
    if order == "slice then factor":
        network = slice_network(network, partition, keep)
    examples = Examples((zoo.inputs_for(name, seed=5, dtype=torch.float32),), "noise")
    knobs = lowrank_knobs(network, shares=(0.5,))
    for knob in knobs[:: max(1, len(knobs) // 6)]:
        network = LowRank(examples).apply(network, knob, 0.5)
    assert network.edits.ranks
    if order == "factor then slice":
        network = slice_network(network, partition, keep)
    save(network, tmp_path / "model")
    assert_same(load(str(tmp_path / "model"), tokens=zoo.TOKENS), network)


def test_a_factory_s_network_loads_back(tmp_path):
    factory = f"{zoo.__name__}:mlp_factory"
    network = load(factory)
    network = factor(network, "0", 3, Examples((dict(network.inputs),), "ones"))
    save(network, tmp_path / "model")
    assert_same(load(str(tmp_path / "model"), factory=factory), network)


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet-basic", "unet"])
def test_a_factored_network_is_sliced_as_it_is_masked(name):
    network, partition = zoo.network(name), zoo.partition(name)
    for knob in lowrank_knobs(network, shares=(0.5,)):
        network = LowRank(examples_of(network)).apply(network, knob, 0.5)
    keep = zoo.random_keep(partition, seed=4)
    masked, sliced = mask(network, partition, keep), slice_network(network, partition, keep)
    assert zoo.largest_difference(zoo.outputs(sliced), zoo.outputs(masked)) < zoo.tolerance(name)
    assert zoo.num_parameters(sliced) < zoo.num_parameters(masked)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_units_of_a_factored_network_have_an_importance(criterion):
    network, partition = zoo.network("bert"), zoo.partition("bert")
    examples = examples_of(network)
    batch = {key: torch.cat([one[key] for one in examples.batches]) for key in network.inputs}
    network = factor(network, DENSE, 18, examples)
    scores = importance(network, partition, criterion, Examples((batch,), "noise"))
    assert (scores["encoder.layer.1.intermediate.dense"] > 0).all()


def test_a_factored_network_traced_again_offers_its_ranks(tmp_path):
    network = single("bert")
    partition = Partition.of(network)
    name = next(iter(network.edits.ranks))
    inner = partition[f"{name}.down"]
    assert inner.num_units == network.edits.ranks[name]
    thinner = slice_network(network, partition, {inner.name: (1, 2)})
    assert thinner.module.get_submodule(name).rank == 2
    save(thinner, tmp_path / "model")
    assert_same(load(str(tmp_path / "model"), tokens=zoo.TOKENS), thinner)
    with zoo.refused(name, "instead"):
        factor(thinner, name, 1, Examples((dict(network.inputs),), "inputs"))
    assert not any(knob.name.startswith(f"lowrank.{name}") for knob in lowrank_knobs(thinner))


def test_a_partition_traced_before_another_cut_is_refused():
    network, before = zoo.network("bert"), zoo.partition("bert")
    name = "encoder.layer.1.intermediate.dense"
    network = factor(network, name, 8, examples_of(network))
    traced = Partition.of(network)
    cut = slice_network(network, traced, {f"{name}.up": tuple(range(16))})
    with zoo.refused(name, "16", "48", "trace the network again"):
        slice_network(cut, before, {name: tuple(range(8))})


class TestLowRank(Networks, RuleSuite):
    @pytest.fixture
    def model(self):
        return zoo.network("bert")

    @pytest.fixture
    def rule(self, model):
        return LowRank(examples_of(model))

    @pytest.fixture
    def knob(self):
        return Choice(f"lowrank.{DENSE}", (0.25, 0.5, 1.0))

    def test_the_layer_is_replaced_by_a_pair(self, rule, knob, model):
        assert isinstance(rule.apply(model, knob, 0.5).module.get_submodule(DENSE), Factored)

    def test_random_numbers_drawn_elsewhere_stay_the_same(self, rule, knob, model):
        before = torch.random.get_rng_state()
        rule.apply(model, knob, 0.5)
        assert torch.equal(torch.random.get_rng_state(), before)
