"""Taking turns: one process of a machine times at a time, so that runs side by side don't slow each other.

Processes of one session are started together, since starting takes longer than timing; none times before all are ready.
"""

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


def wait_for_all(gate: Path, place: int, number: int, max_wait_s: float = 5 * MAX_WAIT_S) -> None:
    """Says that the process of this place is ready, and waits until all ``number`` of them are.

    A process is ready once a file of its place stands in the folder ``gate``; the parent puts those of the dead there.
    """
    (gate / str(place)).touch()
    deadline = time.monotonic() + max_wait_s
    while sum(1 for _ in gate.iterdir()) < number and time.monotonic() < deadline:
        time.sleep(_POLL_S)
