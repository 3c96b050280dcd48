"""Fit inside one process: every policy, importance and rule meets a counted budget on a small network."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import zoo

from apportion.core.budget import Budget
from apportion.device.energy import EnergySource
from apportion.device.memory import AllocatedPeak, CudaPeak
from apportion.device.meters import FlopCount
from apportion.device.target import find_target
from apportion.errors import ApportionError, BudgetError, DataError, InfeasibleError
from apportion.methods.compress import bench
from apportion.methods.compress import verify as verification
from apportion.methods.compress.bench import static_meters
from apportion.methods.compress.export import PROGRAM, export
from apportion.methods.compress.fit import fit
from apportion.methods.compress.plan import Plan
from apportion.methods.compress.repair import Distil
from apportion.methods.compress.rundir import IMPORTANCES, QUALITIES, FitConfig, RunDir
from apportion.methods.compress.verify import verify
from apportion.methods.compress.way import Walked
from apportion.models.load import load
from apportion.tasks.quality import KINDS

CNN = "tests.factories:small_cnn"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "images.safetensors"
    save_file({"0": torch.randn(120, 3, 16, 16, generator=torch.Generator().manual_seed(0))}, path)
    return str(path)


def run(tmp_path, images, budget, **options):
    defaults = {"rungs": 1, "repair_steps": 0, "num_steps": 4}
    return fit(FitConfig(model=CNN, budget=budget, data=images, **defaults | options), tmp_path / "run")


@pytest.mark.parametrize("repair_steps", [0, 2])
@pytest.mark.parametrize("policy", ["greedy", "scheduled", "priced", "exact", "backtracking", "learned"])
def test_every_policy_meets_a_budget(tmp_path, images, policy, repair_steps):
    result = run(tmp_path, images, "params<=50%", policy=policy, repair_steps=repair_steps)
    if policy in ("priced", "exact"):  # which read what every value costs and loses, first of all
        rows = (tmp_path / "run" / "rungs" / "1" / "ledger.jsonl").read_text().splitlines()[2:]
        assert [json.loads(row)["kind"] for row in rows].index("move") >= 4
    assert result["met"]
    assert result["final"]["params"]["value"] <= 0.5 * result["baseline"]["params"]["value"]
    prices = result["prices"]
    assert set(prices["parts"]) <= set(result["setting"])
    assert [step["knob"] for step in prices["steps"]]
    assert math.isclose(prices["lost"], sum(step["loss"] for step in prices["steps"]))
    assert prices["bound"]["upper"] >= prices["predicted_loss"]


def test_steps_of_repair_that_a_rung_leaves_go_to_those_to_come(tmp_path, images, monkeypatch):
    asked = []
    monkeypatch.setattr(Distil, "train", lambda self, model, update, steps: asked.append(steps) or model)
    result = run(tmp_path, images, "params<=20%", rungs=3, repair_steps=6)
    assert result["met"]
    told = [RunDir(tmp_path / "run").rung(place).result()["repair_steps"] for place in (1, 2, 3)]
    assert told == asked_by_rung(asked, told)
    assert told[1] == 0  # the first two lose too little between them to repair twice
    assert sum(told) <= 3 * (6 + 2) + 6  # an early repair beside each, and one turn more at the end


def asked_by_rung(asked, told):
    """The steps asked for, summed in runs as long as the rungs say."""
    found, left = [], list(asked)
    for steps in told:
        found.append(0)
        while left and found[-1] < steps:
            found[-1] += left.pop(0)
    assert not left
    return found


@pytest.mark.parametrize("back", [False, True])
def test_where_parts_go_beside_int8_the_rung_is_walked_to_in_float_too(tmp_path, images, monkeypatch, back):
    ranks = []

    def rank(self):
        ranks.append(self.result.model.precision)
        return (ranks[-1] == "fp32") == back  # the second reading of one way is of the one that was taken

    monkeypatch.setattr(Walked, "rank", property(rank))
    options = {"target": "ort-cpu-1t", "rules": "prune,quantise", "processes": 2, "num_steps": 8}
    result = run(tmp_path, images, "size<=15%", **options)
    assert result["met"]
    assert set(ranks) == {"int8", "fp32"}
    rung = RunDir(tmp_path / "run").rung(1)
    assert rung.ledger.is_file()
    assert rung.float_ledger.is_file()
    assert result["precision"] == ("fp32" if back else "int8")
    assert ("quantise" in result["setting"]) is not back
    assert result["final"]["size"]["value"] <= 0.15 * result["baseline"]["size"]["value"]


def test_a_rung_that_was_compared_goes_on_with_the_way_that_was_taken(tmp_path, images, monkeypatch):
    options = {"target": "ort-cpu-1t", "processes": 2, "num_steps": 8, "repair_steps": 6}
    first = run(tmp_path, images, "size<=15%", **options)
    rung = RunDir(tmp_path / "run").rung(1)
    told = rung.choice()
    assert told["repair_steps"] >= 2  # an early repair was tried on the way that was not taken
    assert first["repair_steps"] > told["repair_steps"]
    for name in ("result.json", "rungs/1/result.json"):
        (tmp_path / "run" / name).unlink()
    monkeypatch.setattr(Plan, "_choose", lambda *_: pytest.fail("chose again"))
    monkeypatch.setattr(Distil, "train", lambda *_: pytest.fail("trained again"))
    again = run(tmp_path, images, "size<=15%", **options)
    for key in ("setting", "precision", "repair_steps", "final", "quality_after", "met"):
        assert again[key] == first[key]


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


@pytest.mark.parametrize("budget", ["memory<=60%", "memory<=40KB"])
def test_a_budget_of_peak_memory_is_met_and_verified(tmp_path, images, budget):
    result = run(tmp_path, images, budget)
    peak = AllocatedPeak()
    assert result["met"]
    assert result["baseline"]["memory"]["value"] == peak.read(load(CNN)).value
    small = load(str(tmp_path / "run" / "model"), factory=CNN)
    assert result["final"]["memory"]["value"] == peak.read(small).value <= result["limits"]["memory"]
    assert RunDir(tmp_path / "run").certificate().measured["memory"].value == result["final"]["memory"]["value"]
    again = verify(tmp_path / "run", CNN)
    assert again["met"]
    assert again["final"] == result["final"]


def test_a_budget_of_memory_on_a_gpu_is_about_the_gpus_peak(tmp_path, images, monkeypatch):
    def read(self, network):
        on_cpu = AllocatedPeak().read(network)
        return replace(on_cpu, value=2 * on_cpu.value + 512)

    for module in (bench, verification):
        monkeypatch.setattr(module, "working_target", find_target)
    monkeypatch.setattr(CudaPeak, "read", read)
    result = run(tmp_path, images, "memory<=60%@torch-cuda")
    key, small = "memory@torch-cuda", load(str(tmp_path / "run" / "model"), factory=CNN)
    assert result["met"]
    assert result["baseline"][key]["value"] == 2 * AllocatedPeak().read(load(CNN)).value + 512
    assert result["final"][key]["value"] == 2 * AllocatedPeak().read(small).value + 512 <= result["limits"][key]
    assert verify(tmp_path / "run", CNN)["final"][key] == result["final"][key]


def test_a_budget_of_memory_under_the_smallest_network_is_refused_with_its_floor(tmp_path, images):
    with pytest.raises(
        InfeasibleError, match=r"memory<=1KB can't be met: the smallest network measures .*KB"
    ) as refused:
        run(tmp_path, images, "memory<=1KB")
    assert refused.value.exit_code == 3


def test_memory_is_read_only_where_it_is_limited():
    assert "memory" not in static_meters()
    assert "memory" not in static_meters(Budget.parse("8ms, 20MB"))
    assert set(static_meters(Budget.parse("memory<=60%@torch-cpu-1t"))) >= {"memory@torch-cpu-1t"}


def test_energy_is_refused_with_the_reason_of_its_source(tmp_path, images, monkeypatch):
    monkeypatch.setattr(bench, "find_source", lambda device: EnergySource("unavailable", "no counter on this moon"))
    with pytest.raises(BudgetError, match="can't limit energy on torch-cpu-1t: no counter on this moon; possible are"):
        run(tmp_path, images, "energy<=3mJ")


def test_the_names_of_qualities_are_those_of_the_meters():
    assert (*KINDS, "r2") == QUALITIES


FLOOR = {"quality_floor": 0.2, "repair_steps": 40}


def test_a_floor_is_certified_verified_and_counts_in_the_verdict(tmp_path, images):
    result = run(tmp_path, images, "params<=90%", **FLOOR)
    rundir = RunDir(tmp_path / "run")
    floor = rundir.certificate().floor
    assert result["met"]
    assert result["floor"] == floor.to_json(0.95)
    assert (floor.asked, floor.confidence) == (0.2, 0.5)
    assert floor.kept.value == pytest.approx(floor.after.value / floor.before.value)
    assert floor.kept.count == 52  # too little data: 10 kept aside for it, and the 42 chosen with
    assert "42 of them chosen with" in floor.examples
    again = verify(rundir.path, CNN)
    assert again["met"]
    assert again["floor"] == result["floor"]
    fields = rundir.read("certificate.json")
    fields["floor"]["asked"] = 1.0
    rundir.rung_in_use.write("certificate.json", fields)
    broken = verify(rundir.path, CNN)
    assert not broken["met"]
    assert broken["outcome"] == "measured under the quality floor"
    assert broken["final"] == again["final"]


def test_a_floor_asked_for_with_confidence_is_refused_where_the_value_alone_would_do(tmp_path, images):
    value = run(tmp_path / "value", images, "params<=90%", **FLOOR)
    assert value["met"]
    kept = value["floor"]["kept"]
    floor = {**FLOOR, "quality_floor": kept["value"] - kept["stderr"]}
    sure = run(tmp_path / "sure", images, "params<=90%", floor_confidence=0.95, **floor)
    assert not sure["met"]
    assert sure["outcome"] == "quality collapse"
    assert not (tmp_path / "sure" / "run" / "certificate.json").exists()
    with pytest.raises(ApportionError, match=r"floor confidence 0\.3"):
        FitConfig(model=CNN, budget="60%", floor_confidence=0.3)


@pytest.mark.parametrize(("later", "other"), [("floor_confidence", 0.95), ("size", 32)])
def test_a_run_from_before_there_was_a_setting_is_the_same_run(tmp_path, later, other):
    rundir, config = RunDir(tmp_path / "run"), FitConfig(model=CNN, budget="60%", quality_floor=0.98)
    now = rundir.start(config, "model", {})
    saved = rundir.read("run.json")
    del saved["config"][later]
    rundir.write("run.json", saved)
    assert rundir.config() == config
    assert rundir.start(config, "model", {}) == now
    with pytest.raises(ApportionError, match="other settings"):
        rundir.start(replace(config, **{later: other}), "model", {})


def test_a_network_is_fitted_exported_and_verified_at_the_size_that_was_asked_for(tmp_path):
    data = str(tmp_path / "pixels.safetensors")
    save_file({"0": torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))}, data)
    with pytest.raises(DataError, match=r"\[3, 8, 8\], the model takes \[3, 16, 16\]"):
        run(tmp_path / "own", data, "flops<=60%")
    result = run(tmp_path, data, "flops<=60%", size=8)
    assert result["met"]
    assert result["baseline"]["flops"]["value"] == FlopCount().read(load(CNN, size=8)).value
    assert verify(tmp_path / "run", CNN)["final"]["flops"] == result["final"]["flops"]
    export(tmp_path / "run", "torch-export", tmp_path / "out", CNN)
    assert torch.export.load(tmp_path / "out" / PROGRAM).module()(torch.zeros(1, 3, 8, 8))[0].shape == (1, 10)
    with pytest.raises(ApportionError, match="images of size 0"):
        run(tmp_path / "none", data, "flops<=60%", size=0)
    assert not (tmp_path / "none" / "run").exists()
