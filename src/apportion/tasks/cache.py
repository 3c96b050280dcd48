"""A folder of derived files (decoded images, tokens, features): named by content, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from apportion.core.folder import write_whole

Arrays = dict[str, NDArray[Any]]


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/apportion``, or ``~/.cache/apportion``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "apportion"


def cached(kind: str, key: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that ``make`` returns for a key, from disk when they were made before.

    A file that can't be read is made again; a folder that can't be written costs the time, not the result.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    path = cache_root() / kind / f"{name[:40]}.safetensors"
    with contextlib.suppress(OSError, SafetensorError):
        return load_file(path)
    arrays = {name: np.ascontiguousarray(array) for name, array in make().items()}
    with contextlib.suppress(OSError):
        write_whole(path, save(arrays))
    return arrays


def file_digest(path: Path) -> str:
    """SHA-256 of a file (as in ``models.safefile``, which can't be had without loading torch)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
