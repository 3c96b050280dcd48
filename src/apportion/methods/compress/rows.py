"""What layers read and write on calibration examples, as rows of channels without padding.

Shape letters: R rows (tokens, pixels or examples), C channels, N examples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apportion.models.channels import channels_last
from apportion.models.network import Network, forward
from apportion.models.skip import first_tensor
from apportion.tasks.batches import Examples


@torch.no_grad()
def observe(
    network: Network, examples: Examples, names: Sequence[str], see: Callable[[str, Tensor, Tensor], None]
) -> None:
    """Runs the examples and shows ``see`` what each layer or block named reads and writes, as rows of channels."""
    mask_NT: Tensor | None = None

    def hook(name: str) -> Any:
        def show(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            read, written = first_tensor(args, kwargs), output[0] if isinstance(output, tuple) else output
            see(name, rows(layer, read, mask_NT), rows(layer, written, mask_NT))

        return show

    handles = [network.module.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True) for name in names]
    training = [part for part in network.module.modules() if part.training]
    network.module.eval()
    try:
        for batch in examples.batches:
            mask_NT = batch.get("attention_mask")
            forward(network.module, batch)
    finally:
        for part in training:
            part.training = True
        for handle in handles:
            handle.remove()


def rows(layer: nn.Module, tensor: Tensor, mask_NT: Tensor | None) -> Tensor:
    """A layer's input or output as rows of channels; rows of tokens that are padding are left out."""
    if not channels_last(layer, tensor):
        return tensor.movedim(1, -1).flatten(0, -2)
    if mask_NT is not None and tensor.shape[:2] == mask_NT.shape and tensor.dim() > 2:
        return tensor[mask_NT.bool()].flatten(0, -2)
    return tensor.flatten(0, -2)


@torch.no_grad()
def run_layers(network: Network, names: Sequence[str]) -> set[str]:
    """Those of the layers named that the model calls on its example inputs."""
    called: set[str] = set()
    handles = [
        network.module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name in names
    ]
    try:
        forward(network.module, network.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return called
