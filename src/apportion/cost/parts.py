"""The parts of a network that a cost model prices, and the share of its work that a slice leaves each of them.

A part is an attention module with its projections, one linear or convolution layer, or what a residual block costs
beyond its layers. A layer's share is the product of the shares of its input and output channels; a part of a skipped
block has none. Parts of the same shape have the same signature and one curve.

How sizes become shares is a view that fits the target: kernels that write 16 channels at a time do the work of the next
multiple of 16 (``grid``, and ``grid_in`` for the channels that they read), and where activations and norms are not
fused into the layers before them, what linear and convolution layers write has a price of its own. ``view.py`` chooses
by cross-validation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from apportion.device.meters import flops_by_part
from apportion.models.channels import layer_kind, num_channels
from apportion.models.factored import dense_numbers
from apportion.models.network import Network
from apportion.models.partition import Partition

BLOCK = "block:"
WRITTEN = "all:activations"


@dataclass(frozen=True)
class View:
    """How sizes are seen: channels count in multiples, and activations are priced or not."""

    grid: int = 1
    grid_in: int = 1
    activations: bool = False

    @property
    def departures(self) -> int:
        """In how many ways it differs from the plain view."""
        return (self.grid > 1) + (self.grid_in > 1) + self.activations

    def to_json(self) -> dict[str, int | bool]:
        return {"grid": self.grid, "grid_in": self.grid_in, "activations": self.activations}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> View:
        return cls(max(1, int(fields["grid"])), max(1, int(fields["grid_in"])), bool(fields["activations"]))


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
    """All priced parts of a network, with the partition whose slices they follow and the view they are seen under.

    ``written`` holds the numbers that every such layer writes when whole, up to a common factor.
    """

    parts: tuple[Part, ...]
    partition: Partition
    written: Mapping[str, float]
    view: View = View()

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
        written = {}
        for made in parts:
            if made.name in layers:
                layer = network.module.get_submodule(made.name)
                written[made.name] = made.flops * num_channels(layer, "out") / dense_numbers(layer)
        return cls(tuple(parts), partition, written)

    def seen(self, view: View) -> Parts:
        """The same network under another view."""
        parts = tuple(part for part in self.parts if part.name != WRITTEN)
        if view.activations:
            parts = (*parts, Part(WRITTEN, "activations", 0.0, 0, ()))
        return replace(self, parts=parts, view=view)

    @property
    def signature_of(self) -> dict[str, str]:
        return {part.name: part.signature for part in self.parts}

    def shares(
        self, keep: Mapping[str, tuple[int, ...]], tokens: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """The share of its work that every part is left with when the units named are kept; others are whole.

        ``tokens`` is the share of them that enters a block, where fewer do.
        """
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
        left = dict.fromkeys(self.written, 1.0)
        for (layer, side), lost in gone.items():
            share = self._rounded(width[layer, side] - len(lost), width[layer, side], side)
            sides.setdefault(layer, []).append(share)
            if side == "out" and layer in left:
                left[layer] = share
        shares = {}
        for part in self.parts:
            share = heads[part.name] if part.name in heads else math.prod(sides.get(part.name, ()))
            seen = 0.0 if skipped.intersection(part.blocks) else _entering(part.name, tokens or {})
            shares[part.name] = share * seen
            if part.name in left:
                left[part.name] *= seen
        if self.view.activations:
            total = math.fsum(self.written.values())
            shares[WRITTEN] = math.fsum(self.written[name] * left[name] for name in left) / total if total else 1.0
        return shares

    def _rounded(self, num_kept: int, width: int, side: str) -> float:
        grid = self.view.grid if side == "out" else self.view.grid_in
        return min(width, -(-num_kept // grid) * grid) / width


def _entering(name: str, tokens: Mapping[str, float]) -> float:
    return math.prod(
        share for block, share in tokens.items() if name.removeprefix(BLOCK) == block or name.startswith(f"{block}.")
    )
