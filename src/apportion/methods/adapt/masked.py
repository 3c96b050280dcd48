"""A network run with merged weights and gated blocks, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from apportion.methods.adapt.groups import merge_all
from apportion.models.network import Network, float_outputs, forward, read_output
from apportion.models.skip import as_output, first_tensor

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Pass:
    """How the network runs: products in ``bf16`` or all in ``fp32``; blocks run again for their slopes, or kept."""

    precision: str = "fp32"
    checkpoint: bool = False


PLAIN = Pass()


def masked_features(
    network: Network,
    stacks: nn.ModuleList,
    blocks: Mapping[str, tuple[int, int]],
    inputs: Mapping[str, Tensor],
    gate_G: Tensor,
    keep_G: Tensor,
    how: Pass = PLAIN,
) -> Tensor:
    """Features of examples under delta gates and keep gates, shape (N, F): the same as those of the sliced network."""
    device = next(iter(inputs.values())).device
    gate_G, keep_G = gate_G.to(device), keep_G.to(device)
    merged = merge_all(stacks, gate_G, keep_G)
    low = how.precision == "bf16"
    again = run_again(network.module, blocks, merged) if how.checkpoint else nullcontext()
    with gated_blocks(network.module, blocks, keep_G), again, torch.autocast(device.type, torch.bfloat16, enabled=low):
        output = call_with(merged, network.module, lambda: forward(network.module, inputs))
    return read_output(network, float_outputs(output)[0].float() if low else output, inputs)


def call_with(weights: Mapping[str, Tensor], module: nn.Module, call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Calls while a module has other weights."""
    return functional_call(_Call(module, call), {f"inner.{name}": one for name, one in weights.items()}, args, kw)


class _Call(nn.Module):
    """Holds the module that ``call`` runs, so that ``functional_call`` can swap its weights."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@contextmanager
def run_again(module: nn.Module, blocks: Mapping[str, Any], merged: Mapping[str, Tensor]) -> Iterator[None]:
    """Every block keeps its input alone, and runs again when its slopes are asked for, with the weights it had."""

    def checkpointed(name: str, block: nn.Module) -> Any:
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in merged.items() if key.startswith(f"{name}.")}
        plain = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            return call_with(own, block, plain, *args, **kwargs)

        def twice(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

        return twice

    some = {name: module.get_submodule(name) for name in blocks}
    try:
        for name, block in some.items():
            block.forward = checkpointed(name, block)
        yield
    finally:
        for block in some.values():
            block.__dict__.pop("forward", None)


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
