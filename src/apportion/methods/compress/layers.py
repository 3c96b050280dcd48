"""The layers of a network that hold one plain matrix each, for rules that change matrices."""

from __future__ import annotations

from torch import nn

from apportion.methods.compress.rows import run_layers
from apportion.models.factored import Factored, can_factor
from apportion.models.network import Network
from apportion.models.trace import shared_weights


def plain_layers(network: Network) -> list[str]:
    """Linear layers and ungrouped 2-d convolutions that run on the example inputs and share their weight with none.

    Layers inside a factored pair are the pair's own.
    """
    tied = shared_weights(network.module)
    pairs = [name for name, layer in network.module.named_modules() if isinstance(layer, Factored)]
    found = [
        name
        for name, layer in network.module.named_modules()
        if name and can_factor(layer) and layer not in tied and name.rpartition(".")[0] not in pairs
    ]
    ran = run_layers(network, found)
    return [name for name in found if name in ran]


def find_layer(module: nn.Module, name: str) -> nn.Module | None:
    """The layer named, or None where it went with a block that was left out."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
