"""The published weights of EfficientNet-Lite0, renamed for our module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from apportion.models.backbones.efficientnet_lite import EfficientNetLiteConfig, EfficientNetLiteModel

_NORM_PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def read_lite0(path: Path) -> EfficientNetLiteModel:
    """The model with the weights of a ``.pth`` file whose SHA-256 the caller has checked; no code in it is run."""
    published = torch.load(path, map_location="cpu", weights_only=True)
    model = EfficientNetLiteModel(EfficientNetLiteConfig())
    state: dict[str, Tensor] = {}

    def take(ours: str, conv: str, norm: str) -> None:
        state[f"{ours}.conv.weight"] = published[f"{conv}.weight"]
        state.update({f"{ours}.norm.{part}": published[f"{norm}.{part}"] for part in _NORM_PARTS})

    take("stem", "_conv_stem", "_bn0")
    take("head", "_conv_head", "_bn1")
    for place, block in enumerate(model.blocks):
        ours, theirs = f"blocks.{place}", f"_blocks.{place}"
        if hasattr(block.expand, "conv"):
            take(f"{ours}.expand", f"{theirs}._expand_conv", f"{theirs}._bn0")
        take(f"{ours}.depthwise", f"{theirs}._depthwise_conv", f"{theirs}._bn1")
        take(f"{ours}.project", f"{theirs}._project_conv", f"{theirs}._bn2")
    model.load_state_dict(state, strict=True)
    return model
