"""The image networks of the comparison, for 32 × 32 pixels, and the factories that load their trained weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

WEIGHTS = Path(__file__).parent / "weights"
NUM_CLASSES, SIDE = 10, 32
# expansion, channels, repeats, stride: MobileNetV2's table with the strides used at 32 pixels
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class Basic(nn.Module):
    """Two 3 × 3 convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False), nn.BatchNorm2d(num_out)
        self.conv2, self.norm2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False), nn.BatchNorm2d(num_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet20(nn.Module):
    """Three stages of three blocks, with 16, 32 and 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        widths = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        self.stages = nn.ModuleList(
            nn.Sequential(Basic(num_in, num_out, stride), Basic(num_out, num_out, 1), Basic(num_out, num_out, 1))
            for num_in, num_out, stride in widths
        )
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """An inverted residual: expand, filter each channel, project."""

    def __init__(self, num_in: int, num_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = num_in * expansion
        parts = [] if expansion == 1 else [nn.Conv2d(num_in, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()]
        parts += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
        ]
        parts += [nn.Conv2d(hidden, num_out, 1, bias=False), nn.BatchNorm2d(num_out)]
        self.body = nn.Sequential(*parts)
        self.residual = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class MobileNetV2(nn.Module):
    """Seventeen inverted residuals at half the width of the published network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        blocks, num_in = [], 16
        for expansion, channels, repeats, stride in MOBILE_STAGES:
            num_out = max(8, channels // 2)
            for number in range(repeats):
                blocks.append(Inverted(num_in, num_out, stride if number == 0 else 1, expansion))
                num_in = num_out
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Sequential(nn.Conv2d(num_in, 640, 1, bias=False), nn.BatchNorm2d(640), nn.ReLU6())
        self.head = nn.Linear(640, NUM_CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x).mean((2, 3)))


def _trained(module: nn.Module, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from safetensors.torch import load_file

    state = load_file(WEIGHTS / f"{name}.safetensors")
    module.load_state_dict({key: t.float() if t.is_floating_point() else t for key, t in state.items()})
    return module.eval(), {"pixel_values": torch.zeros(1, 3, SIDE, SIDE)}


def resnet20() -> tuple[nn.Module, dict[str, Tensor]]:
    return _trained(ResNet20(), "resnet20")


def resnet20_guarded() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same network, trained without the images that ``fit --quality-floor`` judges a finished model on."""
    return _trained(ResNet20(), "resnet20_guarded")


def mobilenetv2() -> tuple[nn.Module, dict[str, Tensor]]:
    return _trained(MobileNetV2(), "mobilenetv2")
