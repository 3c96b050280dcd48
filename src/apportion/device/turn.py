"""Taking turns: one process of a machine times at a time, so that runs side by side don't slow each other."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "timing.lock"
MAX_WAIT_S = 120.0
_POLL_S = 0.05


@contextmanager
def turn(folder: Path, max_wait_s: float = MAX_WAIT_S) -> Iterator[float]:
    """Waits until nobody else times, and holds the turn; yields the seconds waited.

    After ``max_wait_s`` it goes on without the turn: a stuck neighbour is a disturbance, not a reason to wait for ever.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with (folder / LOCK).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() - began > max_wait_s:
                    break
                time.sleep(_POLL_S)
        yield time.monotonic() - began
