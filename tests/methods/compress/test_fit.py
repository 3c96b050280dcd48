"""Fit inside one process: every policy, importance and rule meets a counted budget on a small network."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from tests.models import zoo

from apportion.device.meters import FlopCount
from apportion.errors import ApportionError, BudgetError
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


def test_rules_that_can_not_help_are_refused_before_anything_is_tried(tmp_path, images):
    with pytest.raises(BudgetError, match="--rules"):
        run(tmp_path, images, "params<=50%", rules="sparse")
    with pytest.raises(ApportionError, match="unknown rule 'shrink'"):
        run(tmp_path, images, "params<=50%", rules="prune,shrink")
    with pytest.raises(ApportionError, match=r"missing\.json"):
        run(tmp_path / "other", images, "params<=50%", policy="learned:missing.json")


@pytest.mark.parametrize("rules", ["tokens", "depth", "tokens,depth,prune"])
def test_an_encoder_is_left_with_fewer_tokens_or_blocks(tmp_path, rules):
    zoo.save_pretrained("vit", tmp_path / "vit")
    pixels = torch.randn(60, 3, zoo.IMAGE, zoo.IMAGE, generator=torch.Generator().manual_seed(0))
    save_file({"pixel_values": pixels}, tmp_path / "pixels.safetensors")
    options = {
        "rules": rules,
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
