"""Weights with many zeros, stored as a bit per place and the numbers that are not zero; exact to the last bit.

A dense kernel does not care about zeros, so this changes the file and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apportion.errors import ModelError
from apportion.models.safefile import TensorInfo

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
PLACES, NUMBERS = ".places", ".numbers"
_ENTRY_BYTES = 160  # of one more tensor in a safetensors header, at most


def nonzero(tensor: Tensor) -> Tensor:
    """Where a tensor holds anything but zero; a negative zero is something."""
    return _bits(tensor) != 0


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.dtype])


def stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a saved model: with its zeros left out where that pays, headers considered."""
    dense = tensor.numel() * tensor.element_size()
    if tensor.dtype not in _BITS or tensor.dim() < 2:
        return dense
    packed = -(-tensor.numel() // 8) + int(_bits(tensor).count_nonzero()) * tensor.element_size()
    return packed if packed + _ENTRY_BYTES < dense else dense


def pays(tensor: Tensor) -> bool:
    """Whether a tensor is stored with its zeros left out."""
    return stored_bytes(tensor) < tensor.numel() * tensor.element_size()


def pack(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors as they are stored, and the names of those whose zeros were left out."""
    stored: dict[str, Tensor] = {}
    packed = []
    for name, tensor in tensors.items():
        if f"{name}{PLACES}" in tensors or f"{name}{NUMBERS}" in tensors or not pays(tensor):
            stored[name] = tensor
            continue
        there = nonzero(tensor).flatten()
        stored[f"{name}{PLACES}"] = torch.from_numpy(np.packbits(there.cpu().numpy()))
        stored[f"{name}{NUMBERS}"] = tensor.flatten()[there].contiguous()
        packed.append(name)
    return stored, packed


def unpacked_headers(
    path: Path, headers: Mapping[str, TensorInfo], packed: Any, expected: Mapping[str, Tensor]
) -> dict[str, TensorInfo]:
    """The headers as if nothing had been packed, after checking that what is packed can be what is expected."""
    result = dict(headers)
    for name in _names(path, packed):
        places, numbers = result.pop(f"{name}{PLACES}", None), result.pop(f"{name}{NUMBERS}", None)
        wanted = expected.get(name)
        if places is None or numbers is None or name in result or wanted is None:
            raise ModelError(f"{path}: {name!r} is no packed tensor of this model; save the model again")
        size = wanted.numel()
        fits = places == TensorInfo("U8", (-(-size // 8),)) and len(numbers.shape) == 1 and numbers.shape[0] <= size
        if not fits:
            raise ModelError(
                f"{path}: the packed tensor {name!r} does not have the shape {list(wanted.shape)}; save the model again"
            )
        result[name] = TensorInfo(numbers.dtype, tuple(wanted.shape))
    return result


def unpack(path: Path, state: dict[str, Tensor], packed: Any, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they were before ``pack``."""
    result = dict(state)
    for name in _names(path, packed):
        places, numbers = result.pop(f"{name}{PLACES}"), result.pop(f"{name}{NUMBERS}")
        size = expected[name].numel()
        bits = np.unpackbits(places.numpy())
        there = torch.from_numpy(bits[:size]).bool()
        if int(there.sum()) != len(numbers) or bits[size:].any():
            raise ModelError(f"{path}: the places of {name!r} don't fit its numbers; save the model again")
        dense = torch.zeros(size, dtype=numbers.dtype)
        dense[there] = numbers
        result[name] = dense.view(expected[name].shape)
    return result


def _names(path: Path, packed: Any) -> list[str]:
    if not isinstance(packed, list) or not all(isinstance(name, str) for name in packed):
        raise ModelError(f"{path}: the list of packed tensors can't be read; save the model again")
    return packed
