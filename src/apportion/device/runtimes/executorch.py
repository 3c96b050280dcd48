"""ExecuTorch with the XNNPACK delegate: the program that a phone would run, on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apportion.device.runtimes import Step
from apportion.device.target import Target

PROGRAM = "model.pte"


class ExecuTorch:
    """Lowers a torch.export program to XNNPACK and runs it with ExecuTorch's Python binding."""

    def build(self, network: Any, folder: Path, target: Target) -> None:
        import torch
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        from apportion.device.runtimes.graph import Outputs
        from apportion.device.runtimes.inputs import save_inputs

        program = torch.export.export(Outputs(network).eval(), tuple(network.inputs.values()))
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        with (folder / PROGRAM).open("wb") as file:
            lowered.to_executorch().write_to_file(file)
        save_inputs(folder, {str(i): tensor for i, tensor in enumerate(network.inputs.values())})

    def open(self, folder: Path, target: Target) -> Step:
        from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
        from executorch.runtime import Runtime
        from safetensors.torch import load_file

        from apportion.device.runtimes.inputs import INPUTS

        _unsafe_reset_threadpool(target.threads)  # takes every core otherwise, and there is no other way to say it
        method = Runtime.get().load_program(folder / PROGRAM).load_method("forward")
        stored = load_file(folder / INPUTS)
        inputs = [stored[str(i)] for i in range(len(stored))]
        return lambda: method.execute(inputs)


RUNTIME = ExecuTorch()
