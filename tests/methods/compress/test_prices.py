"""Prices of parts and limits against a ledger worked out by hand, and the bound that ships."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.core.knob import Setting
from apportion.core.ledger import Row
from apportion.core.meter import Reading
from apportion.core.policy import Greedy
from apportion.errors import DataError
from apportion.methods.compress.prices import SHIPPED, limit_price, part_prices, read_bound, tell_prices, told_checks
from apportion.testing.compare import replay
from apportion.testing.toys import layered_toy

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture(scope="module")
def rows():
    return replay(Greedy(), layered_toy(random.Random(3)), share=0.5).rows


@pytest.fixture(scope="module")
def cost(rows):
    return next(name for name in rows[0].readings if name != "quality")


def test_a_price_is_what_the_newest_move_lost_for_each_unit_saved(rows, cost):
    prices = part_prices(rows, cost, "quality")
    assert list(prices.values()) == sorted(prices.values(), key=lambda part: -part["price"])
    for name, part in prices.items():
        newest = max((r for r in rows if r.knob == name), key=lambda r: r.step)
        base = [r for r in rows[: newest.step] if r.accepted and r.kind in ("start", "move")][-1]
        assert part["value"] == newest.value
        saved = base.readings[cost].value - newest.readings[cost].value
        assert part["price"] * saved == pytest.approx(base.readings["quality"].value - newest.readings["quality"].value)


def test_the_price_of_the_limit_is_that_of_the_last_move(rows, cost):
    accepted = [row for row in rows if row.accepted and row.kind in ("start", "move")]
    before, last = accepted[-2:]
    lost, saved = (before.readings[n].value - last.readings[n].value for n in ("quality", cost))
    assert limit_price(rows, cost, "quality") == pytest.approx(lost / saved)
    assert limit_price(rows[:1], cost, "quality") is None


def test_what_is_told_is_json_and_sums_up(rows, cost):
    told = tell_prices(rows, cost, "quality", "ms")
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    total = rows[0].readings["quality"].value - [r for r in rows if r.accepted][-1].readings["quality"].value
    assert told["lost"] == pytest.approx(total)
    assert told["bound"] is None  # the one that ships is about likeness
    assert told["checks"] == told_checks(rows, cost)


def test_checks_say_what_was_read_and_what_was_measured():
    def row(step, kind, value, *, accepted=True, knob="a"):
        readings = {"latency": Reading(value=value, unit="ms"), "quality": Reading(value=1.0, unit="ratio")}
        named = None if kind in ("start", "check") else knob
        common = {"setting": Setting({"a": 1}), "readings": readings, "cost": 0.0, "accepted": accepted}
        return Row(step=step, kind=kind, knob=named, value=step, **common)

    rows = [
        row(0, "start", 10.0),
        row(1, "move", 6.0),
        row(2, "check", 7.0, accepted=False),
        row(3, "trial", 1.0, accepted=False),
        row(4, "move", 2.0, accepted=False),
        row(5, "move", 4.0, knob="b"),
        row(6, "check", 4.5),
    ]
    first, second = told_checks(rows, "latency")
    assert (first["after"], first["knob"], first["predicted"], first["measured"]) == (1, "a", 6.0, 7.0)
    assert (first["accepted"], first["saved"]) == (False, None)
    assert (second["after"], second["knob"], second["accepted"]) == (5, "b", True)
    assert second["saved"] == {"predicted": 2.0, "measured": 2.5}
    assert told_checks(rows, "size") == []


def test_the_bound_that_ships_is_what_the_ledgers_that_ship_make(tmp_path):
    made = tmp_path / "bound.json"
    done = subprocess.run(
        [
            *(sys.executable, str(RECIPES / "train_policy.py"), str(RECIPES / "ledgers")),
            *("--out", str(tmp_path / "policy.json"), "--bound", str(made)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(SHIPPED.read_text()), json.loads(made.read_text())
    assert ours.pop("margin") == pytest.approx(theirs.pop("margin"))
    assert ours == theirs
    bound, about = read_bound(SHIPPED)
    assert about == "likeness"
    assert bound.violation_rate <= bound.violation_rate_upper < 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"apportion_bound": 1, "quality": "q", "margin": 1}'])
def test_what_is_no_bound_is_refused(tmp_path, text):
    (tmp_path / "bound.json").write_text(text)
    with pytest.raises(DataError, match="no bound"):
        read_bound(tmp_path / "bound.json")
