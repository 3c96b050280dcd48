"""A family's slices in simulated int8, masked, so that many are judged on one network: what ``simulate`` does sliced.

Weights are rounded per output channel, inputs of layers per tensor, within ranges that the support sets. Of a layer's
input only channels that the slice has count, which are those whose weights are not all masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from apportion.methods.adapt.family import Family
from apportion.methods.adapt.groups import merge_all
from apportion.methods.adapt.masked import call_with, gated_blocks
from apportion.models.network import forward, read_output
from apportion.models.quantise import LEVELS, QUANTISED, fake_quantise_weight

Ranges = dict[str, tuple[Tensor, Tensor]]


def int8_features(
    family: Family, inputs: Mapping[str, Tensor], num_support: int, gate_G: Tensor, keep_G: Tensor
) -> Tensor:
    """Features of support and queries, shape (S + Q, F), with ranges set by the support, which comes first."""
    network, device = family.network, next(iter(inputs.values())).device
    gate_G, keep_G = gate_G.to(device), keep_G.to(device)
    weights = merge_all(family.stacks, gate_G, keep_G)
    layers = {name: layer for name, layer in network.module.named_modules() if isinstance(layer, QUANTISED)}
    for name, layer in layers.items():
        weights.setdefault(f"{name}.weight", layer.weight)
    read = {name: weights[f"{name}.weight"].transpose(0, 1).flatten(1).abs().amax(1) > 0 for name in layers}

    def run(some: Mapping[str, Tensor], used: Mapping[str, Tensor]) -> Any:
        with gated_blocks(network.module, family.groups.blocks(), keep_G):
            return call_with(used, network.module, forward, network.module, some)

    ranges: Ranges = {}
    with watching(layers, read, ranges):
        run({name: tensor[:num_support] for name, tensor in inputs.items()}, weights)
    rounded = {
        name: fake_quantise_weight(tensor) if name.removesuffix(".weight") in ranges else tensor
        for name, tensor in weights.items()
    }
    with rounding(layers, ranges):
        output = run(inputs, rounded)
    return read_output(network, output, inputs)


@contextmanager
def watching(layers: Mapping[str, nn.Module], read: Mapping[str, Tensor], ranges: Ranges) -> Iterator[None]:
    """Notes the least and the greatest number that every layer reads."""

    def watch(name: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            shape = [1] * args[0].dim()
            shape[1 if isinstance(layer, nn.Conv2d) else -1] = len(read[name])
            seen = args[0] * read[name].reshape(shape)
            ranges[name] = (seen.amin().clamp_max(0), seen.amax().clamp_min(0))

        return hook

    with _hooks(layers, watch):
        yield


@contextmanager
def rounding(layers: Mapping[str, nn.Module], ranges: Ranges) -> Iterator[None]:
    """Rounds what every layer is given to unsigned int8 in its range (eq. R4)."""

    def rounder(name: str) -> Any:
        def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            low, high = ranges[name]
            scale = (high - low).clamp_min(1e-12) / LEVELS
            zero = (-low / scale).round()
            return (((args[0] / scale).round() + zero).clamp(0, LEVELS).sub(zero).mul(scale), *args[1:])

        return hook

    with _hooks({name: layer for name, layer in layers.items() if name in ranges}, rounder):
        yield


@contextmanager
def _hooks(layers: Mapping[str, nn.Module], make: Any) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(make(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
