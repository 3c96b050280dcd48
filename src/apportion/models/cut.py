"""Cutting a network: masking (zero what is dropped) and slicing (remove it); both compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from apportion.errors import ModelError
from apportion.models.channels import input_weight, mixes_channels, num_channels, remove_channels
from apportion.models.network import Edits, Network
from apportion.models.partition import Module, Partition
from apportion.models.skip import as_output, first_tensor, skip_blocks

Keep = Mapping[str, tuple[int, ...]]


def mask(network: Network, partition: Partition, keep: Keep) -> Network:
    """A copy with the original shapes in which the units not kept have no effect.

    Columns of the consuming layers are zeroed, so whatever a dropped channel computes is never read; dropped blocks
    are bypassed.
    """
    module = copy.deepcopy(network.module)
    for part, kept in _parts(network, partition, keep):
        for name, num_outputs in part.blocks:
            if part.blocks.index((name, num_outputs)) not in kept:
                module.get_submodule(name).register_forward_hook(_bypass(num_outputs), with_kwargs=True)
        for member in part.members:
            layer = module.get_submodule(member.layer)
            if member.side == "in" and mixes_channels(layer):
                weight, dim = input_weight(layer)
                dropped = [index for index, unit in enumerate(member.units) if unit >= 0 and unit not in kept]
                with torch.no_grad():
                    weight.index_fill_(dim, torch.tensor(dropped, dtype=torch.long), 0.0)
    return network.replace(module=module)


def slice_network(network: Network, partition: Partition, keep: Keep) -> Network:
    """A copy without the units not kept: smaller weights, the same function as the masked copy.

    A network that was sliced before can be sliced further; ``keep`` names units of the original network.
    """
    module = copy.deepcopy(network.module)
    edits = network.edits
    widths = {layer: dict(sides) for layer, sides in edits.widths.items()}
    attributes = {owner: dict(values) for owner, values in edits.attributes.items()}
    skips: dict[str, int] = {}
    for part, kept in _parts(network, partition, keep):
        before = set(edits.keep.get(part.name, range(part.num_units)))
        if not kept <= before:
            raise ModelError(f"{part.name} can't keep {sorted(kept - before)}, which an earlier slice removed")
        for unit, (name, num_outputs) in enumerate(part.blocks):
            if unit in before and unit not in kept:
                skips[name] = num_outputs
        for member in part.members:
            layer = _layer(module, member.layer)
            if layer is None:
                continue  # it went with a skipped block
            present = [unit for unit in member.units if unit < 0 or unit in before]
            dropped = [index for index, unit in enumerate(present) if unit >= 0 and unit not in kept]
            if dropped:
                remove_channels(layer, member.side, dropped)
                for side in ("out", "in"):
                    widths.setdefault(member.layer, {})[side] = num_channels(layer, side)
        for (owner, attribute), amount in part.per_unit.items():
            holder = _layer(module, owner)
            if holder is not None and len(kept) < len(before):
                setattr(holder, attribute, amount * len(kept))
                attributes.setdefault(owner, {})[attribute] = amount * len(kept)
    skip_blocks(module, skips)
    return network.replace(
        module=module,
        edits=Edits(
            widths=widths,
            attributes=attributes,
            skips={**edits.skips, **skips},
            keep={**edits.keep, **{name: tuple(sorted(kept)) for name, kept in keep.items()}},
        ),
    )


def _parts(network: Network, partition: Partition, keep: Keep) -> list[tuple[Module, set[int]]]:
    """The modules to cut, blocks last: a block is cut before it is dropped, so both orders give the same edits."""
    parts = []
    for name, units in keep.items():
        part, kept = partition[name], set(units)
        if (len(kept) < part.minimum and part.kind == "blocks") or (not kept and part.kind != "blocks"):
            raise ModelError(f"{name} was asked to keep nothing; it must keep at least {part.minimum}")
        if not kept <= set(range(part.num_units)):
            raise ModelError(f"{name} was asked to keep {sorted(kept)} of its units 0 to {part.num_units - 1}")
        parts.append((part, kept))
    return sorted(parts, key=lambda pair: pair[0].kind == "blocks")


def _bypass(num_outputs: int) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, _output: Any) -> Any:
        return as_output(first_tensor(args, kwargs), num_outputs)

    return hook


def _layer(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
