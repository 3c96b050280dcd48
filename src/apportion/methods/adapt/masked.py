"""A network run with merged weights and gated blocks, without changing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from apportion.methods.adapt.groups import merge_all
from apportion.models.network import Network, forward, read_output
from apportion.models.skip import as_output, first_tensor


def masked_features(
    network: Network,
    stacks: nn.ModuleList,
    blocks: Mapping[str, tuple[int, int]],
    inputs: Mapping[str, Tensor],
    gate_G: Tensor,
    keep_G: Tensor,
) -> Tensor:
    """Features of examples under delta gates and keep gates, shape (N, F): the same as those of the sliced network."""
    device = next(iter(inputs.values())).device
    gate_G, keep_G = gate_G.to(device), keep_G.to(device)
    merged = {f"inner.{name}": tensor for name, tensor in merge_all(stacks, gate_G, keep_G).items()}
    with gated_blocks(network.module, blocks, keep_G):
        output = functional_call(_Call(network.module), merged, (inputs,))
    return read_output(network, output, inputs)


class _Call(nn.Module):
    """Calls a module with named inputs, so that ``functional_call`` can swap its weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Mapping[str, Tensor]) -> Any:
        return forward(self.inner, inputs)


@contextmanager
def gated_blocks(module: nn.Module, blocks: Mapping[str, tuple[int, int]], keep_G: Tensor) -> Iterator[None]:
    """Every block returns its input plus its keep gate times what it adds."""

    def hook(group: int, num_outputs: int) -> Any:
        def blend(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            stream = first_tensor(args, kwargs)
            made = output[0] if num_outputs else output
            return as_output(stream + keep_G[group].to(made.dtype) * (made - stream), num_outputs)

        return blend

    handles = [
        module.get_submodule(name).register_forward_hook(hook(group, num_outputs), with_kwargs=True)
        for name, (group, num_outputs) in blocks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
