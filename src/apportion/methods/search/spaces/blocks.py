"""What spaces of blocks share: decisions by block, ladders of widths on the target's grid, precision where it runs."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.core.knob import Setting, Value
from apportion.errors import ApportionError
from apportion.methods.search.space import Ladder, Proposal, Rung, SpaceError

_SCALES = tuple(2.0 ** (step / 12) for step in range(-12, 13))


@dataclass(frozen=True, kw_only=True)
class BlockSpace(ABC):
    """Blocks with named decisions; a decision of block 2 goes by ``b2.kernel``. Subclasses give domains and a start.

    Widths are multiples of ``align``, the target's grid, between ``min_width`` and ``max_width``. A change at a block
    is paid for by that block's width, or by all widths together, at each of the ``precisions`` that the target runs.
    """

    align: int = 8
    min_width: int = 8
    max_width: int = 512
    precisions: Sequence[str] = ("fp32",)
    image_size: int = 28
    num_channels: int = 1
    num_classes: int = 10

    name = "blocks"
    architecture = ""

    def __post_init__(self) -> None:
        if self.align < 1 or not 1 <= self.min_width <= self.max_width:
            raise ApportionError(f"widths are multiples of {self.align} from {self.min_width} to {self.max_width}")
        if not self.precisions or not set(self.precisions) <= {"fp32", "int8"}:
            raise ApportionError(f"precisions are {list(self.precisions)}; possible are fp32 and int8")

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @abstractmethod
    def domain(self, arch: Setting, block: int) -> Mapping[str, Sequence[Value]]:
        """The micro-choices of a block and their values, in the context of the rest."""

    @abstractmethod
    def start(self) -> Setting: ...

    @abstractmethod
    def config(self, arch: Setting) -> Any:
        """The config that the network is built from."""

    @property
    def layers(self) -> Sequence[str]:
        return [f"b{block}" for block in range(self.num_blocks)]

    def spec(self, arch: Setting, block: int) -> dict[str, Value]:
        """The decisions of a block."""
        prefix = f"b{block}."
        return {name.removeprefix(prefix): value for name, value in arch.items() if name.startswith(prefix)}

    def check(self, arch: Setting) -> None:
        if set(arch) != set(self.start()):
            raise SpaceError(f"an architecture of {self.name} has the decisions {', '.join(sorted(self.start()))}")
        for block in range(self.num_blocks):
            spec = self.spec(arch, block)
            width = spec["width"]
            if not isinstance(width, int) or width % self.align or not self.min_width <= width <= self.max_width:
                raise SpaceError(
                    f"block {block} has width {width!r}; widths are multiples of {self.align} from {self.min_width} to "
                    f"{self.max_width}"
                )
            if spec["precision"] not in self.precisions:
                raise SpaceError(f"block {block} is {spec['precision']}, the target runs {', '.join(self.precisions)}")
            for name, values in self.domain(arch, block).items():
                if spec[name] not in values:
                    raise SpaceError(f"block {block} has {name} {spec[name]!r}; possible are {list(values)}")

    def proposals(self, arch: Setting, layer: str) -> list[Proposal]:
        block = self._block(layer)
        return [
            Proposal(layer, {f"{layer}.{name}": value})
            for name, values in self.domain(arch, block).items()
            for value in values
            if value != arch[f"{layer}.{name}"] and self.valid(arch.replace(f"{layer}.{name}", value))
        ]

    def ladders(self, arch: Setting, layer: str) -> list[Ladder]:
        own, base = f"{layer}.width", arch[f"{layer}.width"]
        assert isinstance(base, int)
        ladders = []
        for precision in self.precisions:
            here = arch.replace(f"{layer}.precision", precision)
            rungs = [Rung(here.replace(own, width), abs(math.log(width / base))) for width in self._grid(base)]
            ladders.append(Ladder(tuple(rungs), ordered=True, label=f"{layer} {precision}"))
            rungs = [Rung(self.scaled(here, scale), 2.0 * abs(math.log(scale))) for scale in _SCALES]
            ladders.append(Ladder(tuple(rungs), ordered=True, label=f"all {precision}"))
        return ladders

    def scaled(self, arch: Setting, scale: float) -> Setting:
        """Every width times a factor, on the grid."""
        edits = {}
        for layer in self.layers:
            width = arch[f"{layer}.width"]
            assert isinstance(width, int)
            edits[f"{layer}.width"] = self.on_grid(width * scale)
        return Setting({**arch, **edits})

    def on_grid(self, width: float) -> int:
        """The nearest width that the target's grid and the limits allow."""
        least = -(-self.min_width // self.align) * self.align
        most = self.max_width // self.align * self.align
        return min(most, max(least, round(width / self.align) * self.align))

    def random(self, rng: random.Random) -> Setting:
        for _ in range(1000):
            arch = self.start()
            for block, layer in enumerate(self.layers):
                for name, values in self.domain(arch, block).items():
                    arch = arch.replace(f"{layer}.{name}", rng.choice(list(values)))
                arch = arch.replace(f"{layer}.precision", rng.choice(list(self.precisions)))
            arch = self.scaled(arch, 2.0 ** rng.uniform(-0.7, 0.7))
            if self.valid(arch):
                return arch
        raise SpaceError(f"no valid architecture of {self.name} was drawn; widen its domains")

    def valid(self, arch: Setting) -> bool:
        """Whether the decisions fit together."""
        return True

    def build(self, arch: Setting, seed: int = 0) -> Any:
        """The network of an architecture, with fresh weights."""
        import torch

        from apportion.models.network import Network, Origin
        from apportion.models.templates import ARCHITECTURES

        self.check(arch)
        config = self.config(arch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = ARCHITECTURES[self.architecture](config)
            inputs = torch.randn(1, self.num_channels, self.image_size, self.image_size)
        return Network(
            module=module.eval(), inputs={"pixel_values": inputs}, origin=Origin(ref=self.name), readout="logits"
        )

    def _grid(self, base: int) -> list[int]:
        low, high = self.on_grid(base / 2), self.on_grid(base * 2)
        return list(range(low, high + 1, self.align))

    def _block(self, layer: str) -> int:
        if layer not in self.layers:
            raise SpaceError(f"{self.name} has no layer {layer!r}; its layers are {', '.join(self.layers)}")
        return int(layer.removeprefix("b"))
