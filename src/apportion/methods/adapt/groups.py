"""Groups: every learned parameter of a network belongs to one group of one module, and so do the gates.

A sliceable module has a group for every step of its sizes, in its order of importance: keeping the first groups is
keeping the most important units. A block is a group of its list of blocks; what a block holds outside of its sliceable
modules (norms, biases of readers) belongs to it. Shape letters: G groups, N parameters of one shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apportion.errors import ModelError
from apportion.models.channels import mixes_channels, side_weight
from apportion.models.network import Network
from apportion.models.partition import Module, Partition


@dataclass(frozen=True)
class Groups:
    """The groups of a partition, numbered module by module; ``count`` is also the number that means "always on".

    With ``fine`` every unit is a group of its own, which is how an order of importance is found.
    """

    partition: Partition
    fine: bool = False

    def step(self, module: Module) -> int:
        """Units per group."""
        return 1 if self.fine else module.multiple

    def size(self, module: Module) -> int:
        """How many groups a module has."""
        return -(-module.num_units // self.step(module))

    @property
    def count(self) -> int:
        return sum(self.size(module) for module in self.partition)

    def offsets(self) -> dict[str, int]:
        """The number of the first group of every module."""
        first, offsets = 0, {}
        for module in self.partition:
            offsets[module.name] = first
            first += self.size(module)
        return offsets

    def of_units(self, module: Module) -> list[int]:
        """The group of every unit."""
        first, rank = self.offsets()[module.name], {unit: place for place, unit in enumerate(module.order)}
        return [first + rank[unit] // self.step(module) for unit in range(module.num_units)]

    def module_G(self) -> Tensor:
        """The place of every group's module in the partition."""
        return torch.repeat_interleave(
            torch.arange(len(self.partition)), torch.tensor([self.size(module) for module in self.partition])
        )

    def rank_G(self) -> Tensor:
        """The place of every group in the order of its module."""
        return torch.cat([torch.arange(self.size(module)) for module in self.partition])

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Blocks by name: their group and how many outputs they return."""
        found = {}
        for module in self.partition:
            groups = self.of_units(module)
            for unit, (name, num_outputs) in enumerate(module.blocks):
                found[name] = (groups[unit], num_outputs)
        return found


class Place(NamedTuple):
    """Where a parameter's numbers lie: the dimension that runs over groups, each one's group, and who reads them."""

    dim: int
    group: tuple[int, ...]
    keep_dim: int
    keep: tuple[int, ...] | None


def places(network: Network, groups: Groups) -> dict[str, Place]:
    """The place of every parameter that may change: those of the blocks, or of the sliceable layers without blocks."""
    always = groups.count
    blocks = groups.blocks()
    written: dict[str, tuple[int, ...]] = {}  # layer -> group of every output channel
    read: dict[str, tuple[int, ...]] = {}
    for module in groups.partition:
        number = groups.of_units(module)
        for member in module.members:
            channels = tuple(number[unit] if unit >= 0 else always for unit in member.units)
            side = written if member.side == "out" else read
            if member.layer in side:  # several modules own channels of one side: none of them alone decides
                channels = tuple(min(a, b) for a, b in zip(side[member.layer], channels, strict=True))
            side[member.layer] = channels
    found = {}
    for name, parameter in network.module.named_parameters():
        layer, _, kind = name.rpartition(".")
        home = next((group for block, (group, _) in blocks.items() if name.startswith(f"{block}.")), None)
        if home is None and (blocks or layer not in {**written, **read}):
            continue
        holder = network.module.get_submodule(layer)
        keep_dim, keep, dim = 0, None, 0
        own: tuple[int, ...] | None = None
        if kind == "weight" and mixes_channels(holder):
            if layer in read:
                keep_dim, keep = side_weight(holder, "in")[1], read[layer]
                dim, own = keep_dim, read[layer]
            if layer in written:
                dim, own = side_weight(holder, "out")[1], written[layer]
        elif layer in written and len(parameter) == len(written[layer]):
            own = written[layer]
        if own is None:
            own = (always if home is None else home,) * parameter.shape[0]
        else:
            own = tuple(home if group == always and home is not None else group for group in own)
        found[name] = Place(dim, own, keep_dim, keep)
    if not found:
        raise ModelError("the network has no parameter that could change; choose one with blocks or sliceable layers")
    return found


class Bundle(nn.Module):
    """Parameters of one shape and layout, stacked, so that all are merged at once."""

    base: Tensor
    group: Tensor
    keep: Tensor | None
    gate_logit: nn.Parameter | None  # of every single number by every expert, where masks are not by groups

    def __init__(self, names: tuple[str, ...], base: Tensor, places: list[Place]) -> None:
        super().__init__()
        self.names, self.dim, self.keep_dim = names, places[0].dim + 1, places[0].keep_dim + 1
        self.delta = nn.Parameter(torch.zeros_like(base))
        self.register_buffer("base", base, persistent=False)
        self.register_buffer("group", torch.tensor([place.group for place in places]), persistent=False)
        keep = None if places[0].keep is None else torch.tensor([place.keep for place in places])
        self.register_buffer("keep", keep, persistent=False)
        self.gate_logit = None

    def gate_each(self, num_experts: int, generator: torch.Generator) -> None:
        """Gives every number of the delta a gate of its own for every expert."""
        self.gate_logit = nn.Parameter(start_logits((num_experts, *self.delta.shape), generator))

    def merge(self, gate: Tensor, keep_G: Tensor) -> dict[str, Tensor]:
        """Base plus gated delta, with the columns that read dropped groups zeroed.

        Gates are one for every number of the delta, or one for every group and a one; keep gates end with a one.
        """
        each = gate.view_as(self.delta) if self.gate_logit is not None else self._spread(gate[self.group], self.dim)
        weight = self.base + each * self.delta
        if self.keep is not None:
            weight = weight * self._spread(keep_G[self.keep], self.keep_dim)
        return dict(zip(self.names, weight.unbind(0), strict=True))

    def kept(self, keep_G: Tensor) -> Tensor:
        """Which numbers of the delta are in what is kept and read by what is kept, in its shape."""
        kept = self._spread(keep_G[self.group], self.dim).expand_as(self.delta)
        return kept if self.keep is None else kept * self._spread(keep_G[self.keep], self.keep_dim)

    def _spread(self, value_NC: Tensor, dim: int) -> Tensor:
        shape = [1] * self.delta.dim()
        shape[0], shape[dim] = value_NC.shape
        return value_NC.reshape(shape)


def bundles(network: Network, groups: Groups) -> nn.ModuleList:
    """All parameters that may change, stacked by shape and layout."""
    found = places(network, groups)
    parameters = dict(network.module.named_parameters())
    alike: dict[object, list[str]] = {}
    for name, place in found.items():
        key = (tuple(parameters[name].shape), place.dim, place.keep_dim, place.keep is None)
        alike.setdefault(key, []).append(name)
    return nn.ModuleList(
        Bundle(tuple(names), torch.stack([parameters[n].detach().float() for n in names]), [found[n] for n in names])
        for names in alike.values()
    )


def start_logits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Logits of gates, one row per expert: mostly open, and unlike those of other experts where there are any."""
    logits = 2.0 + torch.randn(shape, generator=generator)
    return logits if shape[0] > 1 else torch.full_like(logits, 4.0)


def merge_all(stacks: nn.ModuleList, gate: Tensor, keep_G: Tensor) -> dict[str, Tensor]:
    """Every parameter that may change, by name; ``gate`` is one for every group, or for every number of the delta."""
    one = keep_G.new_ones(1)
    keep_G = torch.cat([keep_G, one])
    some = [bundle for bundle in stacks if isinstance(bundle, Bundle)]
    if any(bundle.gate_logit is not None for bundle in some):
        gates = list(gate.split([bundle.delta.numel() for bundle in some]))
    else:
        gates = [torch.cat([gate, one])] * len(some)
    merged: dict[str, Tensor] = {}
    for bundle, own in zip(some, gates, strict=True):
        merged |= bundle.merge(own, keep_G)
    return merged


def keep_of(groups: Groups, sizes: Mapping[str, int]) -> Tensor:
    """The keep gates of sizes, one for a group that is kept and zero for one that is not."""
    kept = torch.tensor([-(-sizes[module.name] // groups.step(module)) for module in groups.partition])
    return (groups.rank_G() < kept[groups.module_G()]).float()
