"""The parts of a network that a cost model prices, and the share of its work that a slice leaves each of them.

A part is an attention module with its projections, one linear or convolution layer, or what a residual block costs
beyond its layers. A layer's share is the product of the shares of its input and output channels; a part of a skipped
block has none. Parts of the same shape have the same signature and one curve.

How sizes become shares is a view that fits the target: kernels that work on 16 channels at a time do the work of the
next multiple of 16 (``grid``), and where activations and norms are not fused into the layers before them, the width of
every module has a price of its own (``widths``). ``view.py`` chooses by cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from apportion.device.meters import flops_by_part
from apportion.models.channels import layer_kind, num_channels
from apportion.models.network import Network
from apportion.models.partition import Partition

BLOCK = "block:"
WIDTH = "width:"


@dataclass(frozen=True)
class Part:
    """One priced part: its signature, its operations and parameters when whole, and the blocks it lives in."""

    name: str
    signature: str
    flops: float
    params: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """All priced parts of a network, with the partition whose slices they follow."""

    parts: tuple[Part, ...]
    partition: Partition
    grid: int = 1
    spare: tuple[Part, ...] = ()  # the widths, while they are not priced

    @classmethod
    def of(cls, network: Network, partition: Partition) -> Parts:
        flops = flops_by_part(network)
        blocks = [name for module in partition for name, _ in module.blocks]

        def part(name: str, signature: str, count: int) -> Part:
            inside = tuple(block for block in blocks if name == block or name.startswith(f"{block}."))
            holder = network.module.get_submodule(name.removesuffix(".heads"))
            params = sum(parameter.numel() for parameter in holder.parameters())
            return Part(name, f"{signature} {count:g}", float(count), params, inside)

        parts = []
        in_attention = set()
        for module in partition:
            if module.kind == "heads":
                owner = module.name.removesuffix(".heads")
                parts.append(part(module.name, f"heads {module.num_units}", flops.get(owner, 0)))
                in_attention |= {member.layer for member in module.members}
        layers = dict.fromkeys(member.layer for module in partition for member in module.members)
        for name in layers:
            layer = network.module.get_submodule(name)
            kind = layer_kind(layer)
            if name in in_attention or kind not in ("linear", "conv", "depthwise"):
                continue
            shape = f"{num_channels(layer, 'in')}x{num_channels(layer, 'out')}"
            parts.append(part(name, f"{kind} {shape}", flops.get(name, 0)))
        for module in partition:
            for name, _ in module.blocks:
                kind = type(network.module.get_submodule(name)).__name__
                parts.append(Part(BLOCK + name, f"block {kind} {flops.get(name, 0):g}", 0.0, 0, (name,)))
        widths = []
        for module in partition:
            makers = [member.layer for member in module.members if member.side == "out"]
            if module.kind != "heads" and makers:
                inside = tuple(block for block in blocks if makers[0].startswith(f"{block}."))
                signature = f"width {module.num_units} {flops.get(makers[0], 0):g}"
                widths.append(Part(WIDTH + module.name, signature, 0.0, 0, inside))
        return cls(tuple(parts), partition, spare=tuple(widths))

    def seen(self, *, grid: int = 1, widths: bool = False) -> Parts:
        """The same network under another view: channels count in multiples of ``grid``, widths are priced or not."""
        plain = tuple(part for part in self.parts if not part.name.startswith(WIDTH))
        spare = (*self.spare, *(part for part in self.parts if part.name.startswith(WIDTH)))
        if widths:
            return Parts((*plain, *spare), self.partition, grid)
        return Parts(plain, self.partition, grid, spare)

    @property
    def widths(self) -> bool:
        return any(part.name.startswith(WIDTH) for part in self.parts)

    @property
    def signature_of(self) -> dict[str, str]:
        return {part.name: part.signature for part in self.parts}

    def shares(self, keep: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
        """The share of its work that every part is left with when the units named are kept; others are whole."""
        kept = {name: set(units) for name, units in keep.items()}
        skipped = {
            name
            for module in self.partition
            for unit, (name, _) in enumerate(module.blocks)
            if module.name in kept and unit not in kept[module.name]
        }
        heads = {
            m.name: len(kept[m.name]) / m.num_units for m in self.partition if m.kind == "heads" and m.name in kept
        }
        gone: dict[tuple[str, str], set[int]] = {}  # several modules may own channels of one side
        width: dict[tuple[str, str], int] = {}
        for module in self.partition:
            for member in module.members if module.name in kept else ():
                lost = {c for c, unit in enumerate(member.units) if unit >= 0 and unit not in kept[module.name]}
                gone.setdefault((member.layer, member.side), set()).update(lost)
                width[member.layer, member.side] = len(member.units)
        sides: dict[str, list[float]] = {}
        for (layer, side), lost in gone.items():
            sides.setdefault(layer, []).append(self._rounded(width[layer, side] - len(lost), width[layer, side]))
        num_units = {module.name: module.num_units for module in self.partition}
        shares = {}
        for part in self.parts:
            if skipped.intersection(part.blocks):
                shares[part.name] = 0.0
            elif part.name in heads:
                shares[part.name] = heads[part.name]
            elif part.name.startswith(WIDTH):
                units = num_units[part.name.removeprefix(WIDTH)]
                shares[part.name] = len(kept.get(part.name.removeprefix(WIDTH), range(units))) / units
            else:
                shares[part.name] = math.prod(sides.get(part.name, ()))
        return shares

    def _rounded(self, num_kept: int, width: int) -> float:
        return min(width, -(-num_kept // self.grid) * self.grid) / width
