"""The store: sources kept whole or as differences to a base, in blocks named by their content.

``sources/NAME.json`` lists a source's tensors; ``blocks/ab/…`` holds the bytes, each block once however many sources
share it. A source appears when its list is written, which happens last; a block is never changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from apportion.core.folder import write_whole
from apportion.core.progress import Progress, Silent
from apportion.errors import ModelError
from apportion.methods.compose.checkpoint import BLOCK, FLOATS, Floats, blocks, item_bytes
from apportion.methods.compose.compat import check_sources
from apportion.methods.compose.delta import CODINGS, Dense, low_rank, read_low_rank
from apportion.methods.compose.recipes import Scratch, Trim
from apportion.methods.compose.source import Readable, Source, Stack
from apportion.models.safefile import read_json

FORMAT = 1
CHUNK = 16 * BLOCK  # numbers in a block file
KINDS = ("whole", "dense", "sparse", "low-rank", "int8")
_SMALL = 4096  # tensors of fewer numbers are kept as they are
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class Kept:
    """A tensor in the store: the way it is kept and its blocks; ``rank`` for factors."""

    dtype: str
    shape: tuple[int, ...]
    kind: str
    parts: tuple[tuple[str, int], ...]
    rank: int = 0

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def mixable(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True, kw_only=True)
class Added:
    """What adding a source cost and lost: bytes new on disk, bytes of the original, relative error of what is kept."""

    name: str
    new_bytes: int
    whole_bytes: int
    error_ratio: float


class Store:
    """A folder of sources; made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "sources").glob("*.json"))

    def record(self, name: str) -> Mapping[str, Any]:
        path = self.folder / "sources" / f"{name}.json"
        if not _NAME.match(name) or not path.is_file():
            known = ", ".join(self.names()) or "nothing"
            raise ModelError(f"the store {self.folder} holds no source {name!r}; it holds {known}")
        fields = read_json(path)
        if fields.get("apportion_source") != FORMAT:
            raise ModelError(f"{path} is of another format than {FORMAT}; add the source again")
        return fields

    def open(self, name: str) -> Readable:
        """A source by name; sizes of all its blocks are checked, their contents are not (``check`` does that)."""
        fields = self.record(name)
        base = fields.get("base")
        if base is not None and (not isinstance(base, str) or self.record(base).get("base") is not None):
            raise ModelError(f"source {name!r} names the base {base!r}, which is no whole source; add it again")
        return _StoredSource(self, name, fields, self.open(base) if base else None)

    def add(
        self,
        name: str,
        source: Source,
        *,
        base: str | None = None,
        kind: str = "whole",
        density: float = 0.05,
        rank: int = 16,
        progress: Progress | None = None,
    ) -> Added:
        """Keeps a source under a name.

        Args:
            base: name of a whole source in the store that differences are taken to.
            kind: ``whole``, or for differences ``dense``, ``sparse`` (the share ``density`` of largest magnitude of
                every tensor), ``low-rank`` (``rank`` directions of every matrix) or ``int8``.
        """
        if not _NAME.match(name):
            raise ModelError(f"{name!r} is no name for a source; use letters, digits, '.', '_' and '-', at most 64")
        if name in self.names():
            raise ModelError(f"the store already holds {name!r}; remove it first or choose another name")
        if kind not in KINDS:
            raise ModelError(f"kind {kind!r} is not known; possible are {', '.join(KINDS)}")
        if (kind == "whole") != (base is None):
            raise ModelError(
                f"kind {kind!r} {'takes no base' if base else 'needs a base'}; see apportion sources add -h"
            )
        if not 0 < density <= 1 or rank < 1:
            raise ModelError(f"density {density:g} and rank {rank} must be a share above 0 and a number above 0")
        parent = None if base is None else Source(base, base, self.open(base))
        check_sources([source], parent)
        writer = _Writer(self, Stack("", (), [source], parent), kind, density, rank)
        try:
            with (progress or Silent()).stage(f"adding {name}") as update:
                tensors = {}
                for place, tensor in enumerate(source.tensors):
                    tensors[tensor] = writer.tensor(tensor)
                    update((place + 1) / len(source.tensors))
            files = {file: writer.block(path.read_bytes()) for file, path in source.body.files().items()}
            record = {
                "apportion_source": FORMAT,
                "name": name,
                "origin": source.ref,
                "base": base,
                "kind": kind,
                "error_ratio": writer.error_ratio,
                "whole_bytes": writer.whole_bytes,
                "tensors": tensors,
                "files": files,
            }
            write_whole(self.folder / "sources" / f"{name}.json", json.dumps(record).encode())
        except BaseException:
            self.drop_unused()
            raise
        return Added(
            name=name, new_bytes=writer.new_bytes, whole_bytes=writer.whole_bytes, error_ratio=writer.error_ratio
        )

    def remove(self, name: str) -> int:
        """Forgets a source and deletes the blocks that no other needs; returns the bytes freed."""
        self.record(name)
        needed_by = [other for other in self.names() if self.record(other).get("base") == name]
        if needed_by:
            raise ModelError(f"source {name!r} is the base of {', '.join(needed_by)}; remove those first")
        (self.folder / "sources" / f"{name}.json").unlink()
        return self.drop_unused()

    def check(self, name: str) -> list[str]:
        """Reads every block of a source and compares it with its name; returns what is wrong, naming the tensor."""
        fields = self.record(name)
        self.open(name)
        wrong = []
        for tensor, kept in _tensors(name, fields).items():
            for digest, _ in kept.parts:
                if _file_digest(self.block_path(digest)) != digest:
                    wrong.append(f"source {name!r}: a block of {tensor!r} is not what was stored; add the source again")
        for file, (digest, _) in _files(name, fields).items():
            if _file_digest(self.block_path(digest)) != digest:
                wrong.append(f"source {name!r}: the file {file!r} is not what was stored; add the source again")
        return wrong

    def block_path(self, digest: str) -> Path:
        return self.folder / "blocks" / digest[:2] / digest

    def put(self, data: bytes) -> tuple[str, int, bool]:
        """Keeps a block; returns its name, its size and whether it is new."""
        digest = hashlib.sha256(data).hexdigest()
        path = self.block_path(digest)
        if path.is_file():
            return digest, len(data), False
        write_whole(path, data)
        return digest, len(data), True

    def drop_unused(self) -> int:
        """Deletes blocks that no source names; returns their bytes."""
        used = set()
        for name in self.names():
            fields = self.record(name)
            used |= {digest for kept in _tensors(name, fields).values() for digest, _ in kept.parts}
            used |= {digest for digest, _ in _files(name, fields).values()}
        freed = 0
        for path in (self.folder / "blocks").glob("*/*"):
            if path.name not in used:
                freed += path.stat().st_size
                path.unlink()
        return freed


class _Writer:
    """Turns tensors into blocks and counts what that costs and loses."""

    def __init__(self, store: Store, stack: Stack, kind: str, density: float, rank: int) -> None:
        self.store, self.source, self.base = store, stack.sources[0], stack.base
        self.kind, self.density, self.rank = kind, density, rank
        self.new_bytes = self.whole_bytes = 0
        self.lost = self.norm = 0.0

    @property
    def error_ratio(self) -> float:
        return float(np.sqrt(self.lost / self.norm)) if self.norm else 0.0

    def block(self, data: bytes) -> tuple[str, int]:
        digest, size, new = self.store.put(data)
        self.new_bytes += size * new
        return digest, size

    def tensor(self, name: str) -> dict[str, Any]:
        stored = self.source.tensors[name]
        dtype = stored.dtype if stored.dtype in FLOATS or not stored.mixable else "F32"
        self.whole_bytes += stored.size * item_bytes(dtype)
        kept: dict[str, Any] = {"dtype": dtype, "shape": list(stored.shape)}
        if not stored.mixable:
            return {**kept, "kind": "whole", "parts": [self.block(self.source.body.read_bytes(name))]}
        if self.base is None:
            coding = Dense(dtype)
            parts = [self.block(coding.encode(self._finite(name, *chunk))) for chunk in blocks(stored.size, CHUNK)]
            return {**kept, "kind": "whole", "parts": parts}
        stack = Stack(name, stored.shape, [self.source], self.base)
        if self._unchanged(stack):
            return {**kept, "kind": "same", "parts": []}
        kind = self.kind if stored.size >= _SMALL else "dense"
        if kind == "low-rank":
            columns = stored.size // stored.shape[0]
            if len(stored.shape) > 1 and self.rank * 2 <= min(stored.shape[0], columns):
                delta_MD = self._delta(stack, 0, stored.size).reshape(stored.shape[0], columns)
                left_MR, right_RD = low_rank(delta_MD, self.rank)
                self._count(stack, 0, stored.size, (left_MR @ right_RD).reshape(-1))
                parts = [self.block(left_MR.tobytes()), self.block(right_RD.tobytes())]
                return {**kept, "kind": "low-rank", "rank": self.rank, "parts": parts}
            kind = "dense"
        trim = Trim.of(stack, 0, self.density) if kind == "sparse" else None
        parts = []
        for start, stop in blocks(stored.size, CHUNK):
            delta_N = self._delta(stack, start, stop)
            if trim is not None:
                delta_N = trim.apply(delta_N, Scratch())
            parts.append(self.block(CODINGS[kind].encode(delta_N)))
            self._count(
                stack,
                start,
                stop,
                CODINGS[kind].decode(self.store.block_path(parts[-1][0]), stop - start, 0, stop - start),
            )
        return {**kept, "kind": kind, "parts": parts}

    def _finite(self, name: str, start: int, stop: int) -> Floats:
        value_N = self.source.read(name, start, stop)
        if not np.isfinite(value_N).all():
            raise ModelError(
                f"source {self.source.ref!r} holds numbers that are not finite in {name!r}; repair it first"
            )
        return value_N

    def _delta(self, stack: Stack, start: int, stop: int) -> Floats:
        return np.subtract(self._finite(stack.name, start, stop), stack.read_base(start, stop))

    def _unchanged(self, stack: Stack) -> bool:
        return all(
            np.array_equal(stack.read(0, start, stop), stack.read_base(start, stop))
            for start, stop in blocks(stack.size)
        )

    def _count(self, stack: Stack, start: int, stop: int, delta_N: Floats) -> None:
        value_N = stack.read(0, start, stop)
        wrong_N = (stack.read_base(start, stop) + delta_N - value_N).astype(np.float64)
        self.lost += float(wrong_N @ wrong_N)
        self.norm += float(np.square(value_N, dtype=np.float64).sum())


class _StoredSource:
    """A source in the store; only the blocks that are asked for are read."""

    def __init__(self, store: Store, name: str, fields: Mapping[str, Any], base: Readable | None) -> None:
        self.store, self.name, self.base = store, name, base
        self.tensors: Mapping[str, Kept] = _tensors(name, fields)
        self._files = _files(name, fields)
        for tensor, kept in self.tensors.items():
            self._check(tensor, kept)
        for file, (digest, size) in self._files.items():
            self._size(f"the file {file!r}", digest, size)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        path = self.files().get("config.json")
        return read_json(path) if path is not None else {}

    def files(self) -> dict[str, Path]:
        return {file: self.store.block_path(digest) for file, (digest, _) in self._files.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        kept = self.tensors[name]
        stop = kept.size if stop is None else stop
        if kept.kind == "whole":
            return self._chunks(kept, start, stop)
        assert self.base is not None
        base_N = self.base.read(name, start, stop)
        if kept.kind == "same":
            return base_N
        if kept.kind == "low-rank":
            left, right = (self.store.block_path(digest) for digest, _ in kept.parts)
            return base_N + read_low_rank(left, right, kept.rank, kept.size // kept.shape[0], start, stop)
        return base_N + self._chunks(kept, start, stop)

    def read_bytes(self, name: str) -> bytes:
        kept = self.tensors[name]
        if kept.mixable:
            return Dense(kept.dtype).encode(self.read(name))
        return b"".join(self.store.block_path(digest).read_bytes() for digest, _ in kept.parts)

    def _chunks(self, kept: Kept, start: int, stop: int) -> Floats:
        coding = Dense(kept.dtype) if kept.kind == "whole" else CODINGS[kept.kind]
        found = []
        for place in range(start // CHUNK, -(-stop // CHUNK)):
            size = min(CHUNK, kept.size - place * CHUNK)
            low, high = max(start - place * CHUNK, 0), min(stop - place * CHUNK, size)
            found.append(coding.decode(self.store.block_path(kept.parts[place][0]), size, low, high))
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.float32)])

    def _check(self, tensor: str, kept: Kept) -> None:
        what = f"a block of {tensor!r}"
        for digest, size in kept.parts:
            self._size(what, digest, size)
        if kept.kind == "same":
            right = self.base is not None and not kept.parts
        elif kept.kind == "low-rank":
            columns = kept.size // max(1, kept.shape[0] if kept.shape else 1)
            sizes = [4 * kept.rank * kept.shape[0], 4 * kept.rank * columns] if kept.shape else []
            right = self.base is not None and [size for _, size in kept.parts] == sizes
        elif not kept.mixable:
            right = sum(size for _, size in kept.parts) == kept.size * item_bytes(kept.dtype)
        else:
            coding = Dense(kept.dtype) if kept.kind == "whole" else CODINGS[kept.kind]
            sizes = [stop - start for start, stop in blocks(kept.size, CHUNK)]
            right = len(sizes) == len(kept.parts) and all(
                coding.fits(num_bytes, size) for (_, num_bytes), size in zip(kept.parts, sizes, strict=True)
            )
            right = right and (kept.kind == "whole" or self.base is not None)
        if self.base is not None and right and kept.kind != "whole":
            right = tensor in self.base.tensors and self.base.tensors[tensor].shape == kept.shape
        if not right:
            raise ModelError(f"source {self.name!r}: what is stored of {tensor!r} does not fit its shape; add it again")

    def _size(self, what: str, digest: str, size: int) -> None:
        path = self.store.block_path(digest)
        if not path.is_file() or path.stat().st_size != size:
            raise ModelError(f"source {self.name!r}: {what} is missing or cut short; add the source again")


def default_store() -> Path:
    """``$APPORTION_STORE``, or ``$XDG_DATA_HOME/apportion/store``, or ``~/.local/share/apportion/store``."""
    given, home = os.environ.get("APPORTION_STORE"), os.environ.get("XDG_DATA_HOME")
    if given:
        return Path(given)
    return (Path(home) if home else Path.home() / ".local" / "share") / "apportion" / "store"


def _tensors(name: str, fields: Mapping[str, Any]) -> dict[str, Kept]:
    try:
        found = {}
        for tensor, kept in fields["tensors"].items():
            shape = tuple(kept["shape"])
            item_bytes(kept["dtype"])
            if any(type(side) is not int or side < 0 for side in shape) or kept["kind"] not in (*KINDS, "same"):
                raise ValueError
            found[tensor] = Kept(kept["dtype"], shape, kept["kind"], _parts(kept["parts"]), int(kept.get("rank", 0)))
        return found
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ModelError(f"the list of source {name!r} can't be read; add the source again") from None


def _files(name: str, fields: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    try:
        files = {str(file): _parts([part])[0] for file, part in fields["files"].items()}
        if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
            raise ValueError
        return files
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"the list of source {name!r} can't be read; add the source again") from None


def _parts(parts: Any) -> tuple[tuple[str, int], ...]:
    found = tuple((digest, size) for digest, size in parts)
    if any(not isinstance(digest, str) or not _DIGEST.match(digest) or type(size) is not int for digest, size in found):
        raise ValueError
    return found


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def each(store: Store) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every source's name and record."""
    return ((name, store.record(name)) for name in store.names())
