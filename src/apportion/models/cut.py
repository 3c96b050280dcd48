"""Cutting a network: masking (zero what is dropped) and slicing (remove it); both compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from apportion.errors import ModelError
from apportion.models.channels import mixes_channels, num_channels, remove_channels, side_layer, side_weight
from apportion.models.network import Network
from apportion.models.partition import Module, Partition
from apportion.models.skip import Skip, as_output, first_tensor, skip_blocks
from apportion.models.tokens import merge_tokens

Keep = Mapping[str, tuple[int, ...]]


def mask(network: Network, partition: Partition, keep: Keep, *, share_weights: bool = False) -> Network:
    """A copy with the original shapes in which the units not kept have no effect.

    Columns of the consuming layers are zeroed, so whatever a dropped channel computes is never read; dropped blocks
    are bypassed. With ``share_weights`` the untouched weights are the original's own, for a look and not for training.
    """
    module = _copy(network.module, share_weights)
    parts = _parts(network, partition, keep)
    for part, kept in parts:
        for unit, (name, num_outputs) in enumerate(part.blocks):
            if unit not in kept and not isinstance(module.get_submodule(name), Skip):
                module.get_submodule(name).register_forward_hook(_bypass(num_outputs), with_kwargs=True)
    for (name, side), dropped in _dropped(network, partition, parts).items():
        layer = _layer(module, name)
        if layer is not None and side == "in" and mixes_channels(layer):
            weight, dim = side_weight(layer, "in")
            index = torch.tensor(dropped, dtype=torch.long, device=weight.device)
            reader = side_layer(layer, "in")
            reader.weight = nn.Parameter(weight.detach().index_fill(dim, index, 0.0), weight.requires_grad)
    return network.replace(module=module)


def slice_network(network: Network, partition: Partition, keep: Keep, *, share_weights: bool = False) -> Network:
    """A copy without the units not kept: smaller weights, the same function as the masked copy.

    A network that was sliced before can be sliced further; ``keep`` names units of the network that the partition was
    traced on. ``share_weights`` as in ``mask``.
    """
    module = _copy(network.module, share_weights)
    edits = network.edits
    widths = {layer: dict(sides) for layer, sides in edits.widths.items()}
    attributes = {owner: dict(values) for owner, values in edits.attributes.items()}
    skips: dict[str, int] = {}
    parts = _parts(network, partition, keep)
    left, new_keep = _left(network, partition), {}
    for part, kept in parts:
        before = left[part.name]
        new_keep[part.name] = tuple(sorted(_base(partition, part)[unit] for unit in kept))
        if not kept <= before:
            raise ModelError(f"{part.name} can't keep {sorted(kept - before)}, which an earlier slice removed")
        for unit, (name, num_outputs) in enumerate(part.blocks):
            if unit in before and unit not in kept:
                skips[name] = num_outputs
        for (owner, attribute), amount in part.per_unit.items():
            holder = _layer(module, owner)
            if holder is not None and len(kept) < len(before):
                setattr(holder, attribute, amount * len(kept))
                attributes.setdefault(owner, {})[attribute] = amount * len(kept)
    for (name, side), dropped in _dropped(network, partition, parts).items():
        layer = _layer(module, name)
        if layer is None:
            continue  # it went with a skipped block
        if dropped:
            remove_channels(layer, side, dropped)
            for which in ("out", "in"):
                widths.setdefault(name, {})[which] = num_channels(layer, which)
    skip_blocks(module, skips)
    merge_tokens(module, edits.tokens)  # a block that merged may be gone now
    return network.replace(
        module=module,
        edits=replace(
            edits,
            widths=widths,
            attributes=attributes,
            skips={**edits.skips, **skips},
            keep={**edits.keep, **new_keep},
        ),
    )


def _copy(module: nn.Module, share_weights: bool) -> nn.Module:
    shared = [*module.parameters(), *module.buffers()] if share_weights else []
    return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def _base(partition: Partition, part: Module) -> Any:
    return partition.base.get(part.name) or range(part.num_units)


def _left(network: Network, partition: Partition) -> dict[str, set[int]]:
    """The units of every part that earlier slices left."""
    return {name: set(units) for name, units in partition.kept_in(network).items()}


def _dropped(network: Network, partition: Partition, parts: Any) -> dict[tuple[str, Any], list[int]]:
    """For every layer and side, the channels to drop, numbered as they are now; several modules may share a side."""
    before = _left(network, partition)
    kept = before | {part.name: units for part, units in parts}
    sides: dict[tuple[str, Any], list[tuple[Module, tuple[int, ...]]]] = {}
    for part in partition:
        for member in part.members:
            sides.setdefault((member.layer, member.side), []).append((part, member.units))
    result = {}
    for key, owners in sides.items():
        gone = set().union(*(_without(part, units, before[part.name]) for part, units in owners))
        going = set().union(*(_without(part, units, kept[part.name]) for part, units in owners))
        now = [channel for channel in range(len(owners[0][1])) if channel not in gone]
        layer = _layer(network.module, key[0])
        if layer is not None and num_channels(layer, key[1]) != len(now):
            raise ModelError(
                f"{key[0]} has {num_channels(layer, key[1])} {key[1]} channels where the partition counts {len(now)}; "
                "it was cut by another partition: trace the network again"
            )
        result[key] = [index for index, channel in enumerate(now) if channel in going]
    return result


def _without(part: Module, units: tuple[int, ...], left: set[int]) -> set[int]:
    """The channels whose units are not among those left; a negative unit is none of the part's."""
    if len(left) == part.num_units:
        return set()
    return {channel for channel, unit in enumerate(units) if unit >= 0 and unit not in left}


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
