"""Streaming merges: a recipe applied to every tensor of some sources, written into one safetensors file.

Tensors are shared out to a few threads, the largest first; inside a tensor blocks follow one another. What is in memory
is a few blocks per thread, whatever the number of sources and the size of the model.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.core.progress import Progress, Silent, Update
from apportion.device.process import num_cores
from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import FLOATS, Floats, blocks, from_float32, item_bytes
from apportion.methods.compose.recipes import Recipe
from apportion.methods.compose.source import Source, Stack


def write_merged(
    path: Path,
    recipe: Recipe,
    sources: Sequence[Source],
    base: Source | None,
    *,
    dtype: str | None = None,
    copied: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the merged tensors; the sources must have been checked to fit one another.

    Args:
        dtype: of the floating-point tensors written; that of the base or the first source where left out.
        copied: tensors taken from the base or the first source as they are.
        threads: how many tensors are worked on at once; all cores up to four where left out.

    Raises:
        ModelError: a source holds numbers that are not finite, or the disk is full.
    """
    first = base or sources[0]
    plain = {name for name, stored in first.tensors.items() if not stored.mixable} | set(copied)
    layout = _layout(first, plain, dtype)
    header, start = _header(layout)
    total = start + sum(size for _, _, size in layout.values())
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _allocate(handle, total)
        _write(handle, header, 0)
        offsets, position = {}, start
        for name, (_, _, size) in layout.items():
            offsets[name] = position
            position += size
        with (progress or Silent()).stage(f"merging {len(sources)} sources") as update:
            work = _Work(handle, recipe, sources, base, layout, offsets, plain, update)
            work.run(threads or min(4, num_cores()))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise ModelError(
                f"{path.parent.parent} has no room for {total} bytes; free some or name another -o"
            ) from None
        raise
    finally:
        os.close(handle)


class _Work:
    """The tensors to be written and where each goes."""

    def __init__(
        self,
        handle: int,
        recipe: Recipe,
        sources: Sequence[Source],
        base: Source | None,
        layout: Mapping[str, tuple[str, tuple[int, ...], int]],
        offsets: Mapping[str, int],
        plain: set[str],
        update: Update,
    ) -> None:
        self.handle, self.recipe, self.sources, self.base = handle, recipe, sources, base
        self.layout, self.offsets, self.plain, self.update = layout, offsets, plain, update
        self.done, self.total = 0, max(1, sum(size for _, _, size in layout.values()))

    def run(self, threads: int) -> None:
        names = sorted(self.layout, key=lambda name: -self.layout[name][2])
        if threads == 1:
            for name in names:
                self.tensor(name)
            return
        with ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(self.tensor, name) for name in names]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def tensor(self, name: str) -> None:
        dtype, shape, size = self.layout[name]
        first = self.base or self.sources[0]
        if name in self.plain:
            self._copy(name, first)
        else:
            combine = self.recipe.plan(Stack(name, shape, self.sources, self.base))
            position = self.offsets[name]
            for start, stop in blocks(size // FLOATS[dtype]):
                value_N = combine(start, stop)
                if not np.isfinite(value_N).all():
                    raise ModelError(self._blame(name, start, stop))
                position += _write(self.handle, from_float32(value_N, dtype), position)
        self.done += size
        self.update(self.done / self.total)

    def _copy(self, name: str, first: Source) -> None:
        dtype = self.layout[name][0]
        stored = first.tensors[name]
        if stored.mixable and stored.dtype != dtype:
            raw = from_float32(first.read(name), dtype)
            _write(self.handle, raw, self.offsets[name])
        else:
            _write(self.handle, np.frombuffer(first.body.read_bytes(name), np.uint8), self.offsets[name])

    def _blame(self, name: str, start: int, stop: int) -> str:
        for source in (*self.sources, *((self.base,) if self.base else ())):
            if not np.isfinite(source.read(name, start, stop)).all():
                return f"source {source.ref!r} holds numbers that are not finite in {name!r}; leave it out or repair it"
        return f"merging {name!r} gives numbers that are not finite; give smaller weights"


def _layout(first: Source, plain: set[str], dtype: str | None) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of every tensor written."""
    found = {}
    for name, stored in first.tensors.items():
        if not stored.mixable:
            kind = stored.dtype
        else:
            kind = dtype or (stored.dtype if stored.dtype in FLOATS else "F32")
        found[name] = (kind, stored.shape, stored.size * item_bytes(kind))
    return found


def _header(layout: Mapping[str, tuple[str, tuple[int, ...], int]]) -> tuple[Floats, int]:
    """The bytes before the tensors, and their number."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, size) in layout.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    return np.frombuffer(raw, np.uint8), len(raw)


def _allocate(handle: int, total: int) -> None:
    """Takes the room on disk at once, so that a full disk is known before the work is done."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, total)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def _write(handle: int, numbers: NDArray[Any], position: int) -> int:
    """Writes all of an array at a position; returns its size in bytes."""
    raw = np.ascontiguousarray(numbers).data.cast("B")
    written = 0
    while written < len(raw):
        written += os.pwrite(handle, raw[written:], position + written)
    return len(raw)
