"""Removing channels from one layer, by Torch-Pruning's layer functions (and one of ours for transformers' Conv1D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch_pruning as tp
from torch import Tensor, nn
from torch_pruning import ops
from transformers.pytorch_utils import Conv1D

from apportion.models.factored import Factored

Side = Literal["out", "in"]


class Conv1DChannels(tp.BasePruningFunc):
    """Channels of transformers' ``Conv1D``: a linear layer whose weight is stored as (in, out)."""

    TARGET_MODULES = Conv1D

    def prune_out_channels(self, layer: Any, idxs: Sequence[int]) -> nn.Module:
        keep = sorted(set(range(layer.nf)) - set(idxs))
        layer.weight = self._prune_parameter_and_grad(layer.weight, keep, 1)
        layer.bias = self._prune_parameter_and_grad(layer.bias, keep, 0)
        layer.nf = len(keep)
        return layer

    def prune_in_channels(self, layer: Any, idxs: Sequence[int]) -> nn.Module:
        keep = sorted(set(range(layer.nx)) - set(idxs))
        layer.weight = self._prune_parameter_and_grad(layer.weight, keep, 0)
        layer.nx = len(keep)
        return layer

    def get_out_channels(self, layer: Any) -> int:
        return layer.nf

    def get_in_channels(self, layer: Any) -> int:
        return layer.nx


CUSTOM: dict[type[nn.Module], Any] = {Conv1D: Conv1DChannels()}
_KINDS = {
    ops.OPTYPE.LINEAR: "linear",
    ops.OPTYPE.CONV: "conv",
    ops.OPTYPE.DEPTHWISE_CONV: "depthwise",
    ops.OPTYPE.BN: "norm",
    ops.OPTYPE.PRELU: "activation",
}


def layer_kind(layer: object) -> str | None:
    """``linear``, ``conv``, ``depthwise``, ``norm`` or ``activation`` for a layer that can be sliced, else None."""
    if isinstance(layer, Factored):
        return layer_kind(layer.down)
    if isinstance(layer, Conv1D):
        return "linear"
    kind = _KINDS.get(ops.module2type(layer))
    if kind == "conv" and getattr(layer, "groups", 1) != 1:
        return None  # a grouped convolution would have to lose the same channels in every group
    return kind


def mixes_channels(layer: nn.Module) -> bool:
    """Whether each output depends on all inputs, so that a zero input column removes a channel's whole effect."""
    return layer_kind(layer) in ("linear", "conv")


def channels_last(layer: nn.Module, tensor: Tensor | None = None) -> bool:
    """Whether channels are the last dimension of what a layer reads; of a block, whether they are of its ``tensor``."""
    layer = side_layer(layer, "in")
    if isinstance(layer, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm):
        return False
    return layer_kind(layer) is not None or tensor is None or tensor.dim() != 4


def side_layer(layer: nn.Module, side: Side) -> nn.Module:
    """The layer that holds one side's channels: of a factored layer the first or the second, else the layer itself."""
    if isinstance(layer, Factored):
        return layer.up if side == "out" else layer.down
    return layer


def num_channels(layer: nn.Module, side: Side) -> int:
    layer = side_layer(layer, side)
    functions = _functions(layer)
    return functions.get_out_channels(layer) if side == "out" else functions.get_in_channels(layer)


def remove_channels(layer: nn.Module, side: Side, indices: Sequence[int]) -> None:
    """Removes channels of a layer in place."""
    layer = side_layer(layer, side)
    functions = _functions(layer)
    remove = functions.prune_out_channels if side == "out" else functions.prune_in_channels
    remove(layer, list(indices))


def side_weight(layer: nn.Module, side: Side) -> tuple[nn.Parameter, int]:
    """The weight of a channel-mixing layer and the dimension of it that runs over the channels of one side."""
    layer = side_layer(layer, side)
    stored_input_first = isinstance(layer, Conv1D) or getattr(layer, "transposed", False)
    return layer.weight, int(stored_input_first == (side == "out"))  # type: ignore[return-value]


def input_weight(layer: nn.Module) -> tuple[nn.Parameter, int]:
    """The weight of a channel-mixing layer and the dimension of it that runs over input channels."""
    return side_weight(layer, "in")


def _functions(layer: nn.Module) -> Any:
    return CUSTOM.get(type(layer)) or tp.pruner.function.PrunerBox[ops.module2type(layer)]
