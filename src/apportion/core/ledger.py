"""The ledger: append-only rows of what was proposed, read and accepted; every row is durable before the next step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from apportion.core.knob import Setting, Value
from apportion.core.meter import Reading
from apportion.errors import LedgerError

try:
    import fcntl
except ImportError:  # no advisory locks on this platform: two runs in one folder are then the user's care
    fcntl = None  # type: ignore[assignment]

VERSION = 1
Kind: TypeAlias = Literal["start", "trial", "move", "check"]
KINDS: tuple[Kind, ...] = ("start", "trial", "move", "check")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step: a proposal, what was read of it, and whether it was accepted.

    ``cost`` is the excess over the budget as it stood (``Budget.excess``); ``seconds`` is the only field that may
    differ between two runs with the same seed.
    """

    step: int
    kind: Kind
    setting: Setting
    readings: dict[str, Reading]
    cost: float
    accepted: bool
    knob: str | None = None
    value: Value | None = None
    note: str = ""
    seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "kind": self.kind,
            "knob": self.knob,
            "value": self.value,
            "setting": dict(self.setting),
            "readings": {name: reading.to_json() for name, reading in self.readings.items()},
            "cost": self.cost,
            "accepted": self.accepted,
            "note": self.note,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, fields: Any) -> Row:
        """Reads a row back; raises ``LedgerError`` where it does not fit the schema."""
        try:
            row = cls(
                step=fields["step"],
                kind=fields["kind"],
                knob=fields["knob"],
                value=fields["value"],
                setting=Setting(fields["setting"]),
                readings={name: Reading.from_json(reading) for name, reading in fields["readings"].items()},
                cost=float(fields["cost"]),
                accepted=fields["accepted"],
                note=fields["note"],
                seconds=float(fields["seconds"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LedgerError(f"a ledger row does not fit the schema ({type(error).__name__}: {error})") from None
        check_row(row)
        return row


def check_row(row: Row) -> None:
    """Raises ``LedgerError`` unless the row is one that ``budgeted_loop`` could have written."""
    named = isinstance(row.knob, str)
    problems = {
        "step must be a whole number from 0": type(row.step) is not int or row.step < 0,
        f"kind must be one of {KINDS}": row.kind not in KINDS,
        "accepted must be true or false": type(row.accepted) is not bool,
        "cost must be a finite number from 0": not (0 <= row.cost < float("inf")),
        "a trial or move names its knob and value": row.kind in ("trial", "move")
        and not (named and _is_value(row.value)),
        "a start or check names no knob": row.kind in ("start", "check")
        and not (row.knob is None and row.value is None),
        "a run starts at step 0 and nowhere else": (row.kind == "start") != (row.step == 0),
        "a setting maps names to finite numbers or texts": not all(
            isinstance(name, str) and _is_value(value) for name, value in row.setting.items()
        ),
        "the setting must hold the value proposed": named and row.setting.get(str(row.knob)) != row.value,
        "note must be a text": not isinstance(row.note, str),
        "seconds must be finite": not (0 <= row.seconds < float("inf")),
    }
    for problem, found in problems.items():
        if found:
            raise LedgerError(f"ledger row {row.step!r} does not fit the schema: {problem}")


def _is_value(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int | str) and not isinstance(value, bool)


class Ledger(Sequence[Row]):
    """Rows in memory, and in a JSON-lines file when a path is given.

    The file opens with a header that names the run; a ledger of another run is refused. A last line cut short by a
    kill is dropped on opening; damage anywhere else is refused.
    """

    def __init__(self, path: Path | None = None, *, run: str = "") -> None:
        self.path = path
        self._rows: list[Row] = []
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._lock()
        try:
            self._load(run)
        except LedgerError:
            self.close()
            raise

    def append(self, row: Row) -> None:
        """Adds a row; when this returns, the row survives a kill or a power cut."""
        check_row(row)
        if row.step != len(self._rows):
            raise LedgerError(f"row {row.step} can't follow {len(self._rows)} rows; rows are numbered without gaps")
        if self.path is not None:
            if self._file is None:
                raise LedgerError(f"{self.path} is closed; open it again to append")
            self._write(row.to_json())
        self._rows.append(row)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def _lock(self) -> None:
        assert self._file is not None
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise LedgerError(f"{self.path} is in use by another process; wait for it or choose another -o") from None

    def _load(self, run: str) -> None:
        assert self._file is not None
        self._file.seek(0)
        header = {"apportion_ledger": VERSION, "run": run}
        *lines, torn = self._file.read().split(b"\n")
        if not lines:
            if not _line(header).startswith(torn):
                raise LedgerError(f"{self.path} is not a ledger of version {VERSION}; choose another -o folder")
            self._file.truncate(0)
            self._write(header)
            self._sync_folder()
            return
        self._check_header(lines[0], run)
        if torn:  # no newline at the end: the process died while writing this line
            self._file.truncate(sum(len(line) + 1 for line in lines))
            self._sync()
        for number, line in enumerate(lines[1:], start=2):
            row = Row.from_json(self._parse(line, number))
            if row.step != len(self._rows):
                raise LedgerError(f"{self.path}: row {row.step} stands where row {len(self._rows)} belongs")
            self._rows.append(row)

    def _check_header(self, line: bytes, run: str) -> None:
        header = self._parse(line, 1)
        if not isinstance(header, dict) or header.get("apportion_ledger") != VERSION:
            raise LedgerError(f"{self.path} is not a ledger of version {VERSION}; choose another -o folder")
        if header.get("run") != run:
            raise LedgerError(f"{self.path} belongs to a run with other settings; choose another -o folder")

    def _parse(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise LedgerError(f"{self.path}, line {number} is damaged; restore it or choose another -o") from None

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(_line(fields))
        self._sync()

    def _sync(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())

    def _sync_folder(self) -> None:
        """Makes the new file's name durable, where the system lets folders be synced."""
        assert self.path is not None
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError:
            return
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
