"""A network whose weights are a mixture of sources on disk, and its support loss as a function of the mixture.

The sources stay on disk: forming the mixture and the inner products of the gradient with every source (eq. C5) both
stream block by block, so memory is one network and its gradient, whatever the number of sources. Shape letters: L
blocks, S sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import blocks
from apportion.methods.compose.recipes import Linear
from apportion.methods.compose.source import Source, Stack
from apportion.methods.compose.support import Support, loss_and_gradient, support_loss
from apportion.models.network import Network

_LAYER = re.compile(r"(?:^|.*?\.)(?:layers?|h|blocks?|stages?)\.\d+(?=\.)")


def layer_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Tensors by layer: those of a numbered layer together, the rest by the first part of their name.

    Example:
        >>> layer_groups(["embed.weight", "layer.0.a.weight", "layer.0.b.bias", "layer.1.a.weight"])
        {'embed': ['embed.weight'], 'layer.0': ['layer.0.a.weight', 'layer.0.b.bias'], 'layer.1': ['layer.1.a.weight']}
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        groups.setdefault(found.group() if found else name.split(".")[0], []).append(name)
    return groups


def module_groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Tensors by the module that owns them: a weight and its bias together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return groups


class Blend:
    """A network that can be set to any mixture of its sources plus edits."""

    def __init__(
        self,
        network: Network,
        sources: Sequence[Source],
        groups: Mapping[str, Sequence[str]] | None = None,
        copied: Sequence[str] = (),
    ) -> None:
        self.network, self.sources = network, sources
        self.parameters = _parameters(network.module, sources[0], copied)
        self.groups = {"all": list(self.parameters)} if groups is None else groups
        self.row = {name: row for row, names in enumerate(self.groups.values()) for name in names}
        self.edits: dict[str, Tensor] = {}

    def set_weights(self, weight_LS: Tensor) -> None:
        """Makes the network the mixture of these weights, plus the edits."""
        by_tensor = {name: [float(w) for w in weight_LS[self.row[name]]] for name in self.parameters}
        recipe = Linear(weight_S=(), normalise=False, by_tensor=by_tensor)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                flat = parameter.view(-1)
                combine = recipe.plan(Stack(name, tuple(parameter.shape), self.sources))
                for start, stop in blocks(flat.numel()):
                    flat[start:stop] = torch.from_numpy(combine(start, stop))
                if name in self.edits:
                    parameter += self.edits[name]

    def loss(self, weight_LS: Tensor, support: Support) -> float:
        self.set_weights(weight_LS)
        return support_loss(self.network, support)

    def gradients(self, support: Support) -> tuple[float, dict[str, Tensor]]:
        """Support loss of the network as it is set, and its gradient by tensor."""
        names = [name for name, tensor in self.parameters.items() if isinstance(tensor, nn.Parameter)]
        for name in names:
            self.parameters[name].requires_grad_(True)
        try:
            loss, found = loss_and_gradient(self.network, support, [self.parameters[name] for name in names])
        finally:
            for name in names:
                self.parameters[name].requires_grad_(False)
        return loss, dict(zip(names, found, strict=True))

    def objective(self, support: Support, weight_LS: Tensor) -> tuple[float, Tensor]:
        """Loss and its gradient in the weights: inner products with the sources, block by block (eq. C5)."""
        self.set_weights(weight_LS)
        value, gradient = self.gradients(support)
        inner_LS = torch.zeros(len(self.groups), len(self.sources), dtype=torch.float64)
        for name, slope in gradient.items():
            flat = slope.reshape(-1).numpy()
            for start, stop in blocks(len(flat)):
                if not flat[start:stop].any():  # rows of an embedding that no example uses
                    continue
                for place, source in enumerate(self.sources):
                    inner = np.dot(flat[start:stop], source.read(name, start, stop))
                    inner_LS[self.row[name], place] += float(inner)
        return value, inner_LS


def _parameters(module: nn.Module, first: Source, copied: Sequence[str]) -> dict[str, Tensor]:
    """The tensors of the module that are mixed, by the names that the sources give them."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {}
    for name, stored in first.tensors.items():
        if not stored.mixable or name in copied:
            continue
        if name not in state or tuple(state[name].shape) != stored.shape:
            raise ModelError(f"transformers knows the tensor {name!r} of {first.ref!r} under another name or shape")
        found[name] = state[name].requires_grad_(False)
    return found
