"""A small vision encoder spelled out block by block: window, heads, head size, MLP ratio, norm, activation, pooling.

Shape letters: N images (or windows), T tokens, D features, G side of the token grid.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ModelError

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
MAX_BLOCKS, MAX_WIDTH = 64, 16384


class SmallEncoderConfig(transformers.PreTrainedConfig):
    """``blocks`` holds a mapping per block: window, heads, head_size, ratio, width, norm, act, pool, fused, precision.

    The MLP has ``ratio * width`` neurons; ``window`` is the side of a window in tokens, 0 for all of them; ``pool``
    halves the grid after the block; ``fused`` makes queries, keys and values one projection.
    """

    model_type = "apportion_small_encoder"

    image_size: int = 32
    num_channels: int = 1
    num_classes: int = 10
    patch: int = 4
    features: int = 64
    blocks: Any = ()


class Attention(nn.Module):
    """Self-attention over all tokens or inside square windows."""

    def __init__(self, features: int, heads: int, head_size: int, window: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.window, inner = heads, window, heads * head_size
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(features, 3 * inner)
        else:
            self.query, self.key, self.value = (nn.Linear(features, inner) for _ in range(3))
        self.out = nn.Linear(inner, features)

    def forward(self, x_NTD: Tensor, side: int) -> Tensor:
        num, _, features = x_NTD.shape
        per_side = side // self.window if self.window else 1
        split = per_side > 1
        if split:
            w = self.window
            x_NTD = x_NTD.view(num, per_side, w, per_side, w, features).transpose(2, 3).reshape(-1, w * w, features)
        parts = (
            self.qkv(x_NTD).chunk(3, dim=-1) if self.fused else (self.query(x_NTD), self.key(x_NTD), self.value(x_NTD))
        )
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        y_NTD: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        if split:
            y_NTD = y_NTD.view(num, per_side, per_side, w, w, features).transpose(2, 3).reshape(num, -1, features)
        return y_NTD


class EncoderBlock(nn.Module):
    """Attention and MLP, each after a norm and added to its input; then, where asked, the grid is pooled by two."""

    def __init__(self, features: int, spec: dict[str, Any]) -> None:
        super().__init__()
        norm, hidden = NORMS[spec["norm"]], spec["hidden"]
        self.norm1, self.norm2 = norm(features), norm(features)
        self.attention = Attention(features, spec["heads"], spec["head_size"], spec["window"], spec["fused"])
        self.mlp = nn.Sequential(nn.Linear(features, hidden), ACTIVATIONS[spec["act"]](), nn.Linear(hidden, features))
        self.pool = spec["pool"]

    def forward(self, x_NTD: Tensor, side: int) -> Tensor:
        x_NTD = x_NTD + self.attention(self.norm1(x_NTD), side)
        x_NTD = x_NTD + self.mlp(self.norm2(x_NTD))
        if self.pool:
            grid = x_NTD.transpose(1, 2).unflatten(2, (side, side))
            x_NTD = functional.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)
        return x_NTD


class SmallEncoderForImageClassification(transformers.PreTrainedModel):
    """Class logits of images."""

    config_class = SmallEncoderConfig
    base_model_prefix = "small_encoder"
    main_input_name = "pixel_values"

    def __init__(self, config: SmallEncoderConfig) -> None:
        super().__init__(config)
        side = config.image_size // config.patch
        specs = [check_block(spec) for spec in config.blocks]
        if not 1 <= len(specs) <= MAX_BLOCKS:
            raise ModelError(f"a small encoder has 1 to {MAX_BLOCKS} blocks, not {len(specs)}")
        self.embed = nn.Conv2d(config.num_channels, config.features, config.patch, config.patch)
        self.place = nn.Parameter(torch.zeros(side * side, config.features))
        self.blocks = nn.ModuleList(EncoderBlock(config.features, spec) for spec in specs)
        self.sides = grid_sides(side, specs)
        self.norm = nn.LayerNorm(config.features)
        self.head = nn.Linear(config.features, config.num_classes)
        self.post_init()

    @property
    def fp32_parts(self) -> list[str]:
        """The modules that an int8 target leaves in fp32."""
        return [f"blocks.{i}" for i, spec in enumerate(self.config.blocks) if spec.get("precision") == "fp32"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, pixel_values: Tensor, **_: Any) -> Tensor:
        x_NTD = self.embed(pixel_values).flatten(2).transpose(1, 2)
        x_NTD = x_NTD + self.place
        for side, block in zip(self.sides, self.blocks, strict=False):
            x_NTD = block(x_NTD, side)
        logits: Tensor = self.head(self.norm(x_NTD).mean(1))
        return logits


def grid_sides(side: int, specs: list[dict[str, Any]]) -> list[int]:
    """The side of the token grid before each block; raises where a window or a pool does not divide it."""
    sides = []
    for spec in specs:
        if (spec["window"] and side % spec["window"]) or (spec["pool"] and (side % 2 or side < 4)):
            raise ModelError(f"window {spec['window']} or pool {spec['pool']} does not divide a grid of {side} tokens")
        sides.append(side)
        side = side // 2 if spec["pool"] else side
    return sides


def check_block(spec: Any) -> dict[str, Any]:
    """A block's decisions, refused where they describe none."""
    try:
        made: dict[str, Any] = {
            "window": int(spec["window"]),
            "heads": int(spec["heads"]),
            "head_size": int(spec["head_size"]),
            "hidden": int(spec["ratio"]) * int(spec["width"]),
            "norm": str(spec["norm"]),
            "act": str(spec["act"]),
            "pool": bool(spec["pool"]),
            "fused": bool(spec["fused"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"a block of a small encoder can't be read ({type(error).__name__}: {error})") from None
    sizes = 1 <= made["heads"] <= 64 and 1 <= made["head_size"] <= 512 and 1 <= made["hidden"] <= MAX_WIDTH
    if not (sizes and made["window"] >= 0 and made["norm"] in NORMS and made["act"] in ACTIVATIONS):
        raise ModelError(f"no block of a small encoder is {made}; check window, heads, sizes, norm and act")
    return made


transformers.AutoConfig.register(SmallEncoderConfig.model_type, SmallEncoderConfig, exist_ok=True)
