"""The folder of a composed model."""

from __future__ import annotations

from pathlib import Path

from apportion.errors import ModelError

RECORD = "compose.json"


def refuse_foreign(folder: Path) -> None:
    """Raises where a folder holds something else than an earlier result."""
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} holds something else than a composed model; name a new folder")
