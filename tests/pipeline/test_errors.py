"""Mistakes a user makes: each one line on standard error, the documented exit code, nothing half-written."""

from __future__ import annotations

import json
import pickle
import signal
import time

import pytest
import torch
from safetensors.torch import save_file
from tests.pipeline.check import assert_one_line

CNN = "tests.factories:small_cnn"


@pytest.mark.parametrize(
    ("budget", "part"),
    [
        ("8parsec", "unknown unit 'parsec'"),
        ("-8ms", "not positive"),
        ("eight", "can't read the budget"),
        ("latency<=8MB", "limits latency in 'MB'"),
        ("150%", "at most 100%"),
        ("energy<=3mJ", "can't limit energy"),
        ("8ms@toaster", "unknown target 'toaster'"),
        ("8ms@ort-int8-cpu-1t", "name ort-cpu-1t"),
    ],
)
def test_a_bad_budget(told, tmp_path, budget, part):
    assert_one_line(told("fit", CNN, "--budget", budget, "-o", "run", "--json"), 2, part)
    assert not (tmp_path / "run").exists()


def test_an_unknown_model(told):
    assert_one_line(told("fit", "gpt-99", "--budget", "60%", "-o", "run", "--json"), 2, "no model 'gpt-99'", "minilm")


def test_an_unknown_option_or_none_at_all(told):
    assert_one_line(told("fit", CNN, "--budgt", "60%"), 2, "--budgt")
    assert_one_line(told("fit", CNN), 2, "--budget")


def test_an_unknown_policy(told, images):
    done = told("fit", CNN, "--budget", "60%", "-o", "run", "--policy", "magic", "--json")
    assert_one_line(done, 2, "'magic'", "greedy")


@pytest.mark.parametrize("kind", ["random bytes", "pickle", "truncated", "lying"])
def test_a_checkpoint_that_is_not_what_it_says(told, tmp_path, kind, generator):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    path = folder / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    good = path.read_bytes()
    header = {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    text = json.dumps(header).encode()
    path.write_bytes(
        {
            "random bytes": bytes(torch.randint(0, 256, (5000,), generator=generator).tolist()),
            "pickle": pickle.dumps({"weights": [1, 2, 3]}),
            "truncated": good[:-100],
            "lying": len(text).to_bytes(8, "little") + text + b"\0" * 400,
        }[kind]
    )
    assert_one_line(told("fit", folder, "--budget", "60%", "-o", "run", "--json"), 2, "model.safetensors")


def test_only_a_pickle_in_the_folder(told, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert_one_line(told("fit", folder, "--budget", "60%", "-o", "run", "--json"), 2, "pickle")


def test_a_model_that_can_not_be_traced(told, images):
    done = told("fit", "tests.factories:detached", "--budget", "60%", "-o", "run", "--data", images, "--json")
    assert_one_line(done, 2, "autograd")


def test_a_budget_under_the_floor_is_refused_with_the_floor(told, images):
    done = told("fit", CNN, "--budget", "params<=1%", "-o", "run", "--data", images, "--json")
    assert_one_line(done, 3, "can't be met", "of the original", "params")


def test_a_latency_under_the_floor_is_refused_with_the_measured_floor(apportion, images):
    done = apportion("fit", CNN, "--budget", "1us", "-o", "run", "--data", images, "--json")
    assert_one_line(done, 3, "can't be met", "ms")


def test_a_quality_floor_out_of_reach_is_a_named_outcome(apportion, images):
    result = apportion.json(
        "fit", CNN, "--budget", "params<=40%", "--quality-floor", "100%", "-o", "run", "--data", images
    )
    assert result["exit"] == 3
    assert result["outcome"] == "quality collapse"
    assert result["met"] is False


def test_a_rung_that_fails_leaves_the_one_before_in_use(apportion, tmp_path, images):
    asked = ("fit", CNN, "--budget", "params<=12%", "--quality-floor", "12%", "--rungs", 3, "--rules", "prune")
    result = apportion.json(*asked, "--data", images, "-o", "run")
    met = [rung["rung"] for rung in result["ladder"] if rung["met"]]
    assert result["exit"] == 3
    assert met == list(range(1, len(result["ladder"])))
    assert met
    assert (tmp_path / "run" / "model").resolve() == tmp_path / "run" / "rungs" / str(met[-1]) / "model"
    verified = apportion.json("verify", "run", "--model", CNN)
    assert verified["met"] is True
    assert verified["final"]["params"] == result["ladder"][met[-1] - 1]["final"]["params"]


def test_another_original_or_other_data_are_not_what_was_promised_about(apportion, told, tmp_path, images):
    assert (
        apportion.json("fit", CNN, "--budget", "params<=80%", "--rungs", 1, "-o", "run", "--data", images)["exit"] == 0
    )
    assert apportion.json("verify", "run", "--model", CNN)["exit"] == 0
    content = images.read_bytes()
    images.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_one_line(told("verify", "run", "--model", CNN, "--json"), 2, "not those that run was made from")


def test_a_factory_says_how_many_examples_it_brings(told, images):
    done = told("fit", CNN, "--budget", "params<=80%", "--batch", 8, "-o", "run", "--data", images, "--json")
    assert_one_line(done, 2, "brings its own example inputs", "make them 8")


def test_a_finished_run_is_neither_overwritten_nor_verified_after_a_change(apportion, told, tmp_path, images):
    assert apportion.json("fit", CNN, "--budget", "params<=80%", "-o", "run", "--data", images)["exit"] == 0
    fitted = tmp_path / "run"
    ledger = (fitted / "rungs" / "2" / "ledger.jsonl").read_bytes()
    assert_one_line(
        told("fit", CNN, "--budget", "params<=70%", "-o", "run", "--data", images, "--json"), 2, "another -o"
    )
    assert (fitted / "rungs" / "2" / "ledger.jsonl").read_bytes() == ledger
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("dear reader")
    assert_one_line(
        told("fit", CNN, "--budget", "params<=70%", "-o", "mine", "--data", images, "--json"), 2, "not empty"
    )
    assert_one_line(told("verify", "nowhere", "--json"), 2, "holds no run")
    assert_one_line(told("verify", "run", "--json"), 2, CNN, "--model")
    with (fitted / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert_one_line(told("verify", "run", "--model", CNN, "--json"), 2, "not the model that was certified")


@pytest.mark.parametrize("model", ["tests.factories:slow_to_build", "tests.factories:swallows_interrupts"])
def test_interrupted_by_the_user(apportion, images, model):
    process = apportion.start("fit", model, "--budget", "params<=50%", "-o", "run", "--data", images, "--json")
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.strip() == "apportion: interrupted; start it again with the same -o folder to go on"
    if model == "tests.factories:slow_to_build":
        again = apportion.json("fit", model, "--budget", "params<=50%", "-o", "run", "--data", images)
        assert again["met"] is True
