"""A user's texts: a CSV, TSV, JSONL or Parquet table with a text and a label column."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from apportion.errors import DataError
from apportion.tasks.cache import file_digest
from apportion.tasks.domain import Domain, text_domain

MAX_FILE_BYTES = 2_000_000_000
TEXT_COLUMNS = ("text", "sentence", "utterance", "content", "question")
LABEL_COLUMNS = ("label", "intent", "category", "class", "target")
_ENDINGS = ".csv, .tsv, .jsonl or .parquet"


def load_table(
    path: Path, *, strict: bool = False, text_column: str | None = None, label_column: str | None = None
) -> Domain:
    """A domain from a table; a column ``split`` is kept, repeated rows are left out and counted.

    Raises:
        DataError: not UTF-8, no such column, an unknown ending, or (``strict``) repeated rows.
    """
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{path} is larger than {MAX_FILE_BYTES} bytes; give a sample of it")
    try:
        rows = list(_rows(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    except (csv.Error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} can't be read ({error}); check its format") from None
    columns = list(dict.fromkeys(name for row in rows[:100] for name in row if name is not None))
    text = _column(path, columns, text_column, TEXT_COLUMNS, "text")
    label = _column(path, columns, label_column, LABEL_COLUMNS, "label")
    for number, row in enumerate(rows, start=1):
        if row.get(text) is None or row.get(label) is None:
            raise DataError(
                f"{path}: row {number} has no {text if row.get(text) is None else label!r}; fill or drop it"
            )
    return text_domain(
        name=path.stem,
        texts=[str(row[text]).strip() for row in rows],
        labels=[str(row[label]).strip() for row in rows],
        splits=[str(row.get("split", "")) for row in rows] if "split" in columns else None,
        licence="the user's",
        provenance=f"table {path.name}",
        checksum=hashlib.sha256(f"{file_digest(path)}/{text}/{label}".encode()).hexdigest(),
        strict=strict,
    )


def has_labels(path: Path) -> bool:
    """Whether a table has a text and a label column; a file that can't be read has none."""
    if path.suffix not in (".csv", ".tsv", ".jsonl", ".parquet"):
        return False
    try:
        first = next(_rows(path), {})
    except (DataError, OSError, ValueError, csv.Error):
        return False
    names = {str(name).lower() for name in first}
    return bool(names & set(TEXT_COLUMNS)) and bool(names & set(LABEL_COLUMNS))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix in (".csv", ".tsv"):
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open(encoding="utf-8-sig") as file:
            for line in file:
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DataError(f"{path} must hold one JSON object a line, with a text and a label")
                    yield row
    elif path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        raise DataError(f"{path} has the unknown ending {path.suffix!r}; possible are {_ENDINGS}")


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError("Parquet files need pyarrow; run: pip install 'apportion[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            unpacked = sum(file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups))
            if unpacked > MAX_FILE_BYTES:
                raise DataError(f"{path} unpacks to {unpacked} bytes, more than {MAX_FILE_BYTES}; give a sample of it")
            yield from file.read().to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} can't be read as Parquet ({str(error).splitlines()[0]}); check its format") from None


def _column(path: Path, columns: Sequence[str], given: str | None, usual: Sequence[str], what: str) -> str:
    for name in (given,) if given else usual:
        if name in columns:
            return name
    wanted = repr(given) if given else f"a {what} column called {' or '.join(usual)}"
    raise DataError(
        f"{path} has the columns {', '.join(map(str, columns)) or 'none'}, not {wanted}; name the {what} column"
    )
