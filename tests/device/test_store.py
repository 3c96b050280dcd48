"""The measurement store: nothing is measured twice, and writers don't lose each other's work."""

from __future__ import annotations

import multiprocessing

import pytest

from apportion.device.store import Store


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
