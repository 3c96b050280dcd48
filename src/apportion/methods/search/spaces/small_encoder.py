"""The small encoder space: window, heads, head size, MLP ratio, norm, activation, pooling, fused projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apportion.core.knob import Setting, Value
from apportion.errors import ModelError
from apportion.methods.search.spaces.blocks import BlockSpace


@dataclass(frozen=True, kw_only=True)
class SmallEncoder(BlockSpace):
    """Square patches, blocks of attention and MLP over one residual stream, a linear head on the mean token."""

    num_encoder_blocks: int = 4
    image_size: int = 32
    patch: int = 4
    features: int = 64

    name = "small-encoder"
    architecture = "SmallEncoderForImageClassification"

    @property
    def num_blocks(self) -> int:
        return self.num_encoder_blocks

    def domain(self, arch: Setting, block: int) -> Mapping[str, Sequence[Value]]:
        return {
            "window": (0, 2, 4),
            "heads": (2, 4, 8),
            "head_size": (8, 16, 32),
            "ratio": (1, 2, 4),
            "norm": ("layer", "rms"),
            "act": ("gelu", "relu", "silu"),
            "pool": (0, 1),
            "fused": (0, 1),
        }

    def start(self) -> Setting:
        spec: dict[str, Value] = {
            "window": 0,
            "heads": 4,
            "head_size": 16,
            "ratio": 2,
            "width": self.on_grid(self.features),
            "norm": "layer",
            "act": "gelu",
            "pool": 0,
            "fused": 1,
            "precision": self.precisions[0],
        }
        return Setting({f"b{block}.{name}": v for block in range(self.num_blocks) for name, v in spec.items()})

    def valid(self, arch: Setting) -> bool:
        from apportion.models.templates.small_encoder import check_block, grid_sides

        try:
            grid_sides(
                self.image_size // self.patch, [check_block(self.spec(arch, block)) for block in range(self.num_blocks)]
            )
        except ModelError:
            return False
        return True

    def config(self, arch: Setting) -> Any:
        from apportion.models.templates import SmallEncoderConfig

        return SmallEncoderConfig(
            image_size=self.image_size,
            num_channels=self.num_channels,
            num_classes=self.num_classes,
            patch=self.patch,
            features=self.features,
            blocks=[self.spec(arch, block) for block in range(self.num_blocks)],
        )
