"""Tracing finds which channels belong together, leaves the model as it was, and names what stands in its way."""

from __future__ import annotations

import pytest
import torch
from tests.models import zoo
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import TraceError
from apportion.models import Partition
from apportion.models.network import float_outputs, forward, read_out, traceable
from apportion.models.trace import trace


def traced(module: nn.Module, x: Tensor):
    with zoo.limit(20):
        return trace(module.double().eval(), {"0": x})


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# ---------------------------------------------------------------- what is found


def test_a_linear_layer_and_its_reader_share_their_neurons(x):
    (coupled,) = traced(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), x).coupled
    assert (coupled.name, coupled.kind, coupled.num_units) == ("0", "neurons", 8)
    assert coupled.units == {("0", "out"): tuple(range(8)), ("2", "in"): tuple(range(8))}


def test_a_flattened_channel_is_followed_to_all_its_columns():
    image = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    found = traced(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)), image)
    (coupled,) = found.coupled
    assert coupled.units["3", "in"] == tuple(column // 16 for column in range(128))


def test_a_residual_stream_is_one_set_of_channels(x):
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(h + self.down(functional.relu(self.up(h))))

    stream, inner = sorted(traced(Residual(), x).coupled, key=lambda coupled: coupled.num_units)
    assert set(stream.units) == {("embed", "out"), ("up", "in"), ("down", "out"), ("head", "in")}
    assert set(inner.units) == {("up", "out"), ("down", "in")}


def test_concatenated_channels_keep_their_offsets():
    found = traced(zoo.Unet(), torch.randn(1, 3, 8, 8, dtype=torch.float64))
    sets = {coupled.name: coupled for coupled in found.coupled}
    assert sets["first"].units["last", "in"] == (-1,) * 16 + tuple(range(16))
    assert sets["up"].units["last", "in"] == tuple(range(16)) + (-1,) * 16


def test_heads_take_the_attributes_that_count_them_along():
    (coupled, *_) = trace(zoo.network("gpt2").module, zoo.network("gpt2").inputs).coupled
    assert coupled.per_unit["transformer.h.0.attn", "num_heads"] == 1
    assert coupled.per_unit["transformer.h.0.attn", "split_size"] == 8
    by_part = tuple(row % 32 // 8 for row in range(96))
    assert coupled.units["transformer.h.0.attn.c_attn", "out"] == by_part


def test_both_readings_of_a_fused_projection_are_offered_for_trial():
    network = zoo.network("fused-by-head")
    heads = next(coupled for coupled in trace(network.module, network.inputs).coupled if coupled.kind == "heads")
    readings = [units["blocks.0.attention.qkv", "out"] for units in (heads.units, *heads.layouts)]
    assert tuple(row % 24 // 6 for row in range(72)) in readings  # by part
    assert tuple(row // 18 for row in range(72)) in readings  # by head


# ---------------------------------------------------------------- the model stays as it was


def test_tracing_a_frozen_model_works_and_leaves_it_frozen(x):
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].weight.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    before = [parameter.requires_grad for parameter in module.parameters()]
    assert traced(module, x).coupled
    assert [parameter.requires_grad for parameter in module.parameters()] == before
    assert all(parameter.grad is None for parameter in module.parameters())


def test_tracing_works_where_gradients_are_switched_off(x):
    with torch.no_grad():
        assert traced(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), x).coupled
        assert not torch.is_grad_enabled()


def test_a_failed_trace_puts_the_flags_back_too(x):
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no")

    module = Raises()
    with pytest.raises(TraceError):
        traced(module, x)
    assert not module.layer.weight.requires_grad


def test_a_model_is_traced_in_evaluation_mode_and_every_part_put_back_into_its_own_mode():
    module = zoo.build("vgg").module.train()
    module.norm1.eval()  # as for fine-tuning with frozen statistics
    before = {name: part.training for name, part in module.named_modules()}
    with traceable(module):
        assert not any(part.training for part in module.modules())
    assert {name: part.training for name, part in module.named_modules()} == before


@pytest.mark.parametrize("name", ["vgg", "resnet-basic"])
def test_partitioning_a_model_in_training_mode_changes_no_weight_or_statistic(name):
    network = zoo.build(name)
    network.module.train()
    before = {key: tensor.clone() for key, tensor in network.module.state_dict().items()}
    Partition.of(network)
    for key, tensor in network.module.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_a_model_in_training_mode_has_the_partition_it_has_in_evaluation_mode():
    network = zoo.build("bert", dtype=torch.float32)  # with dropout
    network.module.train()
    names = [module.name for module in Partition.of(network)]
    assert names == [module.name for module in zoo.partition("bert")]


# ---------------------------------------------------------------- refusals


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x))).detach()


class WithoutGradient(Detaches):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x)))


class Integers(Detaches):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.relu(self.first(x))).argmax(-1)


@pytest.mark.parametrize("model", [Detaches, WithoutGradient, Integers])
def test_a_model_without_an_autograd_graph_is_refused_with_the_likely_causes(model, x):
    with zoo.refused("no autograd graph", "detach", "no_grad", error=TraceError):
        traced(model(), x)


class Fails(Detaches):
    def helper(self, x: Tensor) -> Tensor:
        raise ValueError("the lights are off")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.helper(self.first(x)))


def test_a_forward_pass_that_raises_is_refused_with_the_place_and_the_reason(x):
    with zoo.refused("Fails.helper", "ValueError", "the lights are off", error=TraceError):
        traced(Fails(), x)


def test_a_reason_of_many_lines_is_told_in_one(x):
    class Verbose(Fails):
        def helper(self, x: Tensor) -> Tensor:
            raise RuntimeError("the first line\n  at some depth\n  and more of it")

    with zoo.refused("the first line", error=TraceError):
        traced(Verbose(), x)


def test_inputs_that_do_not_fit_are_refused_with_the_operation(x):
    with zoo.refused("Linear.forward", "shapes cannot be multiplied", error=TraceError):
        traced(nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3)), x)


def test_a_model_with_nothing_to_slice_is_refused_with_the_layer_and_why(x):
    with zoo.refused("only", "leave the model", error=TraceError):
        module = nn.Sequential()
        module.add_module("only", nn.Linear(6, 3))
        traced(module, x)


def test_a_model_whose_only_hidden_layer_is_normed_is_refused_with_the_norm(x):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    with zoo.refused("norm (LayerNorm)", error=TraceError):  # and not only that the last layer leaves the model
        traced(Normed(), x)


def test_a_model_without_layers_is_refused(x):
    with zoo.refused(error=TraceError):
        traced(nn.Sequential(nn.ReLU()), x)


def test_a_graph_that_torch_pruning_walks_forever_is_refused_in_time(x):
    class Shifts(Detaches):
        """Pads with the last channel and drops the first: each channel index leads on to another, without end."""

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(torch.cat([h, h[..., -1:]], -1)[..., 1:])

    network = zoo.wrap(Shifts().double().eval(), {"0": x})
    with zoo.limit(5), zoo.refused("first"):
        Partition.of(network)


# ---------------------------------------------------------------- running a model


def test_positional_inputs_arrive_in_their_order():
    class Weighs(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return torch.stack([position * x for position, x in enumerate(xs)])

    inputs = {str(position): torch.tensor(float(position)) for position in range(12)}
    assert forward(Weighs(), inputs).tolist() == [float(position**2) for position in range(12)]


def test_named_and_positional_inputs_go_together():
    class Both(nn.Module):
        def forward(self, a: Tensor, *, scale: Tensor) -> Tensor:
            return a * scale

    assert forward(Both(), {"scale": torch.tensor(3.0), "0": torch.tensor(2.0)}).item() == 6


def test_all_floating_point_outputs_are_found_in_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    found = float_outputs({"a": a, "skip": torch.ones(1, dtype=torch.long), "deeper": (b, None, [c])})
    assert [len(tensor) for tensor in found] == [1, 2, 3]


def test_an_embedding_is_the_unit_mean_over_the_tokens_that_are_seen():
    network = zoo.network("bert")
    rows = read_out(network, network.inputs).detach()
    hidden, seen = zoo.outputs(network)[0], network.inputs["attention_mask"]
    for row, states, shown in zip(rows, hidden, seen, strict=True):
        mean = states[shown == 1].mean(0)
        torch.testing.assert_close(row, mean / mean.norm(), rtol=0, atol=1e-12)
