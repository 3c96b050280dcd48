"""Fit and verify end to end, as processes: budgets met and verified, and a kill -9 that changes nothing."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest

from apportion.models.load import load

CNN, MLP = "tests.factories:small_cnn", "tests.factories:wide_mlp"
KEYS = {"budget", "baseline", "final", "quality_before", "quality_after", "met", "run"}


def rows(folder):
    """Ledger rows of all rungs without their times."""
    ledgers = sorted((folder / "rungs").glob("*/ledger.jsonl"))
    lines = [line for ledger in ledgers for line in ledger.read_text().splitlines()]
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def num_rows(folder):
    """Whole rows of a run that is being written, and may have lost half a row when it was killed."""
    return sum(ledger.read_text().count("\n") for ledger in (folder / "rungs").glob("*/ledger.jsonl"))


@pytest.mark.parametrize(
    ("policy", "importance", "quantity"), [("greedy", "taylor", "params"), ("scheduled", "magnitude", "flops")]
)
def test_a_counted_budget_is_met_verified_and_not_run_again(apportion, tmp_path, images, policy, importance, quantity):
    options = ("--policy", policy, "--importance", importance, "--data", images, "-o", "run")
    command = ("fit", CNN, "--budget", f"{quantity}<=60%, size<=300KB", *options)
    result = apportion.json(*command)
    assert result["exit"] == 0
    assert set(result) >= KEYS
    assert result["met"] is True
    assert result["final"][quantity]["value"] <= 0.6 * result["baseline"][quantity]["value"]
    assert (tmp_path / "run" / "model" / "model.safetensors").stat().st_size <= 300_000
    assert result["quality_before"]["value"] == 1.0
    again = apportion.json("verify", "run", "--model", CNN)
    assert again["exit"] == 0
    assert again["final"] == result["final"]
    assert again["quality_after"] == result["quality_after"]
    before = rows(tmp_path / "run")
    assert before
    assert apportion.json(*command) == result
    assert rows(tmp_path / "run") == before
    if quantity == "params":
        network = load(str(tmp_path / "run" / "model"), factory=CNN)
        assert sum(p.numel() for p in network.module.parameters()) == result["final"]["params"]["value"]


@pytest.mark.slow
def test_a_compiled_network_meets_its_latency_or_is_refused(apportion, tmp_path, images):
    """The machine may be busy, so that the promise may be refused; one that is made is about the compiled network."""
    options = ("--rungs", "1", "--rules", "prune", "--data", images, "-o", "run")
    result = apportion.json("fit", MLP, "--budget", "latency<=90%@compile-cpu-1t", *options)
    assert result["exit"] in (0, 3, 4), result
    if result["exit"] == 0:
        assert result["met"] is True
        final, limits = result["final"], result["ladder"][0]["limits"]
        assert final["latency@compile-cpu-1t"]["value"] <= limits["latency@compile-cpu-1t"]
        again = apportion.json("verify", "run", "--model", MLP)
        assert again["exit"] in (0, 4)
        assert again["quality_after"] == result["quality_after"]


def test_a_quality_floor_is_shown_apart_from_the_held_out_reading_and_verified(apportion, tmp_path, images):
    options = ("--quality-floor", "20%", "--data", images, "--rungs", 1, "--repair-steps", 40, "-o", "run")
    told = apportion("fit", CNN, "--budget", "params<=90%", *options)
    assert told.returncode == 0, told.stderr
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    kept = certificate["floor"]["kept"]
    lines = told.stdout.splitlines()
    held_out = next(line for line in lines if "held out" in line and "│" in line)
    floor = next(line for line in lines if "quality floor" in line and "│" in line)
    assert "(20%)" in floor
    assert "(20%)" not in held_out
    assert f"{kept['value']:.1%} ± {kept['stderr'] * 100:.1f}" in floor
    assert max(map(len, lines)) <= 80 or all("run" in line for line in lines if len(line) > 80)
    assert apportion.json("verify", "run", "--model", CNN)["floor"] == certificate["floor"]
    certificate["floor"]["asked"] = 1.0
    (tmp_path / "run" / "certificate.json").write_text(json.dumps(certificate))
    broken = apportion("verify", "run", "--model", CNN)
    assert broken.returncode == 4
    assert "under the quality floor" in " ".join(broken.stdout.split())


def test_a_fitted_model_can_be_fitted_further(apportion, tmp_path, images):
    first = apportion.json("fit", CNN, "--budget", "params<=70%", "--data", images, "-o", "first")
    refused = apportion("fit", "first/model", "--budget", "params<=60%", "--data", images, "-o", "second", "--json")
    assert refused.returncode == 2
    assert "--factory" in refused.stderr
    assert first["met"] is True
    options = ("--factory", CNN, "--data", images, "-o", "second")
    second = apportion.json("fit", "first/model", "--budget", "params<=60%", *options)
    assert second["met"] is True
    assert second["baseline"]["params"] == first["final"]["params"]
    again = apportion.json("verify", "second", "--model", CNN)
    assert again["met"] is True
    assert again["final"] == second["final"]


def test_kill_9_at_three_random_moments_changes_nothing(apportion, tmp_path, images):
    options = ("fit", CNN, "--budget", "params<=30%", "--data", images, "--seed", 3)
    undisturbed = apportion.json(*options, "-o", "undisturbed")
    assert undisturbed["met"] is True
    whole = len(rows(tmp_path / "undisturbed"))
    rng = random.Random(5)
    num_killed = 0
    for count in sorted(rng.sample(range(whole), 3)):  # rows of the ledger, and then at any moment soon after
        process = apportion.start(*options, "-o", "killed", "--json")
        while process.poll() is None and num_rows(tmp_path / "killed") <= count:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.05))
        num_killed += process.poll() is None
        process.kill()
        process.communicate()
    assert num_killed >= 2  # the last may be done by then
    resumed = apportion.json(*options, "-o", "killed")
    assert rows(tmp_path / "killed") == rows(tmp_path / "undisturbed")
    for result in (resumed, undisturbed):
        for name in ("run", "seconds"):
            result.pop(name)
    assert resumed == undisturbed
    leftovers = [path.name for path in (tmp_path / "killed").rglob(".*")]
    assert leftovers == []


def test_a_run_leaves_a_ladder_to_retarget_and_serve(apportion, tmp_path, images):
    options = ("--data", images, "--rungs", 3, "--repair-steps", 20, "-o", "run")
    result = apportion.json("fit", CNN, "--budget", "params<=40%", *options)
    assert result["met"] is True
    sizes = [rung["final"]["params"]["value"] / result["baseline"]["params"]["value"] for rung in result["ladder"]]
    limits = [0.4 ** (1 / 3), 0.4 ** (2 / 3), 0.4]
    assert all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    units = [load(str(tmp_path / "run" / "rungs" / str(i) / "model"), factory=CNN).edits.keep for i in (1, 2, 3)]
    for larger, smaller in itertools.pairwise(units):
        assert all(set(smaller[name]) <= set(kept) for name, kept in larger.items())  # nested
    looser = apportion.json("retarget", "run", "--budget", "params<=80%")
    assert looser["exit"] == 0
    assert looser["rung"] == max((1, 2, 3), key=lambda i: (result["ladder"][i - 1]["quality_after"]["value"], -i))
    again = apportion.json("verify", "run", "--model", CNN)
    assert again["final"]["params"]["value"] == looser["measured"]["params"]["value"]
    refused = apportion("retarget", "run", "--budget", "params<=10%", "--json")
    assert refused.returncode == 3
    assert refused.stderr.count("\n") == 1
    assert "no rung meets" in refused.stderr
