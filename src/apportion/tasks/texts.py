"""Texts to calibrate and judge on: a user's file, or the conversations in a registry package."""

from __future__ import annotations

import csv
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from apportion.errors import DataError

DEMO_PACKAGE = "chatterbot-corpus"
MAX_FILE_BYTES = 2_000_000_000
_COLUMNS = ("text", "sentence", "utterance", "content")


def load_texts(path: Path) -> list[str]:
    """Texts from a file: one a line (``.txt``), or the text column of ``.csv``, ``.tsv`` or ``.jsonl``; each once.

    Raises:
        DataError: no such file, not UTF-8, no text column, or fewer than two texts.
    """
    if not path.is_file():
        raise DataError(f"no data file {path}; give a .txt, .csv, .tsv or .jsonl file of texts")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{path} is larger than {MAX_FILE_BYTES} bytes; give a sample of it")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            texts = list(_read(path, file))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); check its format") from None
    return distinct(texts, str(path))


def _read(path: Path, lines: Iterable[str]) -> Iterable[str]:
    if path.suffix == ".txt":
        yield from lines
    elif path.suffix in (".csv", ".tsv"):
        rows = csv.DictReader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
        column = _column(rows.fieldnames or [], path)
        yield from (row[column] or "" for row in rows)
    elif path.suffix in (".jsonl", ".json"):
        for line in lines:
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{path} must hold one JSON object a line, with a text field")
                yield str(row[_column(row, path)])
    else:
        raise DataError(f"{path} has the unknown ending {path.suffix!r}; possible are .txt, .csv, .tsv, .jsonl")


def _column(names: Iterable[str], path: Path) -> str:
    listed = list(names)
    for column in _COLUMNS:
        if column in listed:
            return column
    raise DataError(f"{path} has the columns {', '.join(listed) or 'none'}; one must be called {' or '.join(_COLUMNS)}")


def demo_texts() -> list[str]:
    """English sentences from the package ``chatterbot-corpus``, read as files without importing it."""
    try:
        distribution = importlib.metadata.distribution(DEMO_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(
            f"the demo's texts are not installed; run: pip install {DEMO_PACKAGE}, or give --data"
        ) from None
    folder = Path(str(distribution.locate_file("chatterbot_corpus/data/english")))
    texts: list[str] = []
    for path in sorted(folder.glob("*.yml")):
        conversations = yaml.safe_load(path.read_text(encoding="utf-8")).get("conversations") or []
        texts += [str(text) for conversation in conversations for text in conversation]
    return distinct(texts, DEMO_PACKAGE)


def distinct(texts: Iterable[str], source: str) -> list[str]:
    kept = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if len(kept) < 2:
        raise DataError(f"{source} holds {len(kept)} distinct texts; give at least two")
    return kept
