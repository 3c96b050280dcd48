"""The inputs that an artefact is timed on, kept beside it; numpy only, so that timing needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

INPUTS = "inputs.safetensors"
CALIBRATION = "calibration.safetensors"


def save_inputs(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Keeps torch tensors by name."""
    save_file({name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}, folder / INPUTS)


def read_inputs(folder: Path, wanted: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The saved inputs that the exported graph still has; an export drops inputs that nothing reads."""
    stored = load_file(folder / INPUTS)
    return {name: stored[name] for name in wanted}


def save_calibration(folder: Path, batches: Sequence[Mapping[str, Any]]) -> None:
    """Keeps the inputs that int8 ranges are to be set by."""
    named = {f"{i}.{name}": tensor.numpy() for i, batch in enumerate(batches) for name, tensor in batch.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in named.items()}, folder / CALIBRATION)


def calibration_inputs(folder: Path, count: int = 8) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Inputs to set activation ranges by: those kept beside the artefact, or else some made up like the example's.

    Made-up ones are enough to price int8, not to judge its quality.
    """
    if (folder / CALIBRATION).is_file():
        kept: dict[int, dict[str, np.ndarray[Any, Any]]] = {}
        for name, array in load_file(folder / CALIBRATION).items():
            number, _, key = name.partition(".")
            kept.setdefault(int(number), {})[key] = array
        return [kept[number] for number in sorted(kept)]
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
