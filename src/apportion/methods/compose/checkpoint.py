"""A checkpoint on disk, read block by block: safetensors in one file or shards, mapped a window at a time.

Only the window that is asked for is mapped, so neither memory nor address space grows with the size or the number of
checkpoints. Everything here is numpy: merging needs no torch. Shape letter: N numbers of a block.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apportion.errors import ModelError
from apportion.models.safefile import read_header, read_json, weight_files

Floats: TypeAlias = NDArray[np.float32]

BLOCK = 1 << 18  # numbers in a block: one of each source, the sum and two helpers stay in a core's cache
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"}
_INTEGERS["BOOL"] = "u1"
_PLAIN = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", **_INTEGERS}
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
_SCALES = {"_scale": 1.0, ".SCB": 127.0}  # compressed-tensors, bitsandbytes: what the integers are divided by


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its file, first byte, type and shape; ``scale`` holds the scales of an int8 tensor."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    scale_R: Floats | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def mixable(self) -> bool:
        """Whether numbers of this tensor may be averaged: floating point, or integers with a scale."""
        return self.dtype in FLOATS or self.scale_R is not None


class Checkpoint:
    """The tensors of a model folder, by name, each readable in part.

    Raises:
        ModelError: on opening, a file that is not safetensors, cut short, or that contradicts its header or its index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise ModelError(f"no checkpoint {str(folder)!r}; give a folder with config.json and model.safetensors")
        self.tensors: Mapping[str, Stored] = _with_scales(_find_tensors(folder))
        self._open: dict[Path, BinaryIO] = {}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        path = self.folder / "config.json"
        return read_json(path) if path.is_file() else {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        """Numbers ``start`` to ``stop`` of a tensor in row-major order, as float32; a view of the file where it can."""
        stored = self.tensors[name]
        stop = stored.size if stop is None else stop
        raw_N = map_window(self._handle(stored.path), _PLAIN[stored.dtype], stored.start, start, stop)
        if stored.scale_R is None:
            return to_float32(raw_N, stored.dtype)
        number_N = raw_N.astype(np.float32)
        if len(stored.scale_R) == 1:
            return number_N * stored.scale_R[0]
        row_N = np.arange(start, stop) // (stored.size // stored.shape[0])
        return number_N * stored.scale_R[row_N]

    def _handle(self, path: Path) -> BinaryIO:
        """The file of a shard, kept open; closed with the checkpoint."""
        if path not in self._open:
            self._open[path] = path.open("rb", buffering=0)
        return self._open[path]

    def read_bytes(self, name: str) -> bytes:
        """A whole tensor as it is stored; for small ones that are not mixed (positions, counters)."""
        stored = self.tensors[name]
        return read_window(stored.path, "u1", stored.start, 0, stored.size * item_bytes(stored.dtype)).tobytes()

    def files(self) -> dict[str, Path]:
        """The files beside the weights that a model folder needs: config, tokenizer, preprocessing, pooling."""
        return {name: self.folder / name for name in COMPANIONS if (self.folder / name).is_file()}


def item_bytes(dtype: str) -> int:
    return np.dtype(_PLAIN[dtype]).itemsize


def blocks(size: int, block: int = BLOCK) -> Iterator[tuple[int, int]]:
    """The ranges that a tensor of ``size`` numbers is read in."""
    return ((start, min(start + block, size)) for start in range(0, size, block))


def read_window(path: Path, kind: str, offset: int, start: int, stop: int) -> NDArray[Any]:
    """Numbers ``start`` to ``stop`` of an array that begins at byte ``offset`` of a file."""
    with path.open("rb", buffering=0) as file:
        return map_window(file, kind, offset, start, stop)


def map_window(file: BinaryIO, kind: str, offset: int, start: int, stop: int) -> NDArray[Any]:
    """The same of an open file: a view of its pages, unmapped when it is let go."""
    dtype = np.dtype(kind)
    if stop <= start:
        return np.empty(0, dtype)
    first = offset + start * dtype.itemsize
    page = first - first % mmap.ALLOCATIONGRANULARITY
    length = first - page + (stop - start) * dtype.itemsize
    if os.fstat(file.fileno()).st_size < page + length:
        raise ModelError(f"{file.name} became shorter while it was read; fetch it again")
    window = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=page)
    return np.frombuffer(window, dtype, stop - start, first - page)


def to_float32(raw_N: NDArray[Any], dtype: str) -> Floats:
    """Stored numbers as float32; bfloat16 is the upper half of a float32."""
    if dtype == "F32":
        return raw_N
    if dtype == "BF16":
        return (raw_N.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw_N.astype(np.float32)


def from_float32(value_N: Floats, dtype: str) -> NDArray[Any]:
    """Float32 numbers as they are stored, rounded to nearest even."""
    if dtype == "F32":
        return value_N
    if dtype == "BF16":
        bits_N = value_N.view(np.uint32)
        odd_N = (bits_N >> np.uint32(16)) & np.uint32(1)
        rounded_N = ((bits_N + (odd_N + np.uint32(0x7FFF))) >> np.uint32(16)).astype("<u2")
        return np.where(np.isnan(value_N), np.uint16(0x7FC0), rounded_N)  # rounding must not turn NaN into infinity
    return value_N.astype(_PLAIN[dtype])


def _find_tensors(folder: Path) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for path in weight_files(folder):
        infos = read_header(path)
        length, offsets = _offsets(path)
        for name, info in infos.items():
            if name in tensors:
                raise ModelError(f"{path} and {tensors[name].path.name} both hold the tensor {name!r}; fetch it again")
            if info.dtype not in _PLAIN:
                possible = ", ".join(FLOATS)
                raise ModelError(f"{path}: tensor {name!r} is of type {info.dtype}, which is not read; use {possible}")
            tensors[name] = Stored(path, 8 + length + offsets[name], info.dtype, info.shape)
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        listed = read_json(index)["weight_map"]
        assert isinstance(listed, dict)  # weight_files has read it
        for name, file in listed.items():
            if name not in tensors or tensors[name].path.name != file:
                raise ModelError(
                    f"{index} says that {file} holds the tensor {name!r}, which it does not; fetch it again"
                )
    if not tensors:
        raise ModelError(f"{folder} holds no tensors; fetch it again")
    return tensors


def _offsets(path: Path) -> tuple[int, dict[str, int]]:
    """Length of a checked header, and the first byte of every tensor after it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return length, {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _with_scales(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Gives int8 tensors the scales stored beside them, which then no longer count as tensors of their own."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype not in ("I8", "U8"):
            continue
        for ending, divisor in _SCALES.items():
            scale_name = name.removesuffix("weight").rstrip(".") + ending if ending == ".SCB" else name + ending
            scale = tensors.get(scale_name)
            if scale is None:
                continue
            if scale.dtype not in FLOATS or scale.size not in (1, stored.shape[0] if stored.shape else 1):
                raise ModelError(
                    f"{stored.path}: the scales {scale_name!r} have the shape {list(scale.shape)}, which does not fit "
                    f"{name!r} of {list(stored.shape)}; give one scale or one per row"
                )
            if f"{name}_zero_point" in tensors or stored.dtype == "U8":
                raise ModelError(
                    f"{stored.path}: tensor {name!r} has zero points, which are not read; use symmetric int8"
                )
            raw_N = read_window(scale.path, _PLAIN[scale.dtype], scale.start, 0, scale.size)
            scale_R = to_float32(raw_N, scale.dtype) / np.float32(divisor)
            found[name] = Stored(stored.path, stored.start, stored.dtype, stored.shape, scale_R)
            found.pop(scale_name)
            found.pop(name.removesuffix("weight").rstrip(".") + ".weight_format", None)
    return found
