"""Fit inside one process: every policy, importance and rule meets a counted budget on a small network."""

from __future__ import annotations

import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import zoo

from apportion.device.meters import FlopCount
from apportion.errors import ApportionError, BudgetError, DataError
from apportion.methods.compress.fit import fit
from apportion.methods.compress.rundir import IMPORTANCES, FitConfig
from apportion.models.load import load

CNN = "tests.factories:small_cnn"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "images.safetensors"
    save_file({"0": torch.randn(120, 3, 16, 16, generator=torch.Generator().manual_seed(0))}, path)
    return str(path)


def run(tmp_path, images, budget, **options):
    defaults = {"rungs": 1, "repair_steps": 0, "num_steps": 4}
    return fit(FitConfig(model=CNN, budget=budget, data=images, **defaults | options), tmp_path / "run")


@pytest.mark.parametrize("policy", ["greedy", "scheduled", "priced", "exact", "backtracking", "learned"])
def test_every_policy_meets_a_budget(tmp_path, images, policy):
    result = run(tmp_path, images, "params<=50%", policy=policy)
    assert result["met"]
    assert result["final"]["params"]["value"] <= 0.5 * result["baseline"]["params"]["value"]
    prices = result["prices"]
    assert set(prices["parts"]) <= set(result["setting"])
    assert [step["knob"] for step in prices["steps"]]
    assert math.isclose(prices["lost"], sum(step["loss"] for step in prices["steps"]))
    assert prices["bound"]["upper"] >= prices["predicted_loss"]


@pytest.mark.parametrize("importance", IMPORTANCES)
def test_every_importance_meets_a_budget(tmp_path, images, importance):
    assert run(tmp_path, images, "params<=60%", importance=importance, policy="scheduled")["met"]


def test_repair_gives_quality_back_and_keeps_the_cost(tmp_path, images):
    bare = run(tmp_path / "bare", images, "params<=40%")
    repaired = run(tmp_path / "repaired", images, "params<=40%", repair_steps=60)
    assert repaired["met"]
    assert repaired["final"]["params"]["value"] <= 0.4 * repaired["baseline"]["params"]["value"]
    assert repaired["quality_after"]["value"] > bare["quality_after"]["value"]


def test_labels_raise_accuracy_where_the_original_is_poor_and_can_be_retrieved_by(tmp_path, images):
    pixels = load_file(images)["0"]
    data = str(tmp_path / "labelled.safetensors")
    save_file({"0": pixels, "target": (pixels[..., :8].mean((1, 2, 3)) > 0).long() * 9}, data)
    tuned = run(tmp_path, data, "params<=80%", rules="prune,finetune", repair_steps=60, policy="scheduled")
    assert tuned["met"]
    assert tuned["quality"] == "accuracy"
    assert tuned["quality_after"]["value"] > tuned["quality_before"]["value"] + 0.2
    found = run(tmp_path / "found", data, "params<=80%", rules="prune", quality="retrieval", policy="scheduled")
    assert found["met"]
    assert found["quality"] == "retrieval"
    assert 0.4 < found["quality_before"]["value"] < 1  # of two classes of equal size chance has half
    with pytest.raises(DataError, match="finetune needs labels"):
        run(tmp_path / "bare", images, "params<=80%", rules="prune,finetune")


def test_a_rung_starts_where_the_one_before_ended(tmp_path, images):
    result = run(tmp_path, images, "params<=30%", rungs=3)
    assert result["met"]
    sizes = [rung["final"]["params"]["value"] for rung in result["ladder"]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 3


def test_low_rank_and_pruning_compose(tmp_path, images):
    result = run(tmp_path, images, "params<=50%", rules="prune,lowrank", policy="scheduled")
    assert result["met"]
    network = load(str(tmp_path / "run" / "model"), factory=CNN)
    assert sum(p.numel() for p in network.module.parameters()) == result["final"]["params"]["value"]


def test_zeros_count_for_the_size(tmp_path, images):
    result = run(tmp_path, images, "size<=60%", rules="sparse", policy="scheduled")
    assert result["met"]
    size_bytes = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert size_bytes == result["final"]["size"]["value"] <= 0.6 * result["baseline"]["size"]["value"]


def test_all_modules_are_pruned_by_one_knob(tmp_path, images):
    result = run(tmp_path, images, "params<=50%", rules="prune-all")
    assert result["met"]
    assert set(result["setting"]) == {"prune-all"}
    assert 0 < result["setting"]["prune-all"] < 1
    network = load(str(tmp_path / "run" / "model"), factory=CNN)
    assert sum(p.numel() for p in network.module.parameters()) == result["final"]["params"]["value"]
    assert len(network.edits.keep) > 1


def test_a_pattern_of_zeros_is_a_rule(tmp_path, images):
    result = run(tmp_path, images, "size<=80%", rules="sparse-2:4", policy="scheduled")
    assert result["met"]
    assert set(result["setting"].values()) == {"2:4", "4:4"}
    module = load(str(tmp_path / "run" / "model"), factory=CNN).module
    for name, value in result["setting"].items():
        weight = module.get_submodule(name.removeprefix("sparse.")).weight.flatten(1)
        most = (weight[:, : weight.shape[1] // 4 * 4].unflatten(1, (-1, 4)) != 0).sum(-1).max()
        assert most <= int(value[0])


def test_a_rule_that_was_left_out_is_told(tmp_path, images):
    result = run(tmp_path, images, "params<=80%", rules="prune,sparse,tokens", policy="scheduled")
    assert result["met"]
    tokens, sparse = result["left_out"]
    assert "tokens" in tokens
    assert "no params" in sparse
    assert "limit on size" in sparse


@pytest.mark.parametrize(
    ("rules", "importance", "told"),
    [
        ("prune-all", "magnitude", "which magnitude does not; use --importance taylor, fisher or hessian"),
        ("prune-all", "activation", "which activation does not"),
        ("prune,prune-all", "taylor", "allow one of them"),
        ("sparse,sparse-2:4", "taylor", "allow one of them"),
        ("prune,mixed", "taylor", "allow quantise, too"),
        ("sparse-4:2", "taylor", "'4:2' is not N:M"),
        ("prune,shrink", "taylor", "unknown rule 'shrink'"),
    ],
)
def test_rules_that_make_no_sense_are_refused_in_one_line(rules, importance, told):
    with pytest.raises(ApportionError, match=re.escape(told)) as refused:
        FitConfig(model=CNN, budget="params<=50%", rules=rules, importance=importance)
    assert "\n" not in str(refused.value)


def test_rules_that_can_not_help_are_refused_before_anything_is_tried(tmp_path, images):
    with pytest.raises(BudgetError, match="--rules"):
        run(tmp_path, images, "params<=50%", rules="sparse")
    with pytest.raises(ApportionError, match=r"missing\.json"):
        run(tmp_path / "other", images, "params<=50%", policy="learned:missing.json")


@pytest.mark.parametrize("rules", ["tokens", "depth", "tokens,depth,prune"])
@pytest.mark.parametrize("policy", ["greedy", "backtracking"])
def test_an_encoder_is_left_with_fewer_tokens_or_blocks(tmp_path, rules, policy):
    zoo.save_pretrained("vit", tmp_path / "vit")
    pixels = torch.randn(60, 3, zoo.IMAGE, zoo.IMAGE, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": pixels}, tmp_path / "pixels.safetensors")
    options = {
        "rules": rules,
        "policy": policy,
        "rungs": 2,
        "repair_steps": 0,
        "num_steps": 4,
        "data": str(tmp_path / "pixels.safetensors"),
    }
    result = fit(FitConfig(model=str(tmp_path / "vit"), budget="flops<=75%", **options), tmp_path / "run")
    assert result["met"]
    network = load(str(tmp_path / "run" / "model"))
    assert FlopCount().read(network).value == result["final"]["flops"]["value"]
    assert bool(network.edits.tokens) == ("tokens" in result["setting"] and result["setting"]["tokens"] < 17)
    if rules == "tokens":
        assert network.edits.tokens
    if rules == "depth":
        assert network.edits.skips
