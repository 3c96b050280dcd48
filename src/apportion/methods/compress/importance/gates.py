"""Gates: a factor of one on every unit, where it is read; how the loss follows them says what the units matter.

Shape letters: N examples, U units, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apportion.errors import ModelError
from apportion.models.channels import channels_last, mixes_channels
from apportion.models.network import Network, traceable
from apportion.models.partition import Member, Module, Partition
from apportion.models.skip import Skip, first_tensor


@contextmanager
def gated(network: Network, partition: Partition, num_examples: int | None = None) -> Iterator[dict[str, Tensor]]:
    """Puts a gate on every unit and makes forward passes leave an autograd graph, until the block ends.

    Gates are of shape ``(U,)``; with ``num_examples`` of shape ``(N, U)``, one for every example of the batch, so that
    one backward pass gives the gradient of every example by itself. That takes a model that keeps the examples apart
    along the first dimension.
    """
    shape = () if num_examples is None else (num_examples,)
    gates: dict[str, Tensor] = {}
    handles: list[Any] = []
    try:
        for part in partition:
            gate = gates[part.name] = torch.ones((*shape, part.num_units), requires_grad=True)
            for unit, (name, _) in enumerate(part.blocks):
                block = network.module.get_submodule(name)
                if not isinstance(block, Skip):
                    handles.append(block.register_forward_hook(_gate_block(gate, unit), with_kwargs=True))
            for member, layer in readers(network.module, part):
                handles.append(layer.register_forward_pre_hook(_gate_input(gate, member)))
        with traceable(network.module):
            yield gates
    finally:
        for handle in handles:
            handle.remove()


def readers(module: nn.Module, part: Module) -> Iterator[tuple[Member, nn.Module]]:
    """The layers that read a part's units, with the member that says which channel is which unit's."""
    for member in part.members:
        layer = module.get_submodule(member.layer)
        if member.side == "in" and mixes_channels(layer):
            yield member, layer


def per_unit(value_C: Tensor, units: tuple[int, ...], num_units: int, reduce: str) -> Tensor:
    """Values of channels gathered by the unit they belong to; units without a channel get zero."""
    index_C = torch.tensor(units)
    inside = index_C >= 0
    result = torch.zeros(num_units, dtype=value_C.dtype)
    return result.scatter_reduce(0, index_C[inside], value_C[inside], reduce=reduce, include_self=False)


def _gate_input(gate: Tensor, member: Member) -> Any:
    index_C = torch.tensor(member.units)

    def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0]
        factor = torch.where(index_C >= 0, gate[..., index_C.clamp_min(0)], torch.ones(()))
        if gate.dim() == 2:
            factor = _for_rows(factor, len(x), member.layer)
        between = x.dim() - factor.dim()
        if channels_last(layer):
            factor = factor.view(*factor.shape[:-1], *[1] * between, factor.shape[-1])
        else:  # (N, C, …)
            factor = factor.view(*factor.shape, *[1] * (x.dim() - 2))
        return (x * factor.to(x.dtype), *args[1:])

    return hook


def _gate_block(gate: Tensor, unit: int) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stream = first_tensor(args, kwargs)
        main = output[0] if isinstance(output, tuple) else output
        factor = gate[..., unit]
        if factor.dim():
            factor = _for_rows(factor, len(main), type(_module).__name__).view(-1, *[1] * (main.dim() - 1))
        gated_main = stream + factor.to(main.dtype) * (main - stream)
        return (gated_main, *output[1:]) if isinstance(output, tuple) else gated_main

    return hook


def _for_rows(factor_N: Tensor, num_rows: int, name: str) -> Tensor:
    """Gates of examples repeated for the rows that a layer reads: windows or tokens of one example lie together."""
    if num_rows % len(factor_N):
        raise ModelError(
            f"{name} reads {num_rows} rows for {len(factor_N)} examples, so examples can't be told apart there; use "
            "taylor, magnitude or activation"
        )
    return factor_N.repeat_interleave(num_rows // len(factor_N), 0)
