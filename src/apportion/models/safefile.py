"""Checks on files from outside before anything in them is used: safetensors only, no lies about sizes."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from apportion.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
MAX_CONTENT_BYTES = 2**30  # that are read for a digest
_DTYPE_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "C64": 64,
}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a safetensors header declares it."""

    dtype: str
    shape: tuple[int, ...]


def refuse_pickle(path: Path) -> None:
    """Raises for a file whose name or first bytes say that it is a pickle, which could run code when loaded."""
    start = b""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(4)
    if path.suffix in _PICKLE_SUFFIXES or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise ModelError(
            f"{path} is a pickle, which can run code when loaded; only safetensors are read: convert it with "
            "safetensors.torch.save_file"
        )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file declares, after checking them against the file's size.

    Raises:
        ModelError: not a safetensors file, cut short, or a header that contradicts itself or the file.
    """
    refuse_pickle(path)
    if not path.is_file():
        raise ModelError(f"{path} does not exist; give a folder with config.json and model.safetensors")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(f"{path} is not a safetensors file or was cut short ({size} bytes); fetch it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        infos = {name: _info(entry) for name, entry in entries.items()}
        spans = sorted((*_offsets(entry), name) for name, entry in entries.items())
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        raise ModelError(
            f"{path} has a header that can't be read; it is not a safetensors file: fetch it again"
        ) from None
    position = 0
    for begin, end, name in spans:
        info = infos[name]
        if begin != position or (end - begin) * 8 != math.prod(info.shape) * _DTYPE_BITS[info.dtype]:
            raise ModelError(
                f"{path}: tensor {name!r} claims bytes {begin} to {end}, which don't fit its shape; fetch it again"
            )
        position = end
    if position != size - 8 - length:
        raise ModelError(
            f"{path} declares {position} bytes of tensors but holds {size - 8 - length}; it was cut short or altered: "
            "fetch it again"
        )
    try:
        with safe_open(path, framework="np"):  # the reader that will load it must agree
            pass
    except SafetensorError:
        raise ModelError(f"{path} has a header that safetensors does not read; fetch it again") from None
    return infos


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError
    return begin, end


def _info(entry: dict[str, Any]) -> TensorInfo:
    shape = tuple(entry["shape"])
    if entry["dtype"] not in _DTYPE_BITS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError
    return TensorInfo(str(entry["dtype"]), shape)


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file, or one clear line."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; give a folder with config.json and model.safetensors") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); fetch it again") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds no JSON object; fetch it again")
    return fields


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: one file, or the shards that its index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        weights = read_json(index).get("weight_map")
        named = list(weights.values()) if isinstance(weights, dict) else []
        names = {name for name in named if isinstance(name, str) and Path(name).name == name}
        if (
            not names
            or any(name not in names for name in named if isinstance(name, str))
            or len(named) != sum(isinstance(name, str) for name in named)
        ):
            raise ModelError(f"{index} names no shards, or shards outside its folder; fetch it again")
        return [folder / name for name in sorted(names)]
    for path in sorted(folder.iterdir()):
        refuse_pickle(path)
    raise ModelError(f"{folder} has no model.safetensors; give a folder with config.json and model.safetensors")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(path: Path) -> str:
    """One SHA-256 of a file, or of a folder; of one that is large over the names and sizes of its files."""
    if path.is_file():
        return file_digest(path)
    sizes = {file.relative_to(path).as_posix(): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    if sum(sizes.values()) <= MAX_CONTENT_BYTES:
        return folder_digest(path)
    return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """One SHA-256 over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return total.hexdigest()
