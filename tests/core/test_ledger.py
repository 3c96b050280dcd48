"""The ledger: rows survive a kill at any byte, and nothing but a whole ledger of the same run is believed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import apportion
from apportion.core.knob import Setting
from apportion.core.ledger import VERSION, Ledger, Row, check_row
from apportion.core.meter import Reading
from apportion.errors import ApportionError, LedgerError

SRC = Path(apportion.__file__).parents[1]
START = Setting({"conv1.bits": 16, "kernel": "größe"})


def reading(value):
    return Reading(value=value, unit="ms", stderr=0.25, count=3)


def start_row():
    readings = {"latency": reading(9.5), "quality": Reading(value=0.1 + 0.2, unit="accuracy")}
    return Row(step=0, kind="start", setting=START, readings=readings, cost=0.5, accepted=True)


def move_row(step=1, **changes):
    fields = {
        "step": step,
        "kind": "move",
        "setting": START.replace("conv1.bits", 8),
        "readings": {"latency": reading(7.25), "quality": Reading(value=2 / 3, unit="accuracy")},
        "cost": 0.125,
        "accepted": False,
        "knob": "conv1.bits",
        "value": 8,
        "note": "7.25 ≤ 8 µs",
        "seconds": 0.5,
    }
    return Row(**{**fields, **changes})


def written(path, *rows, run="run"):
    with Ledger(path, run=run) as ledger:
        for row in rows:
            ledger.append(row)
    return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "ledger.jsonl"


@pytest.fixture
def unsynced(monkeypatch):
    """Spares the disk where a test opens hundreds of ledgers; a kill needs no sync to leave the file whole."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# Writing and reading back


values = st.integers(-(10**6), 10**6) | st.floats(-1e9, 1e9) | st.text(max_size=5)
readings = st.dictionaries(
    st.text(max_size=5),
    st.builds(
        Reading, value=st.floats(-1e9, 1e9), unit=st.text(max_size=3), stderr=st.floats(0, 1e9), count=st.integers(1, 9)
    ),
    max_size=3,
)


@st.composite
def row_lists(draw):
    rows = []
    for step in range(draw(st.integers(0, 4))):
        kind = "start" if step == 0 else draw(st.sampled_from(["trial", "move", "check"]))
        setting = draw(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=3))
        proposed = {}
        if kind in ("trial", "move"):
            knob = draw(st.sampled_from(sorted(setting)))
            proposed = {"knob": knob, "value": setting[knob]}
        rows.append(
            Row(
                step=step,
                kind=kind,
                setting=Setting(setting),
                readings=draw(readings),
                cost=draw(st.floats(0, 1e9)),
                accepted=draw(st.booleans()),
                note=draw(st.text(max_size=5)),
                seconds=draw(st.floats(0, 1e9)),
                **proposed,
            )
        )
    return rows


@settings(deadline=None, max_examples=60)
@given(row_lists())
def test_rows_read_back_equal_with_values_of_the_same_type(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    written(path, *rows)
    with Ledger(path, run="run") as ledger:
        assert list(ledger) == rows
        assert [row.seconds for row in ledger] == [row.seconds for row in rows]
        for read, row in zip(ledger, rows, strict=True):
            assert {name: type(value) for name, value in read.setting.items()} == {
                name: type(value) for name, value in row.setting.items()
            }


def test_a_ledger_is_a_sequence_of_its_rows():
    ledger = Ledger()
    assert not ledger
    for row in (start_row(), move_row(1), move_row(2)):
        ledger.append(row)
    assert len(ledger) == 3
    assert ledger[0] == start_row()
    assert ledger[-1] == move_row(2)
    assert ledger[1:] == [move_row(1), move_row(2)]
    assert [row.step for row in reversed(ledger)] == [2, 1, 0]
    assert move_row(1) in ledger


def test_seconds_are_the_only_field_that_may_differ_between_equal_rows():
    assert move_row(seconds=1.0) == move_row(seconds=2.0)
    for changes in ({"note": ""}, {"accepted": True}, {"cost": 0.0}, {"readings": {}}, {"kind": "trial"}, {"step": 2}):
        assert move_row(**changes) != move_row()


def test_opening_again_goes_on_after_the_last_row(path):
    whole = written(path, start_row(), move_row(1), move_row(2))
    path.unlink()
    written(path, start_row())
    written(path, move_row(1))
    assert written(path, move_row(2)) == whole


def test_the_file_is_lines_of_json_under_a_header_that_names_the_run(path):
    lines = written(path, start_row(), run="seed 0, 60%").decode().splitlines()
    assert json.loads(lines[0]) == {"apportion_ledger": VERSION, "run": "seed 0, 60%"}
    assert Row.from_json(json.loads(lines[1])) == start_row()


def test_a_ledger_without_a_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Ledger() as ledger:
        ledger.append(start_row())
    assert list(tmp_path.iterdir()) == []


# Durability


def test_a_row_is_on_disk_and_synced_when_append_returns(path, monkeypatch):
    synced = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(path.read_bytes()), sync(fd)))
    with Ledger(path, run="run") as ledger:
        for row in (start_row(), move_row(1)):
            ledger.append(row)
            assert synced[-1] == path.read_bytes()
            assert Row.from_json(json.loads(synced[-1].splitlines()[-1])) == row


def test_rows_survive_a_kill_right_after_append(path):
    script = f"""
import os, signal
from pathlib import Path
from apportion.core.knob import Setting
from apportion.core.ledger import Ledger, Row
ledger = Ledger(Path({str(path)!r}), run="run")
ledger.append(Row(step=0, kind="start", setting=Setting({{"a": 1}}), readings={{}}, cost=0.0, accepted=True))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SRC)}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with Ledger(path, run="run") as ledger:  # its lock went with the process
        assert [row.setting for row in ledger] == [Setting({"a": 1})]


LAST_LINE = json.dumps(move_row().to_json(), ensure_ascii=False).encode() + b"\n"


@pytest.mark.parametrize("num_kept", range(len(LAST_LINE)))
def test_a_last_line_torn_at_any_byte_is_dropped_and_can_be_written_again(path, num_kept, unsynced):
    whole = written(path, start_row(), move_row())
    assert whole.endswith(LAST_LINE)
    before = whole.removesuffix(LAST_LINE)
    path.write_bytes(before + LAST_LINE[:num_kept])
    with Ledger(path, run="run") as ledger:
        assert list(ledger) == [start_row()]
        assert path.read_bytes() == before
        ledger.append(move_row())
    assert path.read_bytes() == whole


def test_a_header_torn_at_any_byte_is_written_again(path, unsynced):
    header = written(path)
    for num_kept in range(len(header)):
        path.write_bytes(header[:num_kept])
        assert written(path) == header


# What is refused


def refused(path, match=None, run="run"):
    """Asserts that opening is refused in one line, and returns what the file holds afterwards."""
    with pytest.raises(LedgerError, match=match) as error:
        Ledger(path, run=run)
    assert len(str(error.value).splitlines()) == 1
    assert isinstance(error.value, ApportionError)
    return path.read_bytes()


@pytest.mark.parametrize("num_lines_before", [0, 1, 2, 3], ids=["header", "start", "middle", "last"])
@pytest.mark.parametrize(
    "damage",
    [lambda line: line[: len(line) // 2], lambda line: b"", lambda line: b"\xff\xfe" + line, lambda line: line + b"}"],
    ids=["cut", "blank", "not text", "trailing"],
)
def test_a_damaged_line_that_is_not_torn_off_is_refused_and_left_alone(path, num_lines_before, damage):
    lines = written(path, start_row(), move_row(1), move_row(2)).splitlines(keepends=True)
    lines[num_lines_before] = damage(lines[num_lines_before].rstrip(b"\n")) + b"\n"
    path.write_bytes(b"".join(lines))
    assert refused(path, rf"line {num_lines_before + 1} is damaged") == b"".join(lines)


def test_a_line_missing_from_the_middle_is_refused(path):
    lines = written(path, start_row(), move_row(1), move_row(2)).splitlines(keepends=True)
    damaged = lines[0] + lines[1] + lines[3]
    path.write_bytes(damaged)
    assert refused(path, "row 2 stands where row 1 belongs") == damaged


def test_a_line_written_twice_is_refused(path):
    lines = written(path, start_row(), move_row(1)).splitlines(keepends=True)
    damaged = b"".join([*lines, lines[-1]])
    path.write_bytes(damaged)
    assert refused(path, "row 1 stands where row 2 belongs") == damaged


def test_the_ledger_of_another_run_is_refused_and_left_alone(path):
    whole = written(path, start_row(), run="seed 0")
    assert refused(path, "belongs to a run with other settings", run="seed 1") == whole
    with Ledger(path, run="seed 0") as ledger:
        assert list(ledger) == [start_row()]


@pytest.mark.parametrize(
    "header", [{}, [], "ledger", None, {"apportion_ledger": 2, "run": "run"}, {"run": "run"}], ids=repr
)
def test_a_file_that_is_no_ledger_of_this_version_is_refused_and_left_alone(path, header):
    path.parent.mkdir()
    path.write_text(json.dumps(header) + "\n")
    assert refused(path, "not a ledger of version 1").decode() == json.dumps(header) + "\n"


@pytest.mark.parametrize(
    "text",
    ['{"apportion_ledger": 1, "run": "other"}\n{"step": 0', "notes of mine", '{"a": 1}\nb'],
    ids=["another run", "no ledger", "another format"],
)
def test_a_refused_file_is_left_alone_even_without_a_newline_at_its_end(path, text):
    path.parent.mkdir()
    path.write_text(text)
    assert refused(path).decode() == text


def test_a_second_opener_is_refused_until_the_first_is_done(path):
    pytest.importorskip("fcntl")
    with Ledger(path, run="run") as ledger:
        refused(path, "in use by another process")
        script = f"from pathlib import Path; from apportion.core.ledger import Ledger; Ledger(Path({str(path)!r}))"
        other = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert other.returncode != 0
        assert "in use by another process" in other.stderr
        ledger.append(start_row())  # the refused ones did it no harm
    with Ledger(path, run="run") as ledger:
        assert list(ledger) == [start_row()]


def test_a_ledger_that_was_refused_is_not_locked(path):
    whole = written(path, start_row(), run="seed 0")
    assert refused(path, "other settings", run="seed 1") == whole
    with Ledger(path, run="seed 0") as ledger:
        ledger.append(move_row(1))
        assert list(ledger) == [start_row(), move_row(1)]


START_FIELDS, MOVE_FIELDS = start_row().to_json(), move_row().to_json()
NOT_A_ROW = {
    **{f"start without {name}": {k: v for k, v in START_FIELDS.items() if k != name} for name in START_FIELDS},
    "null": None,
    "a list": [],
    "a number": 1,
    "a string": "start",
    "negative step": {**START_FIELDS, "step": -1},
    "step as text": {**START_FIELDS, "step": "0"},
    "step as fraction": {**START_FIELDS, "step": 0.0},
    "step as truth": {**START_FIELDS, "step": False},
    "unknown kind": {**START_FIELDS, "kind": "jump"},
    "no kind": {**START_FIELDS, "kind": None},
    "accepted as number": {**START_FIELDS, "accepted": 1},
    "accepted as text": {**START_FIELDS, "accepted": "true"},
    "negative cost": {**START_FIELDS, "cost": -0.5},
    "no cost": {**START_FIELDS, "cost": None},
    "cost not a number": {**START_FIELDS, "cost": math.nan},
    "infinite cost": {**START_FIELDS, "cost": math.inf},
    "cost as word": {**START_FIELDS, "cost": "cheap"},
    "readings as list": {**START_FIELDS, "readings": []},
    "reading as number": {**START_FIELDS, "readings": {"latency": 3.0}},
    "reading without unit": {**START_FIELDS, "readings": {"latency": {"value": 1.0, "stderr": 0.0, "count": 1}}},
    "reading not a number": {
        **START_FIELDS,
        "readings": {"latency": {"value": math.nan, "unit": "ms", "stderr": 0.0, "count": 1}},
    },
    "infinite doubt": {
        **START_FIELDS,
        "readings": {"latency": {"value": 1.0, "unit": "ms", "stderr": math.inf, "count": 1}},
    },
    "setting as list": {**START_FIELDS, "setting": ["a"]},
    "start with a knob": {**START_FIELDS, "knob": "conv1.bits", "value": 16},
    "check with a knob": {**MOVE_FIELDS, "step": 0, "kind": "check"},
    "move without knob": {**MOVE_FIELDS, "step": 0, "knob": None},
    "move without value": {**MOVE_FIELDS, "step": 0, "value": None},
    "trial without knob": {**MOVE_FIELDS, "step": 0, "kind": "trial", "knob": None},
    "move to what the setting does not hold": {**MOVE_FIELDS, "step": 0, "value": 4},
    "move of what the setting does not have": {**MOVE_FIELDS, "step": 0, "knob": "conv2.bits"},
    "knob as number": {**MOVE_FIELDS, "step": 0, "knob": 3},
}


@pytest.mark.parametrize("fields", NOT_A_ROW.values(), ids=NOT_A_ROW)
def test_a_row_that_does_not_fit_the_schema_is_refused(path, fields):
    whole = written(path) + json.dumps(fields).encode() + b"\n"
    path.write_bytes(whole)
    assert refused(path, "does not fit the schema") == whole
    with pytest.raises(LedgerError, match="does not fit the schema"):
        Row.from_json(fields)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**START_FIELDS, "cost": 10**400}),
        json.dumps({**MOVE_FIELDS, "step": 0, "knob": ["conv1.bits"]}),
        "[" * 100_000,
    ],
    ids=["huge number", "knob as list", "deep"],
)
def test_a_hostile_row_is_refused_like_any_other(path, text):
    whole = written(path) + text.encode() + b"\n"
    path.write_bytes(whole)
    assert refused(path) == whole


@pytest.mark.parametrize(
    "fields",
    [
        {**MOVE_FIELDS, "value": [8], "setting": {"conv1.bits": [8]}},
        {**START_FIELDS, "setting": {"conv1.bits": None}},
        {**START_FIELDS, "value": 8},
        {**START_FIELDS, "note": 8},
        {**START_FIELDS, "seconds": math.inf},
        {**MOVE_FIELDS, "value": math.inf, "setting": {"conv1.bits": math.inf}},
        {**START_FIELDS, "step": 3},
    ],
    ids=["value as list", "setting of null", "start with value", "note", "seconds", "infinite value", "late start"],
)
def test_a_row_with_fields_of_the_wrong_type_is_refused(fields):
    with pytest.raises(LedgerError):
        Row.from_json(fields)


@pytest.mark.parametrize("step", [0, 2, 5])
def test_rows_are_numbered_without_gaps(path, step):
    whole = written(path, start_row())
    for ledger in (Ledger(), Ledger(path, run="run")):
        with ledger:
            if not ledger:
                ledger.append(start_row())
            with pytest.raises(LedgerError, match=f"row {step} (can't follow 1 rows|does not fit)"):
                ledger.append(move_row(step))
            assert list(ledger) == [start_row()]
    assert path.read_bytes() == whole


@pytest.mark.parametrize("cost", [math.nan, math.inf, -math.inf, -1e-9])
def test_a_cost_that_is_negative_or_not_finite_is_never_written(path, cost):
    whole = written(path, start_row())
    with Ledger(path, run="run") as ledger:
        with pytest.raises(LedgerError, match="cost must be a finite number from 0"):
            ledger.append(move_row(cost=cost))
        assert list(ledger) == [start_row()]
        ledger.append(move_row())  # the ledger is as usable as before
    assert path.read_bytes() == whole + LAST_LINE


@pytest.mark.parametrize(
    "changes",
    [
        {"value": math.inf, "setting": Setting({"conv1.bits": math.inf})},
        {"value": math.nan, "setting": Setting({"conv1.bits": math.nan})},
        {"seconds": math.nan},
    ],
    ids=["infinite value", "value not a number", "seconds not a number"],
)
def test_nothing_that_is_not_finite_reaches_the_file(path, changes):
    whole = written(path, start_row())
    with Ledger(path, run="run") as ledger:
        with pytest.raises(ValueError):  # noqa: PT011
            ledger.append(move_row(**changes))
        assert list(ledger) == [start_row()]
    assert path.read_bytes() == whole


def test_check_row_passes_what_the_loop_writes():
    for row in (start_row(), move_row(), move_row(kind="trial"), move_row(kind="check", knob=None, value=None)):
        check_row(row)
