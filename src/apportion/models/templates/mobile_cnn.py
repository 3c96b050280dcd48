"""A mobile CNN spelled out block by block: depthwise, fused or regular, kernel, expansion, squeeze-excite, skip, width.

Shape letters: N images, C channels, H and W pixels.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from apportion.errors import ModelError

KINDS = ("depthwise", "fused", "regular")
MAX_BLOCKS, MAX_CHANNELS = 64, 4096


class MobileCnnConfig(transformers.PreTrainedConfig):
    """``blocks`` holds a mapping per block: kind, kernel, expand, squeeze, skip, width, stride, precision."""

    model_type = "apportion_mobile_cnn"

    image_size: int = 28
    num_channels: int = 1
    num_classes: int = 10
    stem: int = 16
    blocks: Any = ()


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and, unless it is the last of a block, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, last: bool = False):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.Identity() if last else nn.ReLU(),
        )


class Squeeze(nn.Module):
    """Squeeze-and-excitation: every channel scaled by a small network of all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(8, channels // 4)
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        scale = x_NCHW.mean((2, 3), keepdim=True)
        return x_NCHW * torch.sigmoid(self.up(torch.relu(self.down(scale))))


class Block(nn.Module):
    """One block. ``depthwise`` widens, filters every channel and narrows; ``fused`` widens while filtering; ``regular``
    is a single convolution. The skip is there at stride 1 only, through a 1 × 1 convolution where widths differ."""

    def __init__(self, inputs: int, spec: dict[str, Any]) -> None:
        super().__init__()
        outputs, kernel, stride = spec["width"], spec["kernel"], spec["stride"]
        inner = inputs * spec["expand"]
        if spec["kind"] == "depthwise":
            body = [ConvNorm(inputs, inner, 1), ConvNorm(inner, inner, kernel, stride, groups=inner)]
        elif spec["kind"] == "fused":
            body = [ConvNorm(inputs, inner, kernel, stride)]
        else:
            inner = outputs
            body = [ConvNorm(inputs, outputs, kernel, stride)]
        squeeze = [Squeeze(inner)] if spec["squeeze"] else []
        narrow = [] if spec["kind"] == "regular" else [ConvNorm(inner, outputs, 1, last=True)]
        self.body = nn.Sequential(*body, *squeeze, *narrow)
        self.skip: nn.Module | None = None
        if spec["skip"] and stride == 1:
            self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW = self.body(x_NCHW)
        return y_NCHW if self.skip is None else y_NCHW + self.skip(x_NCHW)


class MobileCnnForImageClassification(transformers.PreTrainedModel):
    """Class logits of images."""

    config_class = MobileCnnConfig
    base_model_prefix = "mobile_cnn"
    main_input_name = "pixel_values"

    def __init__(self, config: MobileCnnConfig) -> None:
        super().__init__(config)
        specs = [check_block(spec) for spec in config.blocks]
        if not 1 <= len(specs) <= MAX_BLOCKS:
            raise ModelError(f"a mobile CNN has 1 to {MAX_BLOCKS} blocks, not {len(specs)}")
        self.stem = ConvNorm(config.num_channels, config.stem, 3)
        widths = [config.stem, *(spec["width"] for spec in specs)]
        self.blocks = nn.ModuleList(Block(inputs, spec) for inputs, spec in zip(widths, specs, strict=False))
        self.head = nn.Linear(widths[-1], config.num_classes)
        self.post_init()

    @property
    def fp32_parts(self) -> list[str]:
        """The modules that an int8 target leaves in fp32."""
        return [f"blocks.{i}" for i, spec in enumerate(self.config.blocks) if spec.get("precision") == "fp32"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, pixel_values: Tensor, **_: Any) -> Tensor:
        x_NCHW = self.stem(pixel_values)
        for block in self.blocks:
            x_NCHW = block(x_NCHW)
        logits: Tensor = self.head(x_NCHW.mean((2, 3)))
        return logits


def check_block(spec: Any) -> dict[str, Any]:
    """A block's decisions, refused where they describe none."""
    try:
        made: dict[str, Any] = {
            "kind": str(spec["kind"]),
            "kernel": int(spec["kernel"]),
            "expand": int(spec["expand"]),
            "squeeze": bool(spec["squeeze"]),
            "skip": bool(spec["skip"]),
            "width": int(spec["width"]),
            "stride": int(spec["stride"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"a block of a mobile CNN can't be read ({type(error).__name__}: {error})") from None
    fits = made["kind"] in KINDS and made["kernel"] in (1, 3, 5, 7, 9) and 1 <= made["expand"] <= 8
    if not (fits and 1 <= made["width"] <= MAX_CHANNELS and made["stride"] in (1, 2)):
        raise ModelError(f"no block of a mobile CNN is {made}; check kind, kernel, expand, width and stride")
    return made


transformers.AutoConfig.register(MobileCnnConfig.model_type, MobileCnnConfig, exist_ok=True)
