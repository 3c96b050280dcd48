"""The ViT-S/14 inside an ONNX file, its initialisers renamed for transformers' Dinov2Model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from apportion.errors import ModelError

IMAGE_SIZE = 224
_RENAMES = {  # newer versions of transformers name the layers of all attentions alike
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
_BLOCK = re.compile(r"backbone\.encoder\.layer\.(\d+)\.")
_LINEAR = re.compile(r"/backbone/encoder/layer\.(\d+)/(.+)/MatMul$")


def read_vit_s14(path: Path, *, num_blocks: int = 11) -> transformers.PreTrainedModel:
    """The first blocks and the final norm as a Dinov2Model; the last of the twelve blocks and the decoder are left.

    The file was trained to draw saliency maps, which turned the last block away from what an image shows: few-shot
    accuracy of the class token rises up to block 11 and falls at block 12; ``vit_blocks.py`` in the benchmark
    ``fewshot_reference`` prints it.
    """
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise ModelError("ONNX files need onnx; run: pip install 'apportion[backbones]'") from None
    graph = onnx.load(str(path), load_external_data=False).graph
    arrays = {tensor.name: tensor for tensor in graph.initializer}

    def array(name: str) -> Tensor:
        return torch.from_numpy(np.array(numpy_helper.to_array(arrays[name])))

    config = transformers.Dinov2Config(
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=num_blocks,
        patch_size=14,
        image_size=IMAGE_SIZE,
        mlp_ratio=4,
    )
    model = transformers.Dinov2Model(config)
    renames = _RENAMES if any(".q_proj." in name for name in model.state_dict()) else {}

    def ours(name: str) -> str:
        for old, new in renames.items():
            name = name.replace(old, new)
        return name

    state: dict[str, Tensor] = {"embeddings.mask_token": torch.zeros(1, config.hidden_size)}
    for name in arrays:
        block = _BLOCK.match(name)
        if name.startswith("backbone.") and not (block and int(block[1]) >= num_blocks):
            state[ours(name.removeprefix("backbone."))] = array(name)
    for node in graph.node:
        stored = [name for name in node.input if name in arrays]
        linear = _LINEAR.match(node.name)
        if (
            linear and stored and int(linear[1]) < num_blocks
        ):  # the exporter folded the transpose of every linear layer into its initialiser
            layer, part = linear.groups()
            name = ours(f"encoder.layer.{layer}.{part.replace('/', '.')}.weight")
            state[name] = array(stored[0]).T.contiguous()
        elif node.name == "/backbone/embeddings/Reshape_1":
            patch_positions = _resized(array(stored[0]))
        elif node.name == "/backbone/embeddings/Concat_6":
            class_position = array(stored[0])
    try:
        state["embeddings.position_embeddings"] = torch.cat([class_position, patch_positions], 1)
        model.load_state_dict(state, strict=True)
    except (RuntimeError, UnboundLocalError) as error:
        reason = str(error).splitlines()[-1].strip()[:120]
        raise ModelError(f"{path} does not fit a DINOv2 ViT-S/14 ({reason})") from None
    return model


def _resized(position_1ND: Tensor) -> Tensor:
    """Position embeddings of a square of patches for ``IMAGE_SIZE``, by the bicubic rule that the file itself uses."""
    side = round(position_1ND.shape[1] ** 0.5)
    grid_1DHW = position_1ND.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    size = (IMAGE_SIZE // 14, IMAGE_SIZE // 14)
    small_1DHW = torch.nn.functional.interpolate(grid_1DHW, size=size, mode="bicubic", align_corners=False)
    return small_1DHW.permute(0, 2, 3, 1).flatten(1, 2)
