"""Meters that need no clock: parameters, size on disk and floating-point operations."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from apportion.core.meter import Reading
from apportion.models.network import Network, forward
from apportion.models.quantise import quantised_layers
from apportion.models.sparse import stored_bytes

_HEADER_BYTES = 160  # of one tensor in a safetensors header, at most


class ParameterCount:
    """Numbers held by the parameters, shared ones once."""

    unit = "params"

    def read(self, model: Network) -> Reading:
        return Reading(value=float(sum(p.numel() for p in model.module.parameters())), unit=self.unit)


class SizeOnDisk:
    """Bytes of the safetensors file that ``models.save`` writes, bounded from above before it is written.

    Weights with many zeros count as they are stored there, with the zeros left out. Of a network that a graph runtime
    is to quantise it is the size of its artefact: a byte for every weight of its linear and convolution layers.
    """

    unit = "B"

    def read(self, model: Network) -> Reading:
        tensors = {tensor.data_ptr(): tensor for tensor in model.module.state_dict().values()}
        size_bytes = 0
        small = _int8_weights(model) if model.precision == "int8" else set()
        for place, tensor in tensors.items():
            if place in small:
                size_bytes += tensor.numel() + _HEADER_BYTES
                continue
            stored, dense = stored_bytes(tensor), tensor.numel() * tensor.element_size()
            size_bytes += stored + (2 if stored < dense else 1) * _HEADER_BYTES
        return Reading(value=float(size_bytes), unit=self.unit)


def _int8_weights(model: Network) -> set[int]:
    if model.int8.by_torch:
        return set()  # torch quantises when it loads the file, which is in float
    return {layer.weight.data_ptr() for layer in quantised_layers(model).values()}  # type: ignore[operator]


class FlopCount:
    """Floating-point operations of one forward pass on the example inputs, a multiply-add counted as two."""

    unit = "FLOPs"

    def read(self, model: Network) -> Reading:
        return Reading(value=float(flops_by_part(model)[""]), unit=self.unit)


def flops_by_part(network: Network) -> dict[str, int]:
    """Floating-point operations of every submodule by name; the whole model goes by the empty name."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        forward(network.module, network.inputs)
    root = type(network.module).__name__
    return {
        name.removeprefix(root).removeprefix(".") if name != "Global" else "": sum(by_op.values())
        for name, by_op in counter.get_flop_counts().items()
        if name == "Global" or name.startswith(f"{root}.")
    }
