"""A partition offers what can be cut exactly, in hardware-friendly steps, one order of importance per module."""

from __future__ import annotations

import collections
import itertools
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.models import zoo
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ModelError
from apportion.models import Module, Network, Partition, mask, slice_network

every_architecture = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def partition_of(module: nn.Module, x: Tensor, *, seed: int = 0) -> tuple[Network, Partition]:
    network = zoo.wrap(zoo.enliven(module, seed=seed).double().eval(), {"0": x})
    with zoo.limit(20):
        return network, Partition.of(network)


def assert_all_cuts_are_exact(network: Network, partition: Partition, tolerance: float = 1e-10) -> None:
    """Every module alone without its first, without its last and with half its units, and all at random."""
    cuts = [zoo.random_keep(partition, seed=seed) for seed in range(3)]
    for module in partition:
        every = range(module.num_units)
        cuts += [{module.name: tuple(units)} for units in (every[1:], every[:-1], every[: -(-module.num_units // 2)])]
    for keep in cuts:
        masked = zoo.outputs(mask(network, partition, keep))
        assert zoo.largest_difference(zoo.outputs(slice_network(network, partition, keep)), masked) <= tolerance, keep


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- what is offered


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", {"heads": [4] * 3, "neurons": [48] * 3, "blocks": [3]}),
        ("distilbert", {"heads": [4] * 3, "neurons": [48] * 3, "blocks": [3]}),
        ("vit", {"heads": [4] * 3, "neurons": [48] * 3, "blocks": [3]}),
        ("gpt2", {"heads": [4] * 3, "neurons": [128] * 3, "blocks": [3]}),
        ("llama", {"heads": [3] * 3, "neurons": [48] * 3, "blocks": [3]}),
        ("convnext", {"neurons": [64, 64, 128, 128], "blocks": [2, 2]}),
        ("fused-by-part", {"heads": [4] * 3, "neurons": [40] * 3, "blocks": [3]}),
        ("fused-by-head", {"heads": [4] * 3, "neurons": [40] * 3, "blocks": [3]}),
        ("gated", {"heads": [4] * 2, "neurons": [40] * 2, "blocks": [2]}),
        ("vgg", {"channels": [16, 12], "neurons": [20]}),
        ("mixed-stream", {"neurons": [40]}),
        ("grouped", {"channels": [16]}),
        ("unet", {"channels": [16, 24, 16]}),
        # the stream of each stage, and one inner width per basic block
        ("resnet-basic", {"channels": [16, 16, 16, 32, 32, 32, 32], "blocks": [2, 2]}),
    ],
)
def test_a_partition_offers_every_part_of_the_architecture(name, expected):
    found = collections.defaultdict(list)
    for module in zoo.partition(name):
        found[module.kind].append(module.num_units)
    assert {kind: sorted(sizes) for kind, sizes in found.items()} == {k: sorted(v) for k, v in expected.items()}


@pytest.mark.parametrize("name", ["resnet-bottleneck", "mobilenetv2", "efficientnet"])
def test_a_partition_of_a_convolution_network_leaves_only_its_last_layer_alone(name):
    partition = zoo.partition(name)
    assert set(partition.refused) <= {"classifier", "classifier.1"}
    cut = {member.layer for module in partition for member in module.members}
    convolutions = {
        key for key, layer in zoo.network(name).module.named_modules() if isinstance(layer, nn.modules.conv._ConvNd)
    }
    assert convolutions <= cut


@every_architecture
def test_module_names_are_unique_and_lead_to_the_module(name):
    partition = zoo.partition(name)
    assert len({module.name for module in partition}) == len(partition)
    for module in partition:
        assert partition[module.name] is module


@every_architecture
def test_every_unit_has_its_equal_share_of_channels_in_every_layer(name):
    network = zoo.network(name)
    for module in zoo.partition(name):
        for member in module.members:
            counts = collections.Counter(unit for unit in member.units if unit >= 0)
            assert sorted(counts) == list(range(module.num_units)), (module.name, member.layer)
            assert len(set(counts.values())) == 1, (module.name, member.layer)
            layer = network.module.get_submodule(member.layer)
            assert len(member.units) in layer.weight.shape, (module.name, member.layer)


def test_what_cannot_be_cut_is_listed_with_the_layer_in_its_way():
    assert "norm (LayerNorm)" in zoo.partition("mixed-stream").refused["wide"]
    assert "grouped (Conv2d)" in zoo.partition("grouped").refused["before"]
    assert "shares its weight" in zoo.partition("gpt2").refused["lm_head"]
    assert "leave the model" in zoo.partition("llama").refused["lm_head"]


class Between(nn.Module):
    """Two linear layers with an operation on the hidden channels between them, beside a branch that can be cut."""

    def __init__(self, operation, width: int = 32, into: int = 32) -> None:
        super().__init__()
        self.operation = operation
        self.first, self.second = nn.Linear(6, width), nn.Linear(into, 5)
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operation(self.first(x))) + self.down(functional.relu(self.up(x)))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda h: h.reshape(-1, 4, 8).transpose(1, 2).reshape(2, 5, 32), id="reshape by a fixed number"),
        pytest.param(lambda h: h.softmax(-1), id="softmax"),
        pytest.param(lambda h: functional.normalize(h, dim=-1), id="normalise"),
        pytest.param(lambda h: functional.layer_norm(h, (h.shape[-1],)), id="layer norm without weights"),
        pytest.param(lambda h: h.flip(-1), id="flip"),
        pytest.param(lambda h: h.cumsum(-1), id="cumulative sum"),
        pytest.param(lambda h: h[..., torch.arange(31, -1, -1)], id="permutation"),
        pytest.param(lambda h: h - h.mean(-1, keepdim=True), id="centring"),
        pytest.param(lambda h: h * torch.arange(32.0, dtype=h.dtype), id="a constant per channel"),
    ],
)
def test_channels_that_an_operation_mixes_or_fixes_are_refused_and_the_rest_is_cut(operation):
    network, partition = partition_of(Between(operation), tokens())
    assert [module.name for module in partition] == ["up"]
    assert "first" in partition.refused
    assert_all_cuts_are_exact(network, partition)


@pytest.mark.parametrize(
    ("operation", "width", "into"),
    [
        pytest.param(lambda h: functional.glu(h, -1), 64, 32, id="glu"),
        pytest.param(
            lambda h: functional.silu(h.unflatten(-1, (2, -1))[..., 0, :]), 64, 32, id="first half by unflatten"
        ),
        pytest.param(lambda h: h.unflatten(-1, (-1, 2)).amax(-1), 64, 32, id="maxout over pairs"),
        pytest.param(lambda h: h.unflatten(-1, (-1, 2)).sum(-1), 64, 32, id="sum over pairs"),
        pytest.param(
            lambda h: functional.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :], 64, 32, id="halves"
        ),
        pytest.param(lambda h: torch.stack(h.chunk(3, -1)).prod(0), 96, 32, id="three parts"),
        pytest.param(lambda h: functional.silu(h[..., ::2]) * h[..., 1::2], 64, 32, id="interleaved gate"),
    ],
)
def test_a_fused_projection_is_cut_exactly_or_refused(operation, width, into):
    network, partition = partition_of(Between(operation, width, into), tokens())
    assert_all_cuts_are_exact(network, partition)
    for module in partition:
        for member in module.members:  # no unit is empty: dropping it must make something smaller
            assert set(range(module.num_units)) <= set(member.units), (module.name, member.layer)


class PixelShuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.last = nn.Conv2d(3, 32, 3), nn.Conv2d(8, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(self.last(functional.pixel_shuffle(self.wide(x), 2))))


def test_channels_that_become_pixels_are_refused_and_the_rest_is_cut():
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    network, partition = partition_of(PixelShuffled(), x)
    assert "wide" in partition.refused
    assert [module.name for module in partition] == ["last"]
    assert_all_cuts_are_exact(network, partition)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_a_wrong_reading_of_a_fused_projection_is_found_however_little_attention_adds(scale):
    """As in freshly initialised models and those with a layer scale, where a branch adds very little to its stream."""
    network = zoo.build("fused-by-head")
    with torch.no_grad():
        for block in network.module.blocks:
            block.attention.proj.weight.mul_(scale)
            block.attention.proj.bias.mul_(scale)
    partition = Partition.of(network)
    for index in range(3):
        (member,) = (m for m in partition[f"blocks.{index}.attention.heads"].members if m.layer.endswith("qkv"))
        assert member.units == tuple(row // 18 for row in range(72))  # by head: 3 parts of 6 rows each


def test_a_module_is_offered_only_if_it_can_be_cut_by_itself():
    """T5's cross-attention hands a bias with one entry per head from block to block: they only shrink together."""
    config = transformers.T5Config(vocab_size=zoo.VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ids = zoo.inputs_for("gpt2")["input_ids"]
    module = zoo.enliven(transformers.T5Model(config), seed=0).double().eval()
    network = zoo.wrap(module, {"input_ids": ids, "decoder_input_ids": ids})
    with zoo.limit(20):
        partition = Partition.of(network)
    assert_all_cuts_are_exact(network, partition, tolerance=1e-5)  # its norms compute in single precision


def test_blocks_are_offered_only_if_any_of_them_can_go():
    """torch's own encoder looks into its first layer, so that one can't be replaced."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(6, 24), nn.Linear(24, 5)
            layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(x)))

    network, partition = partition_of(Encoder(), tokens())
    assert "encoder.layers.0.linear1" in {module.name for module in partition}
    assert_all_cuts_are_exact(network, partition)


def test_a_block_that_runs_several_times_is_one_set_of_modules():
    shared = zoo.Block(zoo.ByPart(), zoo.plain_mlp())
    network, partition = partition_of(zoo.Stack([shared, shared]), tokens())
    assert sorted(module.name for module in partition) == ["blocks.0.attention.heads", "blocks.0.mlp.0"]
    assert_all_cuts_are_exact(network, partition)


def test_an_architecture_whose_projection_cannot_be_followed_is_cut_elsewhere():
    config = transformers.FalconConfig(
        vocab_size=zoo.VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2
    )
    module = zoo.enliven(transformers.FalconForCausalLM(config), seed=0).double().eval()
    network = zoo.wrap(module, zoo.inputs_for("gpt2"))
    with zoo.limit(20):
        partition = Partition.of(network)
    assert {"neurons", "blocks"} <= {module.kind for module in partition}
    assert_all_cuts_are_exact(network, partition, tolerance=1e-5)  # rotary tables in single precision


# ---------------------------------------------------------------- sizes, orders


def module_of(num_units: int, multiple: int, minimum: int) -> Module:
    return Module(name="m", kind="neurons", num_units=num_units, multiple=multiple, minimum=minimum)


@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 64), st.none() | st.integers(0, 20))
def test_sizes_ascend_in_hardware_friendly_steps_to_all_units(num_units, multiple, minimum, num_steps):
    sizes = module_of(num_units, multiple, min(minimum, num_units)).sizes(num_steps)
    assert sizes[-1] == num_units
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert all(size % multiple == 0 and size >= min(minimum, num_units) for size in sizes[:-1])
    assert num_steps is None or len(sizes) <= num_steps + 1


@given(st.integers(2, 300), st.integers(1, 64), st.integers(1, 20))
def test_fewer_steps_pick_among_all_sizes_and_begin_with_the_smallest(num_units, multiple, num_steps):
    module = module_of(num_units, multiple, multiple if multiple < num_units else 1)
    every, some = module.sizes(), module.sizes(num_steps)
    assert set(some) <= set(every)
    assert some[0] == every[0]
    assert len(some) == min(len(every), num_steps + 1)


@pytest.mark.parametrize(
    ("name", "module", "multiple"),
    [
        ("bert", "encoder.layer.0.attention.heads", 1),
        ("convnext", "convnext.encoder.stages.1.layers.0.pwconv1", 32),
        ("bert", "encoder.layer.0.intermediate.dense", 16),  # 48 neurons are too few for steps of 32
        ("vgg", "conv1", 8),
        ("bert", "encoder.layer.blocks", 1),
    ],
)
def test_steps_are_hardware_friendly_by_default(name, module, multiple):
    found = zoo.partition(name)[module]
    assert found.multiple == multiple
    assert found.sizes()[0] == multiple


def test_steps_can_be_chosen_by_kind():
    partition = Partition.of(zoo.network("bert"), multiple={"heads": 2, "neurons": 12})
    assert partition["encoder.layer.0.attention.heads"].sizes() == (2, 4)
    assert partition["encoder.layer.0.intermediate.dense"].sizes() == (12, 24, 36, 48)
    assert partition["encoder.layer.blocks"].sizes() == (1, 2, 3)


@given(st.permutations(range(12)), st.integers(1, 12), st.integers(1, 12))
def test_what_is_kept_is_a_prefix_of_the_order_so_smaller_is_nested_in_larger(order, one, other):
    module = replace(module_of(12, 1, 1), order=tuple(order))
    smaller, larger = sorted((one, other))
    assert set(module.kept(smaller)) <= set(module.kept(larger))
    assert set(module.kept(smaller)) == set(order[:smaller])
    assert module.kept(smaller) == tuple(sorted(module.kept(smaller)))


def test_a_new_order_changes_the_modules_named_and_no_others():
    partition = zoo.partition("bert")
    name = "encoder.layer.1.attention.heads"
    changed = partition.ordered({name: [3, 1, 0, 2]})
    assert changed[name].kept(2) == (1, 3)
    assert partition[name].kept(2) == (0, 1)
    assert [module for module in changed if module.name != name] == [m for m in partition if m.name != name]


def test_keep_names_the_units_of_every_module_asked_for():
    partition = zoo.partition("bert").ordered({"encoder.layer.blocks": [2, 0, 1]})
    assert partition.keep({"encoder.layer.blocks": 1, "encoder.layer.0.attention.heads": 3}) == {
        "encoder.layer.blocks": (2,),
        "encoder.layer.0.attention.heads": (0, 1, 2),
    }


@pytest.mark.parametrize("size", [-1, 0, 5])
def test_a_size_that_a_module_cannot_have_is_refused(size):
    with zoo.refused("encoder.layer.0.attention.heads", str(size), "4"):
        zoo.partition("bert").keep({"encoder.layer.0.attention.heads": size})


def test_an_unknown_module_is_refused_with_the_names_there_are():
    with zoo.refused("'nope'", "encoder.layer.blocks", error=ModelError):
        zoo.partition("bert")["nope"]
