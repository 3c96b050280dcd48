"""The cache: made once, whole or not at all, and never in the way."""

from __future__ import annotations

import os

import numpy as np
import pytest

from apportion.tasks.cache import cache_root, cached, write_whole


class Maker:
    def __init__(self):
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        return {"x": np.arange(6, dtype=np.int32).reshape(2, 3).T}


def test_arrays_are_made_once_per_key():
    make = Maker()
    first, again = cached("things", {"a": 1}, make), cached("things", {"a": 1}, make)
    assert make.num_calls == 1
    assert np.array_equal(first["x"], again["x"])
    assert np.array_equal(again["x"], np.arange(6).reshape(2, 3).T)
    cached("things", {"a": 2}, make)
    assert make.num_calls == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"", lambda data: b"x" * len(data)])
def test_a_damaged_file_is_made_again(damage):
    make = Maker()
    cached("things", {"a": 1}, make)
    (path,) = (cache_root() / "things").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert np.array_equal(cached("things", {"a": 1}, make)["x"], make()["x"])
    assert make.num_calls == 3
    cached("things", {"a": 1}, make)
    assert make.num_calls == 3  # the mended file was kept


def test_a_cache_that_cant_be_written_costs_only_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert np.array_equal(cached("things", {}, Maker())["x"][:, 0], [0, 1, 2])


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_whole(path, b"old")

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path] or sorted(p.name for p in tmp_path.iterdir()) == ["cache", "x"]
