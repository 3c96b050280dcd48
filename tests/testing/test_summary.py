"""Summaries of benchmarks: figures with their conditions, a quick run never in place of a full one."""

from __future__ import annotations

import json
import subprocess

from apportion.testing.summary import Summary


def test_figures_stand_beside_their_conditions(tmp_path):
    summary = Summary(tmp_path)
    summary.write({"ratio": 0.5}, packages=("torch",), rows=[1])
    told = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert told["figures"] == {"ratio": 0.5}
    assert told["rows"] == [1]
    assert set(told["versions"]) == {"torch", "python"}
    assert told["commit"] == "unknown"  # no repository here
    assert told["seconds"] >= 0


def test_a_quick_run_leaves_the_full_ones_figures(tmp_path):
    Summary(tmp_path).write({"ratio": 0.5})
    Summary(tmp_path).write({"ratio": 0.9}, quick=True)
    assert json.loads((tmp_path / "results" / "summary.json").read_text())["figures"] == {"ratio": 0.5}
    assert json.loads((tmp_path / "results" / "summary_quick.json").read_text())["quick"] is True


def test_the_commit_is_that_of_the_start(tmp_path):
    def git(*args):
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    first = git("rev-parse", "--short", "HEAD")
    summary = Summary(tmp_path)
    git("commit", "-q", "--allow-empty", "-m", "two")
    summary.write({})
    assert json.loads((tmp_path / "results" / "summary.json").read_text())["commit"] == first
