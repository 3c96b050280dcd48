"""Learned: trained on ledgers, compared with greedy and scheduled on networks it has not seen."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.core.ledger import Ledger
from apportion.core.policy import Greedy, RankedBy, Scheduled
from apportion.errors import DataError, LedgerError
from apportion.methods.compress.history import read_runs
from apportion.methods.compress.policies import LIKENESS, SHIPPED, policy_named
from apportion.methods.compress.policies.exact import Exact
from apportion.methods.compress.policies.features import CLIP, NAMES, View, kind_of
from apportion.methods.compress.policies.learned import Learned, Ranker, train
from apportion.testing.compare import as_table, compare, replay
from apportion.testing.suites import PolicySuite
from apportion.testing.toys import layered_toy

RECIPE = Path(__file__).parents[4] / "recipes" / "train_policy.py"


def earlier_runs(num_runs=8, *, policy=None, share=0.4):
    toys = [layered_toy(random.Random(seed)) for seed in range(num_runs)]
    return [replay(policy or Greedy(), toy, share=share).rows for toy in toys]


@pytest.fixture(scope="module")
def ranker():
    return train(earlier_runs())


class TestLearned(PolicySuite):
    @pytest.fixture
    def make_policy(self, ranker):
        return lambda: Learned(ranker)


# the comparison


def test_on_unseen_networks_it_reads_less_than_greedy_and_loses_less_than_scheduled(ranker):
    unseen = [layered_toy(random.Random(1000 + seed)) for seed in range(6)]
    for share in (0.7, 0.4):
        greedy, scheduled, learned = compare(
            {"greedy": Greedy(), "scheduled": Scheduled(), "learned": Learned(ranker)}, unseen, share=share
        )
        assert learned.num_met == greedy.num_met == scheduled.num_met == 6
        assert learned.readings < 0.6 * greedy.readings
        # of the quality that greedy saves over scheduled it keeps most
        assert greedy.quality - learned.quality < 0.25 * (greedy.quality - scheduled.quality)


def test_a_ranker_of_shuffled_runs_is_reported_as_knowing_nothing():
    generator = random.Random(0)
    runs = []
    for rows in earlier_runs(6, policy=Exact()):
        swapped = [row.readings["quality"] for row in rows]
        generator.shuffle(swapped)
        runs.append(
            [
                type(row)(**{**vars(row), "readings": {**row.readings, "quality": quality}})
                for row, quality in zip(rows, swapped, strict=True)
            ]
        )
    assert train(runs).held_out_r2 < 0.5 * train(earlier_runs(6, policy=Exact())).held_out_r2


def test_standings_count_readings_and_fit_a_terminal():
    toys = [layered_toy(random.Random(seed)) for seed in range(2)]
    standings = compare({"scheduled": Scheduled(), "a" * 60: Greedy()}, toys)
    # scheduled reads the start and every move, nothing else
    assert standings[0].readings == sum(len(replay(Scheduled(), toy, share=0.5).rows) for toy in toys) / 2
    assert standings[1].readings > standings[0].readings
    lines = as_table(standings).splitlines()
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80


# what it knows of a move


def test_a_knob_is_tried_at_most_once_and_moves_follow_without_trials(ranker):
    rows = replay(Learned(ranker), layered_toy(random.Random(77)), share=0.4).rows
    tried = [row.knob for row in rows if row.kind == "trial"]
    assert tried
    assert len(set(tried)) == len(tried)
    assert {row.knob for row in rows if row.kind == "move"} <= set(tried)


def test_kinds_are_names_without_numbers_and_positions_follow_the_numbers():
    assert kind_of("prune.layer10.heads") == kind_of("prune.layer2.heads") != kind_of("prune.layer2.neurons")
    rows = replay(Scheduled(), layered_toy(random.Random(0), num_layers=11), share=0.9).rows
    positions = View.of(rows).positions
    assert [positions[f"prune.layer{index}.heads"] for index in (0, 2, 10)] == [0.0, 0.2, 1.0]


def test_features_describe_a_move_by_what_was_seen_before_it():
    rows = replay(Greedy(), layered_toy(random.Random(0)), share=0.5).rows
    at_start = dict(zip(NAMES, View.of(rows[:1]).features("prune.layer1.heads", 4, 3), strict=True))
    assert at_start == {
        "removed": 0.25,
        "removed_squared": 0.0625,
        "step": 0.25,
        "position": 0.25,
        "from_middle": 0.25,
        "excess_left": 1.0,
        "known": 0.0,
        "last": 0.0,
        "last_saved": 0.0,
        "since_last": 0.0,
        "kind_known": 0.0,
        "kind_mean": 0.0,
    }
    first = rows[1].knob
    view = View.of(rows[:2])
    later = dict(zip(NAMES, view.features(first, 4, 2), strict=True))
    assert (later["known"], later["kind_known"]) == (1.0, 0.0)
    assert later["since_last"] == 0.25
    assert later["last"] == view.target(view.newest[first].ratio)
    assert later["last_saved"] == 1 - rows[1].cost / rows[0].cost
    assert view.target(float("inf")) == CLIP
    assert View.of(rows).excess_left == 0.0


# files


def test_a_ranker_is_saved_as_json_and_read_back_the_same(ranker, tmp_path):
    ranker.save(tmp_path / "policy.json")
    assert Ranker.load(tmp_path / "policy.json") == ranker


@pytest.mark.parametrize(
    "change",
    [
        {"apportion_ranker": 99},
        {"features": ["other"]},
        {"weight": [1.0]},
        {"intercept": "high"},
        {"intercept": float("nan")},
        {"kinds": None},
        {"scale": [0.0] * (len(NAMES) + 2)},
    ],
)
def test_a_file_that_is_no_ranker_is_refused_in_one_line(ranker, tmp_path, change):
    path = tmp_path / "policy.json"
    ranker.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError) as caught:
        Ranker.load(path)
    assert "\n" not in str(caught.value)
    assert "recipes/train_policy.py" in str(caught.value)


def test_too_little_to_learn_from_is_refused():
    with pytest.raises(DataError, match="at least 20 are needed"):
        train(earlier_runs(1, policy=Scheduled(), share=0.8))


def test_the_recipe_trains_from_run_folders(tmp_path):
    for number, rows in enumerate(earlier_runs(3)):
        with Ledger(tmp_path / f"run{number}" / "ledger.jsonl", run="earlier") as ledger:
            for row in rows:
                ledger.append(row)
    out = tmp_path / "policy.json"
    folders = [str(tmp_path / f"run{number}") for number in range(3)]
    done = subprocess.run(
        [sys.executable, str(RECIPE), *folders, "--out", str(out)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2  # toys read no likeness
    assert done.stderr.count("\n") == 1
    assert "'likeness'" in done.stderr
    done = subprocess.run(
        [sys.executable, str(RECIPE), *folders, "--out", str(out), "--quality", "quality"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "of 3 runs" in done.stdout
    assert Ranker.load(out) == train(earlier_runs(3))
    done = subprocess.run(
        [sys.executable, str(RECIPE), str(tmp_path / "none"), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_the_policy_that_ships_is_what_the_ledgers_that_ship_make():
    runs = read_runs(RECIPE.parent / "ledgers")
    made, shipped = train(runs, "likeness"), Ranker.load(SHIPPED)
    assert (shipped.kinds, shipped.num_examples, shipped.num_runs) == (made.kinds, made.num_examples, made.num_runs)
    assert shipped.weight == pytest.approx(made.weight, rel=1e-4, abs=1e-6)
    assert shipped.held_out_r2 == pytest.approx(made.held_out_r2, abs=1e-4)
    assert shipped.held_out_r2 > 0.1  # it knows more than the mean
    assert policy_named("learned") == RankedBy(Learned(shipped), LIKENESS)


def test_a_packed_ledger_that_was_cut_short_is_refused(tmp_path):
    whole = next((RECIPE.parent / "ledgers").glob("*.gz"))
    (tmp_path / "cut.jsonl.gz").write_bytes(whole.read_bytes()[:200])
    with pytest.raises(LedgerError, match="can't be read"):
        read_runs(tmp_path)
