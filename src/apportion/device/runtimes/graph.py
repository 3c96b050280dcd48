"""Export to ONNX, which all graph runtimes but ExecuTorch start from."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from apportion.device.runtimes import graph_name
from apportion.device.runtimes.inputs import save_calibration, save_inputs
from apportion.device.target import Target
from apportion.errors import TargetError
from apportion.models.network import Int8, Network, float_outputs, forward

MODEL = "model.onnx"
_MAX_PROTOBUF_BYTES = 1_900_000_000


class Outputs(torch.nn.Module):
    """Returns a model's floating-point outputs as a tuple, so that every architecture exports alike."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self.names = list(network.inputs)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return tuple(float_outputs(forward(self.module, dict(zip(self.names, tensors, strict=True)))))


def export_onnx(network: Network, folder: Path) -> None:
    """Writes ``model.onnx`` and the example inputs; shapes are fixed, as the target's identity includes them."""
    module, inputs = Outputs(network).eval(), tuple(network.inputs.values())
    options: dict[str, Any] = {"input_names": input_names(network), "verbose": False}
    with warnings.catch_warnings(), _silence(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:  # the exporter by tracing is several times quicker and times the same
            torch.onnx.export(module, inputs, folder / MODEL, dynamo=False, **options)
        except Exception:
            size_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
            external = size_bytes > _MAX_PROTOBUF_BYTES
            torch.onnx.export(module, inputs, folder / MODEL, dynamo=True, external_data=external, **options)
    save_inputs(folder, dict(zip(input_names(network), network.inputs.values(), strict=True)))
    if network.calibration:
        renamed = dict(zip(network.inputs, input_names(network), strict=True))
        save_calibration(folder, [{renamed[name]: t for name, t in b.items()} for b in network.calibration])


def precision_of(network: Network, target: Target) -> str:
    """What is built: int8 for a network that carries calibration inputs, else what the target's name says."""
    return network.precision if network.calibration else target.precision


def module_of(node: str) -> str:
    """The module that an exported node came from, as its name tells; nodes of fusions are named after one of theirs.

    A scope in the name repeats the one before where that is a container that is called.

    Example:
        >>> module_of("/module/stages.0/stages.0.1/conv1/Conv")
        'stages.0.1.conv1'
    """
    scopes: list[str] = []
    for scope in node.split("/")[2:-1]:
        if scopes and scope.startswith(f"{scopes[-1]}."):
            scopes.pop()
        scopes.append(scope)
    return ".".join(scopes)


def nodes_in_float(network: Network, nodes: Iterable[str]) -> list[str]:
    """Those of the exported nodes that belong to modules which stay in float.

    Raises:
        TargetError: modules of the network are to stay in float and none of the nodes says that it is of one.
    """
    parts = (*network.int8.in_float, *getattr(network.module, "fp32_parts", ()))
    int8 = Int8(in_float=tuple(parts))
    found = [node for node in nodes if not int8.covers(module_of(node))]
    here = [name for name, _ in network.module.named_modules() if not int8.covers(name)]
    if here and not found:
        raise TargetError(f"no node of the exported graph is named after {here[0]!r}, so it can't stay in float")
    return found


def input_names(network: Network) -> list[str]:
    return [graph_name(name) for name in network.inputs]


@contextlib.contextmanager
def _silence() -> Any:
    """The exporter prints and logs on every call; what matters is raised."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
