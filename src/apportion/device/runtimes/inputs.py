"""The inputs that an artefact is timed on, kept beside it; numpy only, so that timing needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

INPUTS = "inputs.safetensors"


def save_inputs(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Keeps torch tensors by name."""
    save_file({name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}, folder / INPUTS)


def read_inputs(folder: Path, wanted: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The saved inputs that the exported graph still has; an export drops inputs that nothing reads."""
    stored = load_file(folder / INPUTS)
    return {name: stored[name] for name in wanted}


def calibration_inputs(folder: Path, count: int = 8) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Inputs like the example's to set activation ranges by; enough to price int8, not to judge its quality."""
    stored = load_file(folder / INPUTS)
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        batch = {}
        for name, array in stored.items():
            if array.dtype.kind == "f":
                batch[name] = generator.standard_normal(array.shape, dtype=np.float32).astype(array.dtype)
            else:
                flat = generator.permutation(array.reshape(-1))
                batch[name] = flat.reshape(array.shape)
        batches.append(batch)
    return batches
