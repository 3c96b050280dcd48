"""A blend whose sources are held in memory, on any device: faster than streaming where they fit.

Shape letters: L blocks, S sources, N numbers of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from apportion.errors import ModelError
from apportion.methods.compose.blend import Blend
from apportion.methods.compose.support import Support
from apportion.models.network import Network


class Resident(Blend):
    """The same network and functions as ``Blend``, with ``states`` (tensors by name) instead of sources on disk."""

    def __init__(
        self,
        network: Network,
        states: Sequence[Mapping[str, Tensor]],
        groups: Mapping[str, Sequence[str]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.network = network
        self.sources = list(names or range(len(states)))  # type: ignore[arg-type]
        known: dict[str, Tensor] = dict(network.module.named_parameters())
        missing = [name for name in known if any(name not in state for state in states)]
        if missing:
            raise ModelError(f"a source lacks the tensor {missing[0]!r}; give checkpoints of one architecture")
        self.parameters = {name: tensor.requires_grad_(False) for name, tensor in known.items()}
        self.groups = {"all": list(self.parameters)} if groups is None else groups
        self.row = {name: row for row, group in enumerate(self.groups.values()) for name in group}
        self.edits: dict[str, Tensor] = {}
        self.held_SN = {
            name: torch.stack([state[name].reshape(-1).to(tensor.device, tensor.dtype) for state in states])
            for name, tensor in self.parameters.items()
        }

    def set_weights(self, weight_LS: Tensor) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                flat_N = parameter.view(-1).zero_()
                for place, weight in enumerate(weight_LS[self.row[name]].tolist()):
                    if weight:
                        flat_N.add_(self.held_SN[name][place], alpha=weight)
                if name in self.edits:
                    parameter += self.edits[name]

    def objective(self, support: Support, weight_LS: Tensor) -> tuple[float, Tensor]:
        self.set_weights(weight_LS)
        value, gradient = self.gradients(support)
        inner_LS = torch.zeros(len(self.groups), len(self.sources), dtype=torch.float64)
        for name, slope in gradient.items():
            inner_LS[self.row[name]] += (self.held_SN[name] @ slope.reshape(-1)).double().cpu()
        return value, inner_LS


def states_of(modules: Sequence[nn.Module]) -> list[dict[str, Tensor]]:
    """The parameters of modules, detached."""
    return [{name: tensor.detach() for name, tensor in module.named_parameters()} for module in modules]
