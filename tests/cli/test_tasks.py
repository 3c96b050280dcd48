"""``apportion tasks`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture
def tasks(tmp_path):
    def run(*args, **env):
        return subprocess.run(
            [sys.executable, "-m", "apportion", "tasks", *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "100", **env},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "mine.csv"
    rows = [f"{word} number {n},{word}" for word in ("one", "two", "three") for n in range(12)]
    path.write_text("text,label\n" + "\n".join(rows))
    return path


def test_list_says_what_is_missing_and_why(tasks, tmp_path):
    done = tasks("list", APPORTION_DATA=str(tmp_path / "nothing"))
    assert done.returncode == 0, done.stderr
    assert "banking77" in done.stdout
    assert "set APPORTION_DATA" in done.stdout
    rows = json.loads(tasks("list", "--json", APPORTION_DATA=str(tmp_path / "nothing")).stdout)
    assert {row["kind"] for row in rows} == {"text", "image"}
    assert "missing" in next(row for row in rows if row["name"] == "grocery")


def test_show_tells_sizes_and_origin(tasks, table):
    done = tasks("show", table)
    assert "examples    36" in done.stdout
    assert "3, of 12 to 12 examples" in done.stdout
    fields = json.loads(tasks("show", table, "--json").stdout)
    assert fields["classes"] == {"one": 12, "two": 12, "three": 12}
    assert len(fields["checksum"]) == 64


def test_an_episode_is_the_same_in_two_processes_and_shows_its_texts(tasks, table):
    args = ("episode", table, "--ways", "2-3", "--shots", "1-4", "--seed", "5", "--number", "2")
    first, second = (json.loads(tasks(*args, "--json").stdout) for _ in range(2))
    assert first == second
    assert not set(first["support"]["rows"]) & set(first["query"]["rows"])
    shown = tasks(*args).stdout
    assert f"{first['classes'][0]} number" in shown
    assert first["fingerprint"][:16] in shown


def test_an_episode_of_images_comes_with_a_contact_sheet(tasks, tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for label, colour in {"red": (255, 0, 0), "blue": (0, 0, 255)}.items():
        (tmp_path / "mine" / label).mkdir(parents=True)
        for place in range(4):
            pillow.new("RGB", (20, 10), colour).save(tmp_path / "mine" / label / f"{place}.png")
    done = tasks("episode", "mine", "--ways", 2, "--shots", 2, "--queries", 2, "--sheet", "sheet.png")
    assert done.returncode == 0, done.stderr
    with pillow.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (5 * 68 + 4, 2 * 68 + 4)
        first_row = {sheet.getpixel((4 + 68 * column + 30, 30)) for column in (0, 1, 3, 4)}
    assert first_row in ({(255, 0, 0)}, {(0, 0, 255)})  # one class a row


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "nothing-here"), "no domain 'nothing-here'"),
        (("episode", "{table}", "--ways", "9"), "3 classes of at least"),
        (("episode", "{table}", "--shots", "20"), "(class 'one' has 12)"),
        (("episode", "{table}", "--shots", "many"), "'many' is no count"),
        (("episode", "{table}", "--ways", "3", "--shots", "2", "--sheet", "x.png"), "have no contact sheet"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(tasks, table, args, message):
    done = tasks(*(str(arg).replace("{table}", str(table)) for arg in args))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
