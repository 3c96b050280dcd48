"""The budgeted loop killed and resumed: it ends as if undisturbed and reads nothing twice."""

from __future__ import annotations

import inspect
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.worlds import STAGED, measure, run, worlds

import apportion
from apportion.core.budget import Budget, Limit
from apportion.core.ledger import Ledger
from apportion.core.loop import Outcome
from apportion.core.policy import Greedy, Scheduled
from apportion.testing.toys import Counting, Jittered, Noisy, Scaled, Toy, composed_toy, concave_toy

SRC = Path(apportion.__file__).parents[1]


def checked_world():
    """A noisy toy whose checks fail at first; every reading is a function of the setting."""
    toy = concave_toy(random.Random(3), num_knobs=3, num_values=5)
    cost = Jittered(toy.meters["latency"], stderr=0.2, seed=1)
    quality = Jittered(toy.meters["quality"], stderr=3.0, seed=2)
    toy = Toy(toy.knobs, {"latency": cost, "quality": quality})
    return toy, Jittered(Scaled(cost, 1.1), stderr=0.1, seed=3)


RESUMED = {  # how a run is made, how it ends and what its checks say
    "greedy": ({"policy": Greedy(), "z": 1.645}, Outcome.MET, [False, True]),
    "scheduled": ({"policy": Scheduled()}, Outcome.MET, [False, True]),
    "without a check": ({"policy": Greedy(), "z": 1.645, "check": None}, Outcome.MET, []),
    "breaking": ({"policy": Scheduled(), "break_on_reject": True}, Outcome.MET, [False, True]),
    "collapsing": ({"policy": Greedy(), "quality_floor": -10_000.0}, Outcome.QUALITY_COLLAPSE, [False]),
    "collapsing later": ({"policy": Greedy(), "quality_floor": -18_000.0}, Outcome.QUALITY_COLLAPSE, [False]),
    "predicted too high": ({"policy": Greedy(), "slow": 2.6}, Outcome.MET, [True]),
    "violating": ({"policy": Greedy(), "max_checks": 1}, Outcome.BUDGET_VIOLATION, [False]),
    "out of steps": ({"policy": Greedy(), "max_steps": 12}, Outcome.OUT_OF_STEPS, []),
}


def run_counted(path, options):
    """A run on a file, what it read and what it checked."""
    toy, fresh = checked_world()
    slow = options.get("slow", 1.0)  # readings are so much too high that no move leads to the budget
    toy = Toy(toy.knobs, {**toy.meters, "latency": Scaled(toy.meters["latency"], slow)})
    reads, checks = Counting(toy.meters["latency"]), Counting(fresh)
    half_ms = toy.meters["latency"].read(toy.start).value / 2 / slow
    budget = Budget((Limit(quantity="latency", value=half_ms, unit="ms"),))
    with Ledger(path, run="resumed") as ledger:
        result, rows = run(
            toy,
            budget,
            ledger=ledger,
            meters={**toy.meters, "latency": reads},
            **{"check": measure(checks), **{name: value for name, value in options.items() if name != "slow"}},
        )
    return result, rows, reads.models, checks.models


@pytest.mark.parametrize(("options", "outcome", "verdicts"), RESUMED.values(), ids=RESUMED)
def test_a_run_cut_after_any_row_resumes_as_if_undisturbed_and_reads_nothing_twice(
    tmp_path, monkeypatch, options, outcome, verdicts
):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # spares the disk; where the rows end is what is tested here
    whole_path, path = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    result, rows, reads, checks = run_counted(whole_path, options)
    lines = whole_path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(rows) > 9
    assert (result.outcome, [row.accepted for row in rows if row.kind == "check"]) == (outcome, verdicts)
    for num_rows in range(len(rows) + 1):
        next_line = lines[1 + num_rows] if num_rows < len(rows) else b'{"step": 9'
        for torn in (b"", next_line[: len(next_line) // 2]):
            path.write_bytes(b"".join(lines[: 1 + num_rows]) + torn)
            result_again, rows_again, reads_again, checks_again = run_counted(path, options)
            assert rows_again == rows
            assert result_again == result
            recorded = {row.setting for row in rows[:num_rows] if row.kind != "check"}
            assert recorded.isdisjoint(reads_again)
            num_checks = sum(row.kind == "check" for row in rows[:num_rows])
            assert reads_again == reads[len(recorded) :]
            assert checks_again == checks[num_checks:]


def test_a_finished_run_started_again_reads_and_writes_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    options, _, _ = RESUMED["greedy"]
    result, rows, _, _ = run_counted(path, options)
    whole = path.read_bytes()
    assert run_counted(path, options) == (result, rows, [], [])
    assert path.read_bytes() == whole


@settings(deadline=None, max_examples=200)
@given(worlds(checked=True), st.data())
def test_any_run_with_repeatable_readings_resumes_from_any_row(world, data):
    meters_of = {name: m if not isinstance(m, Noisy) else m.meter for name, m in world.toy.meters.items()}
    options = {**world.options, "meters": meters_of}
    options["check"] = lambda model: {
        key: Jittered(Scaled(meters_of[key], 1.1), 0.05, 7).read(model) for key in world.budget.keys
    }
    result, rows = run(world.toy, world.budget, **options)
    ledger = Ledger()
    for row in rows[: data.draw(st.integers(1, len(rows)))]:
        ledger.append(row)
    assert run(world.toy, world.budget, ledger=ledger, **options) == (result, rows)


def test_a_composed_run_resumes_with_the_model_it_had_built(tmp_path):
    toy = composed_toy()
    result, rows = run(toy, "3B", STAGED)
    for num_rows in range(1, len(rows) + 1):
        ledger = Ledger()
        for row in rows[:num_rows]:
            ledger.append(row)
        again, _ = run(toy, "3B", STAGED, ledger=ledger)
        assert again.model == result.model


# the program that is killed: a run of ``checked_world``, whose readings take a while and are logged before they start
PROGRAM = """
import random, sys, time
from pathlib import Path
from apportion.core.budget import Budget, Limit
from apportion.core.ledger import Ledger
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Greedy
from apportion.testing.toys import Jittered, Scaled, Toy, concave_toy

{checked_world}

class Slow:
    def __init__(self, meter):
        self.meter, self.unit = meter, meter.unit

    def read(self, model):
        with open(sys.argv[2], "a") as log:
            log.write(repr(model) + "\\n")
        time.sleep(0.02)
        return self.meter.read(model)

toy, fresh = checked_world()
half_ms = toy.meters["latency"].read(toy.start).value / 2
with Ledger(Path(sys.argv[1]), run="resumed") as ledger:
    result = budgeted_loop(
        toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters={{**toy.meters, "latency": Slow(toy.meters["latency"])}},
        budget=Budget((Limit(quantity="latency", value=half_ms, unit="ms"),)),
        policy=Greedy(),
        ledger=ledger,
        check=lambda model: {{"latency": Slow(fresh).read(model)}},
        z=1.645,
    )
print(result.outcome.value, result.setting)
"""


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(tmp_path, seed):
    result, rows, reads, checks = run_counted(tmp_path / "whole.jsonl", RESUMED["greedy"][0])
    path, log = tmp_path / "killed.jsonl", tmp_path / "reads.txt"
    command = [sys.executable, "-c", PROGRAM.format(checked_world=inspect.getsource(checked_world)), path, log]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    generator = random.Random(seed)
    num_killed = 0
    for num_rows in sorted(generator.sample(range(1, len(rows) - 6), 3)):
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 30
            while count_lines(path) < 1 + num_rows and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(generator.uniform(0.0, 0.04))
            process.kill()
        # on a machine that stalls, a run may be through before the kill arrives
        assert process.returncode in (0, -signal.SIGKILL)
        num_killed += process.returncode != 0
    assert num_killed > 0
    last = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert last.stdout.strip() == f"{result.outcome.value} {result.setting}"
    with Ledger(path, run="resumed") as ledger:
        assert list(ledger) == rows
    # a kill costs at most the reading that it fell into
    assert len(reads) + len(checks) <= count_lines(log) <= len(reads) + len(checks) + num_killed
