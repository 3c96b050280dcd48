"""Earlier runs: ledgers are read without being changed, and proposals are seen as they were made."""

from __future__ import annotations

import math

import pytest

from apportion.core.budget import Budget
from apportion.core.knob import Choice
from apportion.core.ledger import Ledger
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Greedy
from apportion.errors import LedgerError
from apportion.methods.compress.history import read_rows, read_runs, seen
from apportion.testing.toys import Additive, Scaled, Toy


def toy():
    """Knob a loses 1 point for 2 ms a step, b 3 points for 1 ms, c saves nothing."""
    steps = range(3)
    return Toy(
        (Choice("a", steps), Choice("b", steps), Choice("c", steps)),
        {
            "latency": Additive({"a": {v: 2.0 * v for v in steps}, "b": {v: 1.0 * v for v in steps}}, base=4.0),
            "quality": Additive({"a": {v: 1.0 * v for v in steps}, "b": {v: 3.0 * v for v in steps}}, unit="points"),
        },
    )


def run_to(path, limit, **options):
    made = toy()
    with Ledger(path, run="earlier") as ledger:
        budgeted_loop(
            made.start,
            knobs=made.knobs,
            rules=made.rules,
            meters=made.meters,
            budget=Budget.parse(limit),
            policy=Greedy(),
            ledger=ledger,
            **options,
        )
        return list(ledger)


def test_rows_are_read_back_even_while_a_run_holds_the_ledger(tmp_path):
    path = tmp_path / "rungs" / "1" / "ledger.jsonl"
    rows = run_to(path, "5ms")
    before = path.read_bytes()
    with Ledger(path, run="earlier"):
        assert read_rows(path) == rows
    assert read_runs(tmp_path) == read_runs(path) == [rows]
    assert path.read_bytes() == before


def test_a_last_line_cut_short_is_left_out_and_left_alone(tmp_path):
    path = tmp_path / "ledger.jsonl"
    rows = run_to(path, "5ms")
    path.write_bytes(path.read_bytes()[:-7])
    torn = path.read_bytes()
    assert read_rows(path) == rows[:-1]
    assert path.read_bytes() == torn


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b'{"apportion_ledger": 99}\n', b"[1]\n[2]\n"])
def test_a_file_that_is_no_ledger_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(content)
    with pytest.raises(LedgerError) as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_ledger_and_a_file_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(LedgerError, match="holds no ledger"):
        read_runs(tmp_path)
    with pytest.raises(LedgerError, match="can't be read"):
        read_runs(tmp_path / "nothing")


def test_a_ledger_with_a_row_missing_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    run_to(path, "5ms")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(LedgerError, match="gaps"):
        read_rows(path)


def test_what_proposals_lost_per_excess_saved(tmp_path):
    rows = run_to(tmp_path / "ledger.jsonl", "5ms")  # from 10 ms: an excess of 1, and 0.2 a millisecond
    found = {(one.base, one.knob, one.value): one for one in seen(rows)}
    assert found[0, "a", 1].ratio == pytest.approx(1 / 0.4)
    assert found[0, "a", 1].saved == pytest.approx(0.4)
    assert found[0, "b", 1].ratio == pytest.approx(3 / 0.2)
    assert found[0, "c", 1].ratio == math.inf
    assert (found[0, "a", 1].old, found[0, "a", 1].value) == (2, 1)
    assert [one.step for one in seen(rows)] == [row.step for row in rows[1:]]
    assert {row.step for row in rows if row.cost == 0.0} == {one.step for one in seen(rows) if one.censored}


def test_what_was_proposed_under_limits_that_the_ledger_does_not_hold_is_left_out(tmp_path):
    slower = Scaled(toy().meters["latency"], 1.3)
    rows = run_to(tmp_path / "ledger.jsonl", "7ms", check=lambda model: {"latency": slower.read(model)})
    failed = next(row.step for row in rows if row.kind == "check" and not row.accepted)
    moved_on = next(row.step for row in rows if row.step > failed and row.kind == "move" and row.accepted)
    steps = {one.step for one in seen(rows)}
    assert steps
    assert not steps & set(range(failed, moved_on + 1))
