"""Residual blocks are found and left out; caches and other blocks don't notice."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models import zoo
from torch import Tensor, nn
from torch.nn import functional

from apportion.models import Network, Partition, mask, slice_network
from apportion.models.skip import Skip, find_blocks, skip_blocks


def blocks_of(module: nn.Module, x: Tensor | None = None) -> dict[str, dict[str, int]]:
    if x is None:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return find_blocks(module.double().eval(), {"0": x})


class Residual(nn.Module):
    def __init__(self, *, num_outputs: int = 0, widen: int = 0) -> None:
        super().__init__()
        self.num_outputs, self.widen = num_outputs, widen
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        x = x + self.down(functional.relu(self.up(x)))
        return (x, *[x.sum()] * (self.num_outputs - 1)) if self.num_outputs else x


class Chain(nn.Module):
    """An embedding, a list of blocks, a head; understands blocks that return tuples."""

    def __init__(self, *blocks: nn.Module, times: int = 1, by_name: bool = False) -> None:
        super().__init__()
        self.embed, self.list, self.head = nn.Linear(6, 8), nn.ModuleList(blocks), nn.Linear(8, 3)
        self.times, self.by_name = times, by_name

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.times):
            for block in self.list:
                x = block(x=x) if self.by_name else block(x)
                x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


# ---------------------------------------------------------------- the stand-in


@pytest.mark.parametrize("num_outputs", [0, 1, 3])
def test_a_skip_returns_its_first_argument_in_the_form_of_the_block_it_replaces(num_outputs):
    x = torch.ones(2)
    for output in (Skip(num_outputs)(x, torch.zeros(1), flag=True), Skip(num_outputs)(hidden=x, flag=True)):
        if num_outputs:
            assert isinstance(output, tuple)
            assert output[0] is x
            assert output[1:] == (None,) * (num_outputs - 1)
        else:
            assert output is x


def test_a_skip_has_no_weights():
    assert Skip().state_dict() == {}


# ---------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"encoder.layer": 3}),
        ("distilbert", {"transformer.layer": 3}),
        ("vit", {"layers": 3}),
        ("gpt2", {"transformer.h": 3}),
        ("llama", {"model.layers": 3}),
        ("convnext", {"convnext.encoder.stages.0.layers": 2, "convnext.encoder.stages.1.layers": 2}),
        # the first block of a stage that widens or strides has no path around its weights
        ("resnet-basic", {"resnet.encoder.stages.0.layers": 2, "resnet.encoder.stages.1.layers": 2}),
        ("resnet-bottleneck", {"resnet.encoder.stages.0.layers": 1, "resnet.encoder.stages.1.layers": 2}),
        ("mobilenetv2", {"mobilenet_v2.layer": 10}),
        ("gated", {"blocks": 2}),
        ("vgg", {}),
        ("unet", {}),
    ],
)
def test_the_residual_blocks_of_every_list_are_found(name, expected):
    network = zoo.network(name)
    found = find_blocks(network.module, network.inputs)
    assert {key: len(blocks) for key, blocks in found.items()} == expected


@pytest.mark.parametrize("num_outputs", [0, 1, 2])
def test_the_number_of_outputs_is_noted(num_outputs):
    found = blocks_of(Chain(Residual(num_outputs=num_outputs), Residual(num_outputs=num_outputs)))
    assert found == {"list": {"list.0": num_outputs, "list.1": num_outputs}}


def test_a_block_whose_input_only_passes_weights_is_not_residual():
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert blocks_of(Chain(Residual(), plain, Residual())) == {"list": {"list.0": 0, "list.2": 0}}


def test_a_block_that_runs_twice_is_left_alone():
    assert blocks_of(Chain(Residual(), times=2)) == {}
    shared = Residual()
    assert blocks_of(Chain(shared, Residual(), shared)) == {"list": {"list.1": 0}}


def test_a_block_that_never_runs_is_left_alone():
    class Forgets(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.list[1](self.embed(x)))

    assert blocks_of(Forgets(Residual(), Residual())) == {"list": {"list.1": 0}}


def test_of_blocks_in_stages_the_inner_ones_are_found():
    stages = [nn.Sequential(Residual(), Residual()) for _ in range(2)]
    assert blocks_of(Chain(*stages)) == {
        "list.0": {"list.0.0": 0, "list.0.1": 0},
        "list.1": {"list.1.0": 0, "list.1.1": 0},
    }


def test_finding_leaves_no_hook_behind():
    module = Chain(Residual(), Residual())
    blocks_of(module)
    assert not any(part._forward_hooks for part in module.modules())


# ---------------------------------------------------------------- leaving out


@pytest.mark.parametrize("num_outputs", [0, 2])
@pytest.mark.parametrize("by_name", [False, True])
def test_blocks_of_any_form_are_masked_and_sliced_alike(num_outputs, by_name):
    module = Chain(*[Residual(num_outputs=num_outputs) for _ in range(3)], by_name=by_name)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network = zoo.wrap(zoo.enliven(module, seed=0).double().eval(), {"0": x})
    partition = Partition.of(network)
    for kept in ((0,), (1,), (0, 2)):
        keep = {"list.blocks": kept}
        h = module.embed(x)
        for index in kept:
            h = h + module.list[index].down(functional.relu(module.list[index].up(h)))
        expected = module.head(h).detach()
        assert torch.equal(zoo.outputs(mask(network, partition, keep))[0], expected)
        assert torch.equal(zoo.outputs(slice_network(network, partition, keep))[0], expected)


def test_all_blocks_of_a_stage_can_go_where_another_layer_of_it_stays():
    network, partition = zoo.network("resnet-basic"), zoo.partition("resnet-basic")
    first, second = "resnet.encoder.stages.0.layers.blocks", "resnet.encoder.stages.1.layers.blocks"
    assert (partition[first].minimum, partition[second].minimum) == (1, 0)
    keep = {second: ()}
    masked, sliced = mask(network, partition, keep), slice_network(network, partition, keep)
    assert zoo.largest_difference(zoo.outputs(sliced), zoo.outputs(masked)) <= zoo.tolerance("resnet-basic")


def test_the_layers_left_are_renumbered_without_gaps():
    module = zoo.build("llama").module
    skip_blocks(module, {"model.layers.0": 0})
    assert isinstance(module.model.layers[0], Skip)
    assert [layer.self_attn.layer_idx for layer in module.model.layers[1:]] == [0, 1]
    skip_blocks(module, {"model.layers.2": 0})
    assert module.model.layers[1].self_attn.layer_idx == 0


# ---------------------------------------------------------------- generating


def generated(network: Network, *, use_cache: bool) -> list[int]:
    """Eight greedy tokens after the first example."""
    ids = network.inputs["input_ids"][:1]
    output = network.module.generate(
        ids, max_new_tokens=8, do_sample=False, use_cache=use_cache, pad_token_id=0, eos_token_id=None
    )
    return output[0].tolist()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (0, 1), (2,)])
def test_generating_with_a_cache_equals_generating_without_whichever_blocks_are_gone(name, kept):
    network, partition = zoo.network(name), zoo.partition(name)
    keep = {module.name: kept for module in partition if module.kind == "blocks"}
    keep |= {module.name: (1,) for module in partition if module.kind == "heads"}
    sliced = slice_network(network, partition, keep)
    assert generated(sliced, use_cache=True) == generated(sliced, use_cache=False)


def test_generating_with_a_cache_works_where_blocks_differ_in_how_far_they_look():
    """Gemma's layers take turns between a sliding window and everything, and so do the layers of its cache."""
    config = transformers.Gemma3TextConfig(
        vocab_size=zoo.VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    module = zoo.enliven(transformers.Gemma3ForCausalLM(config), seed=1).double().eval()
    network = zoo.wrap(module, zoo.inputs_for("llama"))
    partition = Partition.of(network)
    if "model.layers.blocks" in partition.refused:
        return  # refusing is right, too
    for gone in range(4):
        kept = tuple(unit for unit in range(4) if unit != gone)
        sliced = slice_network(network, partition, {"model.layers.blocks": kept})
        assert generated(sliced, use_cache=True) == generated(sliced, use_cache=False), gone
