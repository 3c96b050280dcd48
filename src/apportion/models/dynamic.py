"""Dynamic int8 of linear layers by torchao: what torch itself runs, with ranges taken anew from every input."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn


def quantise_dynamically(module: nn.Module, covers: Callable[[str], bool]) -> nn.Module:
    """Changes the linear layers named by ``covers`` to int8 in place: weights per output channel, inputs per token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(
            module,
            Int8DynamicActivationInt8WeightConfig(),
            filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and covers(name),
        )
    return module
