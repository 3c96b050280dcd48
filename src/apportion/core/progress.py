"""Progress of long work, told in stages; the command line draws bars, everyone else may stay silent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

Update: TypeAlias = Callable[[float], None]


class Progress(Protocol):
    """Opens a stage; inside it, the share of the work done is told as a number in [0, 1]."""

    def stage(self, name: str) -> AbstractContextManager[Update]: ...


class Silent:
    """Tells nothing."""

    def stage(self, name: str) -> AbstractContextManager[Update]:
        return nullcontext(lambda share: None)
