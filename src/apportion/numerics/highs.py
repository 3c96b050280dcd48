"""What HiGHS, the solver of linear and integer programs, needs around it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drops what C code prints: HiGHS has a stray printf (jump-dev/HiGHS.jl#312) that would spoil ``--json``."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: nothing to spoil
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        with contextlib.suppress(OSError, TypeError, AttributeError):  # no C library to be asked by this name
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
