"""EfficientNet-Lite0 as a transformers model: inverted residual blocks with ReLU6 and no squeeze-and-excitation."""

from __future__ import annotations

from typing import Any, cast

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention

# repeats, kernel, stride of the first, expansion, channels out
LITE0_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class EfficientNetLiteConfig(transformers.PreTrainedConfig):
    """Sizes of the network; the defaults are Lite0."""

    model_type = "efficientnet_lite"

    image_size: int = 224
    num_channels: int = 3
    stem_channels: int = 32
    head_channels: int = 1280
    norm_eps: float = 1e-3
    stages: Any = LITE0_STAGES


class ConvNorm(nn.Module):
    """Convolution and batch norm, padded as TensorFlow does for even sizes: one more on the right and below."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        kernel: int,
        eps: float,
        stride: int = 1,
        groups: int = 1,
        active: bool = True,
    ) -> None:
        super().__init__()
        before = (kernel - stride) // 2
        after = kernel - stride - before
        self.pad = nn.ZeroPad2d((before, after, before, after)) if before != after else nn.Identity()
        padding = before if before == after else 0
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=eps, momentum=0.01)
        self.act = nn.ReLU6() if active else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(self.pad(x_NCHW))))


class InvertedResidual(nn.Module):
    """Widen, filter every channel, narrow; the input is added where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, expansion: int, eps: float) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand = ConvNorm(inputs, width, kernel=1, eps=eps) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(width, width, kernel=kernel, stride=stride, groups=width, eps=eps)
        self.project = ConvNorm(width, outputs, kernel=1, eps=eps, active=False)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW = self.project(self.depthwise(self.expand(x_NCHW)))
        return x_NCHW + y_NCHW if self.is_residual else y_NCHW


class EfficientNetLiteModel(transformers.PreTrainedModel):
    """Feature maps (N, 1280, H/32, W/32) and their mean."""

    config_class = EfficientNetLiteConfig
    base_model_prefix = "efficientnet_lite"
    main_input_name = "pixel_values"

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        eps, channels = config.norm_eps, config.stem_channels
        self.stem = ConvNorm(config.num_channels, channels, kernel=3, stride=2, eps=eps)
        blocks = []
        for repeats, kernel, first_stride, expansion, outputs in config.stages:
            for repeat in range(repeats):
                stride = first_stride if repeat == 0 else 1
                blocks.append(
                    InvertedResidual(channels, outputs, kernel=kernel, stride=stride, expansion=expansion, eps=eps)
                )
                channels = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = ConvNorm(channels, config.head_channels, kernel=1, eps=eps)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPoolingAndNoAttention:
        x_NCHW = self.stem(pixel_values)
        for block in self.blocks:
            x_NCHW = block(x_NCHW)
        x_NCHW = self.head(x_NCHW)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=x_NCHW,
            pooler_output=cast(Any, x_NCHW.mean(dim=(2, 3))),  # declared in ways that differ between versions
        )


transformers.AutoConfig.register("efficientnet_lite", EfficientNetLiteConfig, exist_ok=True)
transformers.AutoModel.register(EfficientNetLiteConfig, EfficientNetLiteModel, exist_ok=True)
