"""PyTorch, eager or compiled, on the CPU or a CUDA device; the artefact is the saved network itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from apportion.device.runtimes import Step
from apportion.device.target import Target
from apportion.errors import TargetError
from apportion.models.dynamic import quantise_dynamically
from apportion.models.network import float_outputs, forward

_NUMBER = count()


class Eager:
    """Runs the module as it is or with linear layers in int8, compiled where the target asks for it."""

    def open_network(self, network: Any, target: Target) -> Step:
        torch.set_num_threads(target.threads)
        if target.device == "cuda" and not torch.cuda.is_available():
            raise TargetError("no CUDA device is visible to torch")
        if target.precision == "int8" or (network.calibration and network.int8.by_torch):
            network = network.replace(module=quantise_dynamically(network.module, network.int8.covers))
        module = network.module.to(target.device)
        inputs = {name: tensor.to(target.device) for name, tensor in network.inputs.items()}
        run = _compiled(module) if target.runtime == "compile" else partial(forward, module)

        def step() -> Any:
            with torch.inference_mode():
                output = run(inputs)
                if target.device == "cuda":
                    torch.cuda.synchronize()
            return float_outputs(output)

        return step


def _compiled(module: nn.Module) -> Callable[[Mapping[str, Tensor]], Any]:
    """The module compiled for the shapes it is given.

    What is compiled is kept per code object, and beyond eight versions of one object torch falls back to eager
    silently; candidates of one class would share it, so each gets a code object of its own.
    """

    def run(inputs: Mapping[str, Tensor]) -> Any:
        return forward(module, inputs)

    run.__code__ = run.__code__.replace(co_name=f"run_{next(_NUMBER)}")
    return torch.compile(run, dynamic=False)


RUNTIME = Eager()
