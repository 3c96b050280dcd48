"""Simulated int8: what a network computes when its layers are quantised after training, run in float."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from apportion.models.dynamic import quantise_dynamically
from apportion.models.network import Network, forward
from apportion.models.processor import int8_saturates

LEVELS = 255
LINEAR = (nn.Linear, Conv1D)
QUANTISED = (*LINEAR, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def fake_quantise_weight(weight: Tensor, dim: int = 0, largest: int = 127) -> Tensor:
    r"""Weights rounded to symmetric int8, with a scale for each output channel (eq. R3).

    .. math:: \hat w = s \cdot \mathrm{clip}(\mathrm{round}(w / s), -q, q), \qquad s = \max |w| / q

    :math:`q` is the ``largest`` number, 127, or 64 where runtimes leave a bit free.
    """
    other = [axis for axis in range(weight.dim()) if axis != dim]
    scale = weight.abs().amax(other, keepdim=True).clamp_min(1e-12) / largest
    return (weight / scale).round().clamp(-largest, largest) * scale


def fake_quantise_input(x: Tensor, low: float, high: float) -> Tensor:
    r"""Activations rounded to unsigned int8 between ``low`` and ``high`` (eq. R4).

    .. math:: \hat x = s (\mathrm{clip}(\mathrm{round}(x / s) + z, 0, 255) - z), \qquad s = (h - l) / 255
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max(high - low, 1e-12) / LEVELS
    zero = round(-low / scale)
    return ((x / scale).round() + zero).clamp(0, LEVELS).sub(zero).mul(scale)


def simulate(network: Network, ranges: Mapping[str, tuple[float, float]] | None = None) -> Network:
    """A copy that computes what int8 would, with ranges set by the network's calibration inputs.

    Layers are quantised but for those that stay in float: weights per output channel, inputs per tensor. ``ranges`` are
    those of the network's inputs, where they are known already.
    """
    int8, module = network.int8, copy.deepcopy(network.module)
    if int8.by_torch:  # nothing to simulate
        return network.replace(module=quantise_dynamically(module, int8.covers), calibration=())
    ranges = ranges or input_ranges(network.module, network.calibration)
    largest = 64 if int8_saturates() else 127
    with torch.no_grad():
        for name, layer in quantised_layers(network.replace(module=module)).items():
            if name in ranges:  # else it is not run
                assert isinstance(layer.weight, Tensor)
                dim = 1 if isinstance(layer, Conv1D) else 0
                layer.weight.copy_(fake_quantise_weight(layer.weight, dim, largest))
                layer.register_forward_pre_hook(_rounding(ranges[name] if int8.scope != "dynamic" else None))
    return network.replace(module=module, calibration=())


def quantised_layers(network: Network) -> dict[str, nn.Module]:
    """The layers that the network's recipe quantises, by name."""
    kinds = LINEAR if network.int8.scope == "dynamic" else QUANTISED
    layers = network.module.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, kinds) and network.int8.covers(name)}


def input_ranges(module: nn.Module, batches: tuple[Mapping[str, Tensor], ...]) -> dict[str, tuple[float, float]]:
    """The least and the greatest input of every layer that can be quantised, over some batches."""
    ranges: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = (min(low, args[0].min().item()), max(high, args[0].max().item()))

        return hook

    handles = [
        layer.register_forward_pre_hook(watch(name))
        for name, layer in module.named_modules()
        if isinstance(layer, QUANTISED)
    ]
    try:
        with torch.inference_mode():
            forward(module, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
    finally:
        for handle in handles:
            handle.remove()
    return ranges


def _rounding(between: tuple[float, float] | None) -> Any:
    """Rounds what a layer is given, in a range or in the range of what is given."""

    def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        return (fake_quantise_input(x, *(between or (x.min().item(), x.max().item()))), *args[1:])

    return hook
