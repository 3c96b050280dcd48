"""The mobile CNN space: kind of block, kernel, expansion, squeeze-excite and skip at every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.core.knob import Setting, Value
from apportion.methods.search.spaces.blocks import BlockSpace


@dataclass(frozen=True, kw_only=True)
class MobileCnn(BlockSpace):
    """A stem, blocks of given base widths and strides, and a linear head."""

    widths: Sequence[int] = (24, 32, 48, 64)
    strides: Sequence[int] = (2, 1, 2, 1)
    stem: int = 16
    image_size: int = 16

    name = "mobile-cnn"
    architecture = "MobileCnnForImageClassification"

    @property
    def num_blocks(self) -> int:
        return len(self.widths)

    def domain(self, arch: Setting, block: int) -> Mapping[str, Sequence[Value]]:
        expand: dict[str, Sequence[Value]] = {} if arch[f"b{block}.kind"] == "regular" else {"expand": (2, 3, 4)}
        skip: dict[str, Sequence[Value]] = {"skip": (0, 1)} if self.strides[block] == 1 else {}
        kinds: tuple[Value, ...] = ("depthwise", "fused", "regular")
        return {"kind": kinds, "kernel": (3, 5, 7), **expand, "squeeze": (0, 1), **skip}

    def start(self) -> Setting:
        values: dict[str, Value] = {}
        for block, (width, stride) in enumerate(zip(self.widths, self.strides, strict=True)):
            spec: dict[str, Value] = {
                "kind": "depthwise",
                "kernel": 3,
                "expand": 3,
                "squeeze": 0,
                "skip": int(stride == 1),
                "width": self.on_grid(width),
                "precision": self.precisions[0],
            }
            values |= {f"b{block}.{name}": value for name, value in spec.items()}
        return Setting(values)

    def config(self, arch: Setting) -> Any:
        from apportion.models.templates import MobileCnnConfig

        blocks = [{**self.spec(arch, block), "stride": stride} for block, stride in enumerate(self.strides)]
        return MobileCnnConfig(
            image_size=self.image_size,
            num_channels=self.num_channels,
            num_classes=self.num_classes,
            stem=self.stem,
            blocks=blocks,
        )
