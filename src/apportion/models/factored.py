"""A layer of low rank: two layers in sequence that stand for one linear or convolution layer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers.pytorch_utils import Conv1D


class Factored(nn.Sequential):
    """``up(down(x))``: ``down`` reads the inputs into ``rank`` channels, ``up`` makes the outputs of them.

    Models that compute their own padding ask a convolution for its geometry, which is that of ``down``.
    """

    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__(OrderedDict(down=down, up=up))

    kernel_size = property(lambda self: self.down.kernel_size)
    stride = property(lambda self: self.down.stride)
    dilation = property(lambda self: self.down.dilation)

    @property
    def rank(self) -> int:
        return len(self.down.weight)


def can_factor(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear layer or an ungrouped 2-d convolution, which two such layers can stand for."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and min(layer.weight.shape[:2]) > 1
    return isinstance(layer, nn.Linear | Conv1D) and type(layer) in (nn.Linear, Conv1D) and min(layer.weight.shape) > 1


def matrix(layer: nn.Module) -> Tensor:
    """The weight as a matrix, a row per output; of a factored layer, the product of its factors."""
    if isinstance(layer, Factored):
        return matrix(layer.up) @ matrix(layer.down)
    weight = layer.weight.detach()  # type: ignore[operator]
    return weight.T if isinstance(layer, Conv1D) else weight.flatten(1)


def break_even(layer: nn.Module) -> float:
    """The rank at which two factors hold as many numbers as the matrix itself."""
    first, last = (layer.down, layer.up) if isinstance(layer, Factored) else (layer, layer)
    num_inputs, num_outputs = matrix(first).shape[1], len(matrix(last))
    return num_inputs * num_outputs / (num_inputs + num_outputs)


def dense_numbers(layer: nn.Module) -> int:
    """Numbers in the matrix that a layer is or stands for."""
    first, last = (layer.down, layer.up) if isinstance(layer, Factored) else (layer, layer)
    return matrix(first).shape[1] * len(matrix(last))


def factored(layer: nn.Module, rank: int) -> Factored:
    """Two layers of the shapes that stand for a layer at a rank, with weights yet to be filled in.

    The layer may itself be factored. ``down`` takes over kernel, stride and padding, ``up`` the bias.
    """
    down, up = (layer.down, layer.up) if isinstance(layer, Factored) else (layer, layer)
    weight = down.weight
    options: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    with_bias = up.bias is not None
    num_outputs = len(matrix(up))
    if isinstance(down, nn.Conv2d):
        kept = {name: getattr(down, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
        pair = Factored(
            skip_init(nn.Conv2d, down.in_channels, rank, bias=False, **kept, **options),
            skip_init(nn.Conv2d, rank, num_outputs, 1, bias=with_bias, **options),
        )
    else:
        pair = Factored(
            skip_init(nn.Linear, matrix(down).shape[1], rank, bias=False, **options),
            skip_init(nn.Linear, rank, num_outputs, bias=with_bias, **options),
        )
    for made in pair.parameters():
        made.requires_grad_(bool(weight.requires_grad))
    return pair.train(layer.training)


@torch.no_grad()
def fill(pair: Factored, down_RI: Tensor, up_OR: Tensor, bias_O: Tensor | None) -> None:
    """Writes the factors of a matrix into a pair."""
    pair.down.weight.copy_(down_RI.reshape(pair.down.weight.shape))
    pair.up.weight.copy_(up_OR.reshape(pair.up.weight.shape))
    if bias_O is not None and pair.up.bias is not None:
        pair.up.bias.copy_(bias_O)


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Puts another layer where the one named is, in place."""
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, layer)


def work_shares(module: nn.Module) -> dict[str, float]:
    """For every factored layer, the share of a dense layer's numbers and operations that its two factors have."""
    return {
        name: layer.rank / break_even(layer) for name, layer in module.named_modules() if isinstance(layer, Factored)
    }
