"""PyTorch, eager or compiled, on the CPU or a CUDA device; the artefact is the saved network itself."""

from __future__ import annotations

from typing import Any

import torch

from apportion.device.runtimes import Step
from apportion.device.target import Target
from apportion.errors import TargetError
from apportion.models.network import float_outputs, forward


class Eager:
    """Runs the module as it is, through ``torch.compile`` where the target asks for it."""

    def open_network(self, network: Any, target: Target) -> Step:
        torch.set_num_threads(target.threads)
        if target.device == "cuda" and not torch.cuda.is_available():
            raise TargetError("no CUDA device is visible to torch")
        module = network.module.to(target.device)
        inputs = {name: tensor.to(target.device) for name, tensor in network.inputs.items()}
        if target.runtime == "compile":
            module = torch.compile(module)

        def step() -> Any:
            with torch.inference_mode():
                output = forward(module, inputs)
                if target.device == "cuda":
                    torch.cuda.synchronize()
            return float_outputs(output)

        return step


RUNTIME = Eager()
