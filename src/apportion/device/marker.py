"""The marker: which step a child process is at, in a page shared with its parent that outlives a sudden death."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path

_FIELDS = struct.Struct("=iI")  # the step's place, and how often one was begun
_NOWHERE, _WAITING = -1, -2


class Marker:
    """Names the step at hand. Setting it is a store to memory, cheap enough to come before every timed call."""

    def __init__(self, path: Path, steps: Sequence[str]) -> None:
        if not path.is_file():
            path.write_bytes(_FIELDS.pack(_NOWHERE, 0))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _FIELDS.size)
        self._steps = list(steps)
        self._place_of = {name: place for place, name in enumerate(self._steps)}
        self._num_begun = 0

    def at(self, step: str) -> None:
        """The process begins this step."""
        self._num_begun = (self._num_begun + 1) % 2**32
        _FIELDS.pack_into(self._page, 0, self._place_of[step], self._num_begun)

    def waiting(self) -> None:
        """The process waits for its turn, which is nobody's fault and is not held against its time."""
        _FIELDS.pack_into(self._page, 0, _WAITING, self._num_begun)

    @property
    def step(self) -> str | None:
        """The step at hand, or None before the first and while waiting."""
        place = _FIELDS.unpack_from(self._page)[0]
        return self._steps[place] if place >= 0 else None

    @property
    def is_waiting(self) -> bool:
        return bool(_FIELDS.unpack_from(self._page)[0] == _WAITING)

    @property
    def num_begun(self) -> int:
        """How often a step was begun; tells two calls of one step from a single long one."""
        return int(_FIELDS.unpack_from(self._page)[1])
