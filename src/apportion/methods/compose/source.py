"""A source: a checkpoint to compose from, whichever way it is kept; and the same tensor across several sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from apportion.methods.compose.checkpoint import Checkpoint, Floats
from apportion.models.registry import BUILT_IN, find_packaged


class Shaped(Protocol):
    """What must be known of a tensor before it is read."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def mixable(self) -> bool: ...


class Readable(Protocol):
    """Tensors by name, each readable in part, and the files that stand beside them."""

    @property
    def tensors(self) -> Mapping[str, Shaped]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Floats: ...
    def read_bytes(self, name: str) -> bytes: ...
    def files(self) -> Mapping[str, Path]: ...


@dataclass(frozen=True)
class Source:
    """A named checkpoint; ``ref`` is what the user called it."""

    name: str
    ref: str
    body: Readable

    @property
    def tensors(self) -> Mapping[str, Shaped]:
        return self.body.tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Floats:
        return self.body.read(name, start, stop)


def open_source(ref: str, *, store: Path | None = None) -> Source:
    """Opens a source by a name in the store, a built-in name, or a folder; no weights are read yet."""
    if store is not None and "/" not in ref and (store / "sources" / f"{ref}.json").is_file():
        from apportion.methods.compose.store import Store

        return Source(ref, ref, Store(store).open(ref))
    if ref in BUILT_IN and not Path(ref).exists():
        return Source(ref, ref, Checkpoint(find_packaged(ref)))
    path = Path(ref)
    return Source(path.resolve().name, ref, Checkpoint(path))


@dataclass(frozen=True)
class Stack:
    """One tensor in every source, and in the base where there is one."""

    name: str
    shape: tuple[int, ...]
    sources: Sequence[Source]
    base: Source | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self, place: int, start: int, stop: int) -> Floats:
        return self.sources[place].read(self.name, start, stop)

    def read_base(self, start: int, stop: int) -> Floats:
        assert self.base is not None
        return self.base.read(self.name, start, stop)


def stacks(sources: Sequence[Source], base: Source | None, names: Sequence[str]) -> Iterator[Stack]:
    for name in names:
        yield Stack(name, (base or sources[0]).tensors[name].shape, sources, base)
