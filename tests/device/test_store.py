"""The measurement store: nothing is measured twice, and writers don't lose each other's work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from apportion.device.store import Store
from apportion.errors import ApportionError


def session(median_ms: float) -> dict:
    return {"median_ms": median_ms, "conditions": {"processes": 1}}


def test_a_stored_session_is_not_measured_again(tmp_path):
    store = Store(tmp_path / "store.sqlite")
    first = store.get_or_make({"what": 1}, lambda: session(1.0))
    again = Store(tmp_path / "store.sqlite").get_or_make({"what": 1}, lambda: pytest.fail("measured twice"))
    assert again == first
    assert store.get_or_make({"what": 2}, lambda: session(2.0)) == session(2.0)


def _write(path, first):
    for number in range(first, first + 20):
        Store(path).get_or_make({"what": number}, lambda number=number: session(float(number + 1)))


def test_two_processes_can_write_at_once(tmp_path):
    path = tmp_path / "store.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, first)) for first in (0, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store = Store(path)
    for number in range(40):
        stored = store.get_or_make({"what": number}, lambda: pytest.fail("lost"))
        assert stored == session(float(number + 1))


_WRITE_WITHOUT_END = """
import itertools, sys
from pathlib import Path
from apportion.device.store import Store
store = Store(Path(sys.argv[1]))
for number in itertools.count():
    store.get_or_make({"what": number}, lambda: {"number": number, "body": "x" * 50_000})
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_seen", [1, 3, 10])
def test_a_writer_killed_at_any_moment_leaves_every_row_that_it_recorded(tmp_path, num_seen):
    path = tmp_path / "store.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITE_WITHOUT_END, str(path)], stdout=subprocess.PIPE, text=True)
    for _ in range(num_seen):
        writer.stdout.readline()
    os.kill(writer.pid, signal.SIGKILL)  # in the middle of writing the next
    told = num_seen + len(writer.communicate()[0].splitlines())
    assert writer.returncode == -signal.SIGKILL
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store = Store(path)
    for number in range(told):
        stored = store.get_or_make({"what": number}, lambda: pytest.fail("lost"))
        assert stored == {"number": number, "body": "x" * 50_000}
    assert store.get_or_make({"what": "next"}, lambda: {"works": True}) == {"works": True}


def test_a_transaction_cut_off_before_its_end_is_rolled_back(tmp_path):
    """The database as a kill between writing pages and committing leaves it: with its journal beside it."""
    path = tmp_path / "store.sqlite"
    Store(path).get_or_make({"what": 0}, lambda: session(1.0))
    torn = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, signal, sqlite3, sys\n"
            "database = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
            "database.execute('PRAGMA cache_size = 1')\n"  # spills its pages into the file
            "database.execute('BEGIN')\n"
            "for n in range(100):\n"
            "    database.execute('INSERT INTO measurement VALUES (?, ?)', (f'torn {n}', 'x' * 50_000))\n"
            "database.execute(\"DELETE FROM measurement WHERE key NOT LIKE 'torn%'\")\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n",
            str(path),
        ]
    )
    assert torn.wait(60) == -signal.SIGKILL
    assert path.with_name("store.sqlite-journal").exists()
    assert Store(path).get_or_make({"what": 0}, lambda: pytest.fail("lost")) == session(1.0)
    with sqlite3.connect(path) as database:
        assert database.execute("SELECT count(*) FROM measurement").fetchone() == (1,)


def test_a_damaged_store_is_told_in_one_line(tmp_path):
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ApportionError, match=r"store\.sqlite: .*move it away"):
        Store(tmp_path / "store.sqlite")
