"""Domains by name: built-in sources, one small file each, and the user's folders and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.domains import (
    chatterbot,
    clinc,
    digits,
    fashion,
    folder,
    intents,
    omniglot,
    photos,
    table,
)
from apportion.tasks.domains.entry import Entry

BUILT_IN: Mapping[str, Entry] = {
    **intents.ENTRIES,
    **clinc.ENTRIES,
    **photos.ENTRIES,
    **omniglot.ENTRIES,
    **fashion.ENTRIES,
    **digits.ENTRIES,
    **chatterbot.ENTRIES,
}


def load_domain(
    ref: str, *, strict: bool = False, text_column: str | None = None, label_column: str | None = None
) -> Domain:
    """A domain by name or path.

    Args:
        ref: a built-in name (``apportion tasks list``), a folder or ``.zip`` of class folders with images, or a
            ``.csv``, ``.tsv``, ``.jsonl`` or ``.parquet`` table with a text and a label column.
        strict: refuse unreadable images and repeated rows instead of leaving them out and counting them.
        text_column, label_column: columns of a table, where their names are not the usual ones.
    """
    if ref in BUILT_IN:
        return BUILT_IN[ref].load()
    path = Path(ref)
    if path.is_dir():
        return folder.load_folder(path, strict=strict)
    if path.suffix == ".zip" and path.is_file():
        return folder.load_archive(path, strict=strict)
    if path.is_file():
        return table.load_table(path, strict=strict, text_column=text_column, label_column=label_column)
    raise DataError(
        f"no domain {ref!r}: neither a built-in name ({', '.join(sorted(BUILT_IN))}) nor a folder of class folders nor "
        "a .csv, .tsv, .jsonl, .parquet or .zip file here"
    )


__all__ = ["BUILT_IN", "Entry", "load_domain"]
