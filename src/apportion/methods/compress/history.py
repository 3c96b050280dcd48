"""Earlier runs: their ledgers, read without locking or changing them, and what each proposal lost and saved."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apportion.core.knob import Value
from apportion.core.ledger import VERSION, Row
from apportion.errors import LedgerError


def read_runs(path: Path) -> list[list[Row]]:
    """The rows of a ledger file, or of every ledger in a folder, such as a run's with one per rung."""
    if not path.is_dir():
        return [read_rows(path)]
    files = sorted((*path.rglob("ledger.jsonl"), *path.rglob("*.jsonl.gz")))
    if not files:
        raise LedgerError(f"{path} holds no ledger; give the folder of a run")
    return [read_rows(file) for file in files]


def read_rows(file: Path) -> list[Row]:
    """The rows of a ledger file; a last line cut short by a kill is left out."""
    try:
        content = file.read_bytes()
        *lines, _ = (gzip.decompress(content) if file.suffix == ".gz" else content).split(b"\n")
    except (OSError, EOFError, zlib.error):
        raise LedgerError(f"{file} can't be read; give a run folder or its ledger.jsonl") from None
    try:
        header, *fields = [json.loads(line) for line in lines] or [None]
    except (ValueError, RecursionError):
        raise LedgerError(f"{file} is damaged; leave that run out") from None
    if not isinstance(header, dict) or header.get("apportion_ledger") != VERSION:
        raise LedgerError(f"{file} is not a ledger of version {VERSION}; leave it out")
    rows = [Row.from_json(row) for row in fields]
    if any(row.step != step for step, row in enumerate(rows)):
        raise LedgerError(f"{file} has gaps between its rows; leave that run out")
    return rows


@dataclass(frozen=True)
class Seen:
    """One proposal that was read: what it changed, and what that lost and saved at the setting it was made from.

    ``saved`` is the excess saved, ``ratio`` the quality lost per excess saved, infinite where nothing was saved;
    ``base`` is the step of the row it was made from. ``censored`` says that the proposal met the budget, so that it
    may have saved more than was due.
    """

    step: int
    base: int
    knob: str
    old: Value
    value: Value
    ratio: float
    saved: float
    censored: bool


def seen(rows: Sequence[Row], quality: str = "quality") -> list[Seen]:
    """Every proposal of a ledger that was read, oldest first.

    After a failed check the limits are others, which a ledger does not hold; what is proposed between that and the
    next accepted move is left out, and so are moves that were accepted for restoring quality.
    """
    found: list[Seen] = []
    base: Row | None = None
    comparable = True
    for row in rows:
        if row.kind == "check":
            comparable = comparable and row.accepted
            continue
        if base is not None and comparable and row.knob is not None and row.value is not None:
            lost = base.readings[quality].value - row.readings[quality].value
            saved = base.cost - row.cost
            ratio = lost / saved if saved > 0 else math.inf
            old = base.setting[row.knob]
            if saved > 0 or not row.accepted:
                found.append(Seen(row.step, base.step, row.knob, old, row.value, ratio, saved, row.cost == 0.0))
        if row.accepted:
            base, comparable = row, True
    return found
