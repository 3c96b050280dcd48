"""Files and folders appear whole or not at all; a run's folder is one run's."""

import json
import subprocess
from pathlib import Path

import pytest

from apportion.core.folder import RunFolder, whole_folder, write_whole
from apportion.errors import ApportionError


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "file"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_file_is_as_readable_as_others(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "whole", b"")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_takes_its_place_only_when_the_block_ends_well(tmp_path):
    place = tmp_path / "place"
    with whole_folder(place) as draft:
        (draft / "a").write_text("first")
    with pytest.raises(TypeError), whole_folder(place) as draft:
        (draft / "a").write_bytes("second")
    assert (place / "a").read_text() == "first"
    with whole_folder(place) as draft:
        (draft / "b").write_text("third")
    assert [p.name for p in place.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["place"]


def test_what_a_killed_process_left_is_swept_up_and_put_back(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / f".place.{gone.pid}.tmp").mkdir()
    (tmp_path / f".place.{gone.pid}.old").mkdir()
    (tmp_path / f".place.{gone.pid}.old" / "kept").write_text("was there")
    (tmp_path / ".place.1.tmp").mkdir()  # of a process that runs
    with whole_folder(tmp_path / "place"):
        assert (tmp_path / "place" / "kept").read_text() == "was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".place.1.tmp", "place"]


def test_the_folder_that_one_stands_in_may_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with whole_folder(Path(".")) as draft:
        (draft / "a").write_text("new")
    assert (tmp_path / "here" / "a").read_text() == "new"


def test_a_run_folder_keeps_one_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin("me", {"model": "minilm"})
    folder.begin("me", {"model": "minilm"})
    assert folder.asked({"model"}) == {"model": "minilm"}
    with pytest.raises(ApportionError, match="other settings"):
        folder.begin("other", {"model": "minilm"})
    with pytest.raises(ApportionError, match="no run of version 1"):
        folder.asked({"model", "seed"})


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ApportionError, match="holds no run"):
        RunFolder(tmp_path).begin("me", {})
    with pytest.raises(ApportionError, match="is a file"):
        RunFolder(tmp_path / "notes.txt")
    with pytest.raises(ApportionError, match="the run is not finished; start it again"):
        RunFolder(tmp_path).certificate()
    RunFolder(tmp_path).write("result.json", {"met": False})
    with pytest.raises(ApportionError, match=r"the run ended without one.*; ask for less"):
        RunFolder(tmp_path).certificate()
    RunFolder(tmp_path).write("result.json", {"met": True})
    with pytest.raises(ApportionError, match="the run was not measured"):
        RunFolder(tmp_path).certificate()
    (tmp_path / "certificate.json").write_bytes(b"\xff{}")
    with pytest.raises(ApportionError, match="not a certificate"):
        RunFolder(tmp_path).certificate()


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps("run")])
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ApportionError, match="damaged"):
        RunFolder(tmp_path).read("run.json")
