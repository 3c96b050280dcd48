"""A folder that appears whole or not at all: written as a draft beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apportion.errors import ModelError

RECORD = "compose.json"


def refuse_foreign(folder: Path) -> None:
    """Raises where a folder holds something else than an earlier result."""
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} holds something else than a composed model; name a new folder")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A draft folder to write into; it takes its place when the block ends well and vanishes when it does not."""
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        if folder.exists():
            folder.rename(old)
        try:
            draft.rename(folder)
        except BaseException:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
