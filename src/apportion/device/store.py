"""The measurement store: an SQLite file keyed by what was measured, so that nothing is measured twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apportion.errors import ApportionError

SCHEMA = "CREATE TABLE IF NOT EXISTS measurement (key TEXT PRIMARY KEY, body TEXT NOT NULL)"


class Store:
    """Measurements as JSON by key; safe under several writers and a kill at any moment."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        with self._connect() as database:
            database.execute(SCHEMA)

    def get_or_make(self, what: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What is stored for ``what`` (any JSON description), or a new one that is stored before it is returned."""
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        with self._connect() as database:
            row = database.execute("SELECT body FROM measurement WHERE key = ?", (key,)).fetchone()
        if row is not None:
            stored: dict[str, Any] = json.loads(row[0])
            return stored
        made = make()
        with self._connect() as database:
            database.execute("INSERT OR REPLACE INTO measurement VALUES (?, ?)", (key, json.dumps(made)))
        return made

    @contextlib.contextmanager
    def _connect(self) -> Any:
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=60)) as database, database:
                yield database
        except sqlite3.Error as error:
            raise ApportionError(f"{self._path}: {error}; move it away, and what it holds is measured again") from None
