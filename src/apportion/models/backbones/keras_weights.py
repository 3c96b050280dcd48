"""MobileNetV2 weights from Keras HDF5 files, renamed for transformers' MobileNetV2Model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from apportion.errors import ModelError

_NUM_BLOCKS = 17


def read_mobilenet_v2(path: Path, *, image_size: int) -> transformers.PreTrainedModel:
    """The network up to its 1280 features, from the first MobileNetV2-1.0 in a Keras file; its head is left."""
    arrays = _arrays(path)
    config = transformers.MobileNetV2Config(
        image_size=image_size, tf_padding=True, layer_norm_eps=1e-3, depth_multiplier=1.0, finegrained_output=True
    )
    model = transformers.MobileNetV2Model(config)
    state: dict[str, Tensor] = {}

    def take(ours: str, conv: str, norm: str) -> None:
        kernel = arrays.get(f"{conv}/kernel", arrays.get(f"{conv}/depthwise_kernel"))
        if kernel is None:
            raise ModelError(f"{path} has no layer {conv!r}; it holds no MobileNetV2")
        # Keras stores (height, width, in, out), and (height, width, channels, 1) for depthwise layers.
        axes = (2, 3, 0, 1) if "depthwise" in conv else (3, 2, 0, 1)
        state[f"{ours}.convolution.weight"] = torch.from_numpy(np.ascontiguousarray(kernel.transpose(axes)))
        for part, theirs in {
            "weight": "gamma",
            "bias": "beta",
            "running_mean": "moving_mean",
            "running_var": "moving_variance",
        }.items():
            state[f"{ours}.normalization.{part}"] = torch.from_numpy(arrays[f"{norm}/{theirs}"])

    take("conv_stem.first_conv", "Conv1", "bn_Conv1")
    take("conv_stem.conv_3x3", "expanded_conv_depthwise", "expanded_conv_depthwise_BN")
    take("conv_stem.reduce_1x1", "expanded_conv_project", "expanded_conv_project_BN")
    for block in range(1, _NUM_BLOCKS):
        for ours, theirs in {"expand_1x1": "expand", "conv_3x3": "depthwise", "reduce_1x1": "project"}.items():
            name = f"block_{block}_{theirs}"
            take(f"layer.{block - 1}.{ours}", name, f"{name}_BN")
    take("conv_1x1", "Conv_1", "Conv_1_bn")
    missing = model.load_state_dict(state, strict=False)
    lacking = [name for name in missing.missing_keys if not name.endswith("num_batches_tracked")]
    if lacking or missing.unexpected_keys:
        raise ModelError(f"{path} does not fit MobileNetV2 ({(lacking + list(missing.unexpected_keys))[0]!r})")
    return model


def _arrays(path: Path) -> Mapping[str, np.ndarray]:
    """All arrays of the file by ``layer/part``, without the names of enclosing models and Keras' ``:0``."""
    try:
        import h5py
    except ImportError:
        raise ModelError("Keras files need h5py; run: pip install 'apportion[backbones]'") from None
    found: dict[str, np.ndarray] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            *_, layer, part = name.split("/")
            found[f"{layer}/{part.removesuffix(':0')}"] = np.asarray(item, dtype=np.float32)

    with h5py.File(path, "r") as file:
        file["model_weights"].visititems(visit)
    return found
