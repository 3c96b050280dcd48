"""Masking and slicing compute the same, on every architecture; and what they compute is what they say."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.models import zoo
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ModelError
from apportion.models import Network, Partition, mask, slice_network

every_architecture = pytest.mark.parametrize("name", zoo.ARCHITECTURES)


def state(network: Network) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in network.module.state_dict().items()}


def assert_same_state(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


def other_inputs(name: str) -> dict[str, Tensor]:
    """Inputs that the network was not traced on."""
    return zoo.inputs_for(name, seed=1)


def ordered(partition: Partition, *, seed: int) -> Partition:
    """The partition with a random order of importance in every module."""
    generator = torch.Generator().manual_seed(seed)
    return partition.ordered({m.name: torch.randperm(m.num_units, generator=generator).tolist() for m in partition})


# ---------------------------------------------------------------- masked = sliced


@every_architecture
def test_each_module_at_its_smallest_size_is_sliced_to_what_masking_computes(name):
    network, inputs = zoo.network(name), other_inputs(name)
    partition = ordered(zoo.partition(name), seed=0)
    whole = zoo.outputs(network, inputs)
    for module in partition:
        keep = partition.keep({module.name: module.sizes()[0]})
        masked = zoo.outputs(mask(network, partition, keep), inputs)
        sliced = zoo.outputs(slice_network(network, partition, keep), inputs)
        assert zoo.largest_difference(sliced, masked) <= zoo.tolerance(name), module.name
        # and the units dropped did something, or equality would mean nothing
        assert zoo.largest_difference(masked, whole) > 1000 * zoo.tolerance(name), module.name


@every_architecture
@pytest.mark.parametrize("seed", range(3))
def test_all_modules_cut_at_random_are_sliced_to_what_masking_computes(name, seed):
    network, partition, inputs = zoo.network(name), zoo.partition(name), other_inputs(name)
    keep = zoo.random_keep(partition, seed=seed)
    masked = zoo.outputs(mask(network, partition, keep), inputs)
    sliced = zoo.outputs(slice_network(network, partition, keep), inputs)
    assert zoo.largest_difference(sliced, masked) <= zoo.tolerance(name)


@every_architecture
def test_a_slice_in_single_precision_agrees_to_single_precision(name):
    network, partition = zoo.build(name, dtype=torch.float32), zoo.partition(name)
    keep = zoo.random_keep(partition, seed=7)
    masked = zoo.outputs(mask(network, partition, keep))
    sliced = zoo.outputs(slice_network(network, partition, keep))
    # eps is 1.2e-7, and random weights through some fifty layers let a rounding error grow a few thousand times
    assert zoo.largest_difference(sliced, masked) <= 1e-3


@every_architecture
def test_every_unit_dropped_makes_the_network_smaller(name):
    network, partition = zoo.network(name), zoo.partition(name)
    whole = zoo.num_parameters(network)
    for module in partition:
        every = range(module.num_units)
        kept = ({module.order[0]}, set(every) - {module.num_units - 1}, set(every) - {module.num_units // 2})
        some = [tuple(units) for units in kept if max(module.minimum, 1) <= len(units) < module.num_units]
        sizes = [zoo.num_parameters(slice_network(network, partition, {module.name: units})) for units in some]
        assert all(size < whole for size in sizes), module.name
        assert len(some) < 3 or sizes[0] < sizes[1] or module.num_units == 2, module.name


@every_architecture
def test_sliced_layers_have_as_many_channels_as_their_kept_units(name):
    network, partition = zoo.network(name), zoo.partition(name)
    keep = {key: kept for key, kept in zoo.random_keep(partition, seed=1).items() if partition[key].kind != "blocks"}
    sliced = slice_network(network, partition, keep)
    gone: dict[tuple[str, str], set[int]] = {}
    for key, kept in keep.items():
        for member in partition[key].members:
            dropped = {channel for channel, unit in enumerate(member.units) if unit >= 0 and unit not in kept}
            gone.setdefault((member.layer, member.side), set()).update(dropped)
    for (layer_name, side), channels in gone.items():
        before, after = (net.module.get_submodule(layer_name).weight for net in (network, sliced))
        dim = _out_dim(sliced.module.get_submodule(layer_name), after)
        dim = 1 - dim if side == "in" else dim
        assert after.shape[dim] == before.shape[dim] - len(channels), (layer_name, side)


@every_architecture
def test_cutting_leaves_the_original_as_it_was_bit_for_bit(name):
    network = zoo.build(name)
    before, outputs, text = state(network), zoo.outputs(network), repr(network.module)
    numbers = {key: dict(_numbers(module)) for key, module in network.module.named_modules()}
    partition = Partition.of(network)
    keep = zoo.random_keep(partition, seed=2)
    mask(network, partition, keep)
    slice_network(network, partition, keep)
    assert_same_state(state(network), before)
    assert repr(network.module) == text
    assert {key: dict(_numbers(module)) for key, module in network.module.named_modules()} == numbers
    assert not any(module._forward_hooks for module in network.module.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.module.parameters())
    assert network.edits.keep == {}
    for first, second in zip(zoo.outputs(network), outputs, strict=True):
        assert torch.equal(first, second)


def _numbers(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, value) for key, value in vars(module).items() if isinstance(value, int)]


@every_architecture
def test_a_cut_copy_shares_no_memory_with_the_original(name):
    network, partition = zoo.network(name), zoo.partition(name)
    owned = {tensor.data_ptr() for tensor in network.module.state_dict().values() if tensor.numel()}
    keep = zoo.random_keep(partition, seed=2)
    for cut in (mask(network, partition, keep), slice_network(network, partition, keep)):
        assert not owned & {tensor.data_ptr() for tensor in cut.module.state_dict().values() if tensor.numel()}


@every_architecture
def test_slicing_in_two_steps_equals_slicing_at_once(name):
    network, partition = zoo.network(name), zoo.partition(name)
    first = zoo.random_keep(partition, seed=3)
    then = {key: kept[: -(-len(kept) // 2)] for key, kept in first.items()}
    at_once = slice_network(network, partition, then)
    stepwise = slice_network(slice_network(network, partition, first), partition, then)
    assert_same_state(state(stepwise), state(at_once))
    assert stepwise.edits.keep == at_once.edits.keep
    for a, b in zip(zoo.outputs(stepwise), zoo.outputs(at_once), strict=True):
        assert torch.equal(a, b)


@every_architecture
def test_the_order_in_which_modules_are_sliced_does_not_matter(name):
    network, partition = zoo.network(name), zoo.partition(name)
    keep = zoo.random_keep(partition, seed=4)
    backwards = dict(reversed(keep.items()))
    at_once = slice_network(network, partition, keep)
    assert_same_state(state(slice_network(network, partition, backwards)), state(at_once))
    one_by_one = network
    for key, kept in backwards.items():
        one_by_one = slice_network(one_by_one, partition, {key: kept})
    assert_same_state(state(one_by_one), state(at_once))


@every_architecture
def test_keeping_all_units_is_the_identity(name):
    network, partition = zoo.network(name), zoo.partition(name)
    keep = partition.keep({module.name: module.num_units for module in partition})
    for cut in (mask(network, partition, keep), slice_network(network, partition, keep)):
        assert_same_state(state(cut), state(network))
        for a, b in zip(zoo.outputs(cut), zoo.outputs(network), strict=True):
            assert torch.equal(a, b)


@every_architecture
def test_a_smaller_model_is_nested_in_a_larger_one(name):
    network, partition = zoo.network(name), ordered(zoo.partition(name), seed=5)
    larger = slice_network(network, partition, partition.keep({m.name: m.sizes()[-2] for m in partition}))
    smallest = partition.keep({m.name: m.sizes()[0] for m in partition})
    assert_same_state(
        state(slice_network(larger, partition, smallest)), state(slice_network(network, partition, smallest))
    )


# ---------------------------------------------------------------- masking does what it says


@every_architecture
def test_nothing_that_a_dropped_unit_computes_reaches_the_output(name):
    """Whatever is written into the dropped channels, the masked network's output stays the same."""
    network, partition = zoo.network(name), zoo.partition(name)
    generator = torch.Generator().manual_seed(0)
    for module in (module for module in partition if module.kind != "blocks"):
        kept = partition.keep({module.name: module.sizes()[0]})[module.name]
        masked = mask(network, partition, {module.name: kept})
        disturbed = copy.deepcopy(masked.module)
        for member in module.members:
            layer = disturbed.get_submodule(member.layer)
            if member.side == "out":
                rows = torch.tensor([unit >= 0 and unit not in kept for unit in member.units])
                for parameter in layer.parameters(recurse=False):
                    by_row = parameter.data.movedim(_out_dim(layer, parameter), 0)
                    by_row[rows] += torch.randn(by_row[rows].shape, generator=generator, dtype=parameter.dtype)
        disturbed_outputs = zoo.outputs(masked.replace(module=disturbed))
        assert zoo.largest_difference(disturbed_outputs, zoo.outputs(masked)) <= zoo.tolerance(name), module.name


def _out_dim(layer: nn.Module, parameter: Tensor) -> int:
    """The dimension of a layer's weight or bias that runs over its output channels."""
    stored_input_first = type(layer).__name__ == "Conv1D" or getattr(layer, "transposed", False)
    return 1 if stored_input_first and parameter.dim() > 1 else 0


def bert_by_hand(network: Network, heads: list[list[int]], neurons: list[list[int]], blocks: list[int]) -> Tensor:
    """The last hidden state of BERT, written out from its weights for the heads, neurons and blocks named."""
    weights, inputs = network.module.state_dict(), network.inputs

    def linear(x: Tensor, key: str, rows: list[int] | None = None) -> Tensor:
        every = range(len(weights[f"{key}.bias"]))
        rows = list(every) if rows is None else rows
        return x @ weights[f"{key}.weight"][rows].T + weights[f"{key}.bias"][rows]

    def norm(x: Tensor, key: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * weights[f"{key}.weight"] + weights[f"{key}.bias"]

    tokens = inputs["input_ids"].shape[1]
    x = weights["embeddings.word_embeddings.weight"][inputs["input_ids"]]
    x = x + weights["embeddings.position_embeddings.weight"][:tokens]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    hidden_from = inputs["attention_mask"][:, None, :] == 0
    for block in blocks:
        key, size = f"encoder.layer.{block}", 8
        attended = weights[f"{key}.attention.output.dense.bias"].expand_as(x)
        for head in heads[block]:
            rows = list(range(head * size, (head + 1) * size))
            q, k, v = (linear(x, f"{key}.attention.self.{part}", rows) for part in ("query", "key", "value"))
            scores = (q @ k.transpose(1, 2) / math.sqrt(size)).masked_fill(hidden_from, -math.inf)
            mixed = scores.exp() / scores.exp().sum(-1, keepdim=True) @ v
            attended = attended + mixed @ weights[f"{key}.attention.output.dense.weight"][:, rows].T
        x = norm(x + attended, f"{key}.attention.output.LayerNorm")
        inner = functional.gelu(linear(x, f"{key}.intermediate.dense", neurons[block]))
        out = inner @ weights[f"{key}.output.dense.weight"][:, neurons[block]].T + weights[f"{key}.output.dense.bias"]
        x = norm(x + out, f"{key}.output.LayerNorm")
    return x


def test_bert_without_some_heads_neurons_and_blocks_computes_what_the_rest_compute_by_hand():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    heads = [[0, 1, 2, 3], [2], [0, 3]]
    neurons = [list(range(48)), list(range(0, 48, 3)), [5, 40, 41]]
    for blocks in ([0, 1, 2], [1, 2], [2, 0][::-1], [1]):
        keep = {f"encoder.layer.{i}.attention.heads": tuple(heads[i]) for i in range(3)}
        keep |= {f"encoder.layer.{i}.intermediate.dense": tuple(neurons[i]) for i in range(3)}
        keep |= {"encoder.layer.blocks": tuple(blocks)}
        expected = bert_by_hand(network, heads, neurons, blocks)
        for cut in (mask(network, partition, keep), slice_network(network, partition, keep)):
            torch.testing.assert_close(zoo.outputs(cut)[0], expected, rtol=0, atol=1e-10)


def test_one_bert_head_is_four_projections_of_head_size_and_one_neuron_two_vectors():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    whole = zoo.num_parameters(network)
    fewer_heads = slice_network(network, partition, {"encoder.layer.0.attention.heads": (0, 2, 3)})
    assert whole - zoo.num_parameters(fewer_heads) == 4 * 32 * 8 + 3 * 8  # the output bias stays
    fewer_neurons = slice_network(network, partition, {"encoder.layer.0.intermediate.dense": tuple(range(47))})
    assert whole - zoo.num_parameters(fewer_neurons) == 32 + 1 + 32


def llama_attention_by_hand(x: Tensor, weights: dict[str, Tensor], groups: list[int], base: float) -> Tensor:
    """Grouped-query attention, causal, with rotary positions: each key-value head in ``groups`` and its two queries."""
    size, tokens = 8, x.shape[1]
    angle = torch.arange(tokens)[:, None] / base ** (torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angle), angle)

    def head(projection: str, index: int) -> Tensor:
        return x @ weights[f"{projection}.weight"][index * size : (index + 1) * size].T

    def rotate(vectors: Tensor) -> Tensor:  # pairs (i, i + size / 2) as complex numbers
        turned = torch.complex(vectors[..., : size // 2], vectors[..., size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    total = torch.zeros_like(x)
    for group in groups:
        key, value = rotate(head("k_proj", group)), head("v_proj", group)
        for query in (2 * group, 2 * group + 1):
            scores = rotate(head("q_proj", query)) @ key.transpose(1, 2) / math.sqrt(size)
            mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ value
            total = total + mixed @ weights["o_proj.weight"][:, query * size : (query + 1) * size].T
    return total


@pytest.mark.parametrize("groups", [[0], [1], [2], [0, 2]])
def test_a_llama_unit_is_a_key_value_head_with_its_query_heads(groups):
    network, partition = zoo.network("llama"), zoo.partition("llama")
    name = "model.layers.1.self_attn"
    assert partition[f"{name}.heads"].num_units == 3
    keep = {f"{name}.heads": tuple(groups)}
    sliced = slice_network(network, partition, keep)
    attention = sliced.module.get_submodule(name)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (8 * len(groups), 48)
    assert attention.q_proj.weight.shape == (16 * len(groups), 48)
    assert attention.o_proj.weight.shape == (48, 16 * len(groups))
    weights = network.module.get_submodule(name).state_dict()
    for cut in (mask(network, partition, keep), sliced):
        seen = {}
        cut.module.get_submodule(name).register_forward_hook(
            lambda _module, args, kwargs, output, seen=seen: seen.update(x=kwargs["hidden_states"], out=output[0]),
            with_kwargs=True,
        )
        zoo.outputs(cut)
        expected = llama_attention_by_hand(seen["x"], weights, groups, base=10000.0)
        # the rotary tables are in single precision: an angle of up to 6 is off by up to 4e-7
        torch.testing.assert_close(seen["out"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fused-by-part", "fused-by-head"])
def test_a_head_of_a_fused_projection_is_its_query_key_and_value_wherever_they_lie(name):
    network, partition = zoo.network(name), zoo.partition(name)
    kept, key, size, width = (1, 3), "blocks.1.attention", 6, 24
    weights = network.module.get_submodule(key).state_dict()
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = weights["proj.bias"].expand_as(x)
    for head in kept:
        if name == "fused-by-part":
            starts = [part * width + head * size for part in range(3)]
        else:
            starts = [head * 3 * size + part * size for part in range(3)]
        q, k, v = (
            x @ weights["qkv.weight"][start : start + size].T + weights["qkv.bias"][start : start + size]
            for start in starts
        )
        mixed = (q @ k.transpose(1, 2) / math.sqrt(size)).softmax(-1) @ v
        expected = expected + mixed @ weights["proj.weight"][:, head * size : (head + 1) * size].T
    for cut in (mask, slice_network):
        module = cut(network, partition, {f"{key}.heads": kept}).module.get_submodule(key)
        torch.testing.assert_close(module(x).detach(), expected, rtol=0, atol=1e-12)


def test_a_neuron_of_a_fused_gated_mlp_is_a_gate_row_its_up_row_and_a_down_column():
    network, partition = zoo.network("gated"), zoo.partition("gated")
    kept, key = (0, 7, 39), "blocks.0.mlp"
    assert partition[f"{key}.gate_up"].num_units == 40
    weights = network.module.get_submodule(key).state_dict()
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = weights["down.bias"].expand_as(x)
    for neuron in kept:
        gate = x @ weights["gate_up.weight"][neuron] + weights["gate_up.bias"][neuron]
        up = x @ weights["gate_up.weight"][40 + neuron] + weights["gate_up.bias"][40 + neuron]
        expected = expected + (gate * gate.sigmoid() * up)[..., None] * weights["down.weight"][:, neuron]
    for cut in (mask, slice_network):
        module = cut(network, partition, {f"{key}.gate_up": kept}).module.get_submodule(key)
        torch.testing.assert_close(module(x).detach(), expected, rtol=0, atol=1e-12)


def test_a_channel_that_is_flattened_takes_all_its_columns_with_it():
    network, partition = zoo.network("vgg"), zoo.partition("vgg")
    kept1, kept2 = [0, 5, 6, 15], [2, 3, 11]
    weights, x = network.module.state_dict(), network.inputs["0"]
    y = functional.conv2d(x, weights["conv1.weight"][kept1], weights["conv1.bias"][kept1], padding=1)
    running = (weights[f"norm1.{part}"][kept1] for part in ("running_mean", "running_var", "weight", "bias"))
    y = functional.max_pool2d(functional.relu(functional.batch_norm(y, *running)), 2)
    y = functional.conv2d(y, weights["conv2.weight"][kept2][:, kept1], weights["conv2.bias"][kept2], padding=1)
    y = functional.max_pool2d(functional.relu(y), 4)
    by_channel = weights["fc1.weight"].unflatten(1, (12, 16))[:, kept2].flatten(1)
    y = functional.relu(functional.linear(y.flatten(1), by_channel, weights["fc1.bias"]))
    expected = functional.linear(y, weights["fc2.weight"], weights["fc2.bias"])
    keep = {"conv1": tuple(kept1), "conv2": tuple(kept2)}
    for cut in (mask(network, partition, keep), slice_network(network, partition, keep)):
        torch.testing.assert_close(zoo.outputs(cut)[0], expected, rtol=0, atol=1e-10)


WITHOUT_BLOCKS = ("vgg", "mixed-stream", "grouped", "unet", "unet-skip-first")
with_blocks = pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if name not in WITHOUT_BLOCKS])


@with_blocks
@pytest.mark.parametrize("seed", range(2))
def test_dropping_blocks_leaves_the_others_as_if_the_list_had_only_those(name, seed):
    network, partition = zoo.network(name), zoo.partition(name)
    modules = [module for module in partition if module.kind == "blocks"]
    assert modules
    keep = {key: kept for key, kept in zoo.random_keep(partition, seed=seed).items() if partition[key].kind == "blocks"}
    by_hand = copy.deepcopy(network.module)
    for module in modules:
        parent = by_hand.get_submodule(module.name.removesuffix(".blocks"))
        gone = {block for unit, (block, _) in enumerate(module.blocks) if unit not in keep[module.name]}
        left = [child for key, child in parent.named_children() if f"{_list_name(module)}.{key}" not in gone]
        parent._modules.clear()
        for index, child in enumerate(left):
            parent.add_module(str(index), child)
    expected = zoo.outputs(network.replace(module=by_hand))
    for cut in (mask(network, partition, keep), slice_network(network, partition, keep)):
        for a, b in zip(zoo.outputs(cut), expected, strict=True):
            assert torch.equal(a, b)


def _list_name(module: object) -> str:
    return module.name.removesuffix(".blocks")  # type: ignore[attr-defined]


# ---------------------------------------------------------------- networks that were sliced before


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet-basic", "vgg"])
def test_a_sliced_network_can_be_masked_further_by_the_same_partition(name):
    network, partition = zoo.network(name), zoo.partition(name)
    first = zoo.random_keep(partition, seed=3)
    then = {key: kept[: -(-len(kept) // 2)] for key, kept in first.items()}
    sliced = slice_network(network, partition, first)
    masked = zoo.outputs(mask(sliced, partition, then))
    assert zoo.largest_difference(masked, zoo.outputs(mask(network, partition, then))) <= zoo.tolerance(name)


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet-basic", "vgg"])
def test_a_sliced_network_can_be_partitioned_and_sliced_anew(name):
    """As happens when a saved model is taken as the start of another run."""
    network, partition = zoo.network(name), zoo.partition(name)
    odd = {m.name: tuple(range(1, m.num_units, 2)) for m in partition if m.kind != "blocks"}
    smaller = slice_network(network, partition, odd)
    again = Partition.of(smaller)
    assert {m.name for m in again if m.kind != "blocks"} == {key for key, kept in odd.items() if len(kept) > 1}
    for module in again:
        keep = again.keep({module.name: module.sizes()[0]})
        sliced = slice_network(smaller, again, keep)
        masked = zoo.outputs(mask(smaller, again, keep))
        assert zoo.largest_difference(zoo.outputs(sliced), masked) <= zoo.tolerance(name), module.name
        assert zoo.num_parameters(sliced) < zoo.num_parameters(smaller), module.name


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("cut", [mask, slice_network])
def test_a_cut_that_makes_no_sense_is_refused(cut):
    network, partition = zoo.network("bert"), zoo.partition("bert")
    for keep, words in (
        ({"encoder.layer.0.attention.heads": ()}, ("encoder.layer.0.attention.heads", "nothing")),
        ({"encoder.layer.0.attention.heads": (0, 4)}, ("[0, 4]", "0 to 3")),
        ({"encoder.layer.blocks": ()}, ("encoder.layer.blocks",)),
        ({"encoder.layer.7.heads": (0,)}, ("encoder.layer.7.heads", "encoder.layer.0.attention.heads")),
    ):
        with zoo.refused(*words):
            cut(network, partition, keep)


def test_units_that_an_earlier_slice_removed_do_not_come_back():
    network, partition = zoo.network("bert"), zoo.partition("bert")
    name = "encoder.layer.0.attention.heads"
    sliced = slice_network(network, partition, {name: (0, 1)})
    with pytest.raises(ModelError, match=r"\[3\]"):
        slice_network(sliced, partition, {name: (1, 3)})
