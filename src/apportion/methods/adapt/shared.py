r"""Many tasks on one resident network: each task's delta runs as a side branch beside the frozen layers.

.. math:: y_n = W x_n + b + (a^{(t_n)} \odot \Delta) x_n \quad \text{(eq. A15; the paper's eq. 19 read literally)}

Gates belong to rows or columns of a layer's weight, so a branch is the delta's matrix with its outputs or inputs scaled
by the gates of the row's task: one product for a batch that mixes tasks. Shape letters: N examples, T tasks, G groups,
C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ModelError
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.groups import Place, places
from apportion.models.network import read_out


class SharedBackbone:
    """The frozen network of a family, with the gates of several tasks; ``embed`` takes a task for every example."""

    def __init__(self, family: Family) -> None:
        self.family, self.names = family, []  # type: ignore[var-annotated]
        self._gate_TG = torch.empty(0, family.groups.count + 1)
        self._places = places(family.network, family.groups)
        self._delta = {
            name: bundle.delta.detach()[place]  # type: ignore[operator]
            for bundle in family.stacks
            for place, name in enumerate(bundle.names)  # type: ignore[arg-type]
        }
        module = family.network.module
        self._layers = sorted({name.rpartition(".")[0] for name in self._places})
        for name in self._layers:
            if not isinstance(module.get_submodule(name), nn.Linear | nn.LayerNorm):
                kind = type(module.get_submodule(name)).__name__
                raise ModelError(f"{name} is a {kind}; side branches run beside linear layers and layer norms only")

    def add(self, name: str, alpha_M: Tensor) -> int:
        """Adds a task by its mixture over experts; returns its number."""
        gate_G = self.family.gates(alpha_M).detach()
        self._gate_TG = torch.cat([self._gate_TG, torch.cat([gate_G, torch.ones(1)])[None]])
        self.names.append(name)
        return len(self.names) - 1

    def size_bytes(self) -> int:
        """What one more task takes: its gates."""
        return self._gate_TG.shape[1] * self._gate_TG.element_size()

    @torch.no_grad()
    def embed(self, inputs: Mapping[str, Tensor], task_N: Tensor) -> Tensor:
        """Features of a batch in which every example belongs to a task, shape (N, F)."""
        with self._branches(self._gate_TG[task_N]):
            return read_out(self.family.network, inputs)

    @contextmanager
    def _branches(self, gate_NG: Tensor) -> Iterator[None]:
        module = self.family.network.module
        handles = [
            module.get_submodule(name).register_forward_hook(self._branch(name, module.get_submodule(name), gate_NG))
            for name in self._layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _branch(self, name: str, layer: nn.Module, gate_NG: Tensor) -> Any:
        weight, bias = f"{name}.weight", f"{name}.bias"

        def gates(place: Place, like: Tensor) -> Tensor:
            value_NC = gate_NG[:, torch.tensor(place.group)]
            return value_NC.reshape(len(value_NC), *[1] * (like.dim() - 2), -1)

        def linear(_layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x, place = args[0], self._places[weight]
            rows = place.dim == 0
            made = functional.linear(x if rows else x * gates(place, x), self._delta[weight])
            output = output + (made * gates(place, made) if rows else made)
            return output + self._delta[bias] * gates(self._places[bias], output) if bias in self._delta else output

        def norm(_layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            plain = functional.layer_norm(args[0], layer.normalized_shape, eps=layer.eps)  # type: ignore[arg-type]
            output = output + plain * self._delta[weight] * gates(self._places[weight], plain)
            return output + self._delta[bias] * gates(self._places[bias], output)

        return linear if isinstance(layer, nn.Linear) else norm
