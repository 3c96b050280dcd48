"""Runtimes: each builds an artefact from a network and opens it as a step that can be timed.

The measuring child imports the runtimes themselves, so that a broken one can't take the run down; a process that
serves a certified model opens it here, too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from apportion.device.target import Target

Step = Callable[..., Any]
_MODULES = {"torch": "eager", "compile": "eager", "ort": "ort", "openvino": "openvino", "executorch": "executorch"}


class Runtime(Protocol):
    """One runtime."""

    def build(self, network: Any, folder: Path, target: Target) -> None:
        """Writes the artefact of a network (a ``models.Network``) into an empty folder, with its inputs."""

    def open(self, folder: Path, target: Target) -> Step:
        """A function that runs the artefact once on its inputs and returns its outputs as arrays or tensors.

        Graph runtimes on the CPU also take other inputs of the same shapes, as arrays by name.
        """


def runtime_of(target: Target) -> Runtime:
    return importlib.import_module(f"apportion.device.runtimes.{_MODULES[target.runtime]}").RUNTIME


def graph_name(name: str) -> str:
    """What an exported graph calls an input: those without a name of their own are numbered."""
    return f"input_{name}" if name.isdigit() else name


def missing_packages(target: Target) -> list[str]:
    """The packages that a target's runtime needs and that are not installed; importing nothing."""
    packages = {
        "torch": ["torch"],
        "compile": ["torch"] + (["torchao"] if target.precision == "int8" else []),
        "ort": ["onnx", "onnxscript", "onnxruntime"],
        "openvino": ["onnx", "onnxscript", "openvino"] + (["nncf"] if target.precision == "int8" else []),
        "executorch": ["executorch"],
    }[target.runtime]
    return [package for package in packages if importlib.util.find_spec(package) is None]
