"""The commands about devices, as processes: measure, targets, calibrate and audit."""

from __future__ import annotations

import json

import pytest
from tests.pipeline.check import assert_one_line

from apportion.cost.profile import Profile
from apportion.device.runtimes import missing_packages
from apportion.device.target import find_target

CNN = "tests.factories:small_cnn"


@pytest.mark.parametrize("target", ["torch-cpu-1t", "ort-int8-cpu-1t"])
def test_measure_reads_every_quantity_or_says_why_not(apportion, target):
    if missing_packages(find_target(target)):
        pytest.skip(f"not installed: {missing_packages(find_target(target))}")
    told = apportion.json("measure", CNN, "--target", target, "--processes", 2, "--seconds", 0.5)
    assert told["exit"] == 0
    readings = told["readings"]
    assert readings["latency"]["value"] > 0
    assert readings["latency"]["p95"] >= readings["latency"]["value"] * 0.5
    assert readings["latency"]["low"] <= readings["latency"]["value"] <= readings["latency"]["high"]
    assert readings["params"]["value"] > 100_000
    if target.startswith("ort-int8"):  # a byte for each, and what the graph takes: the file that is opened
        assert readings["size"]["value"] < 2 * readings["params"]["value"]
        assert readings["size"]["provenance"] == "measured: int8.onnx"
    else:
        assert readings["size"]["value"] > 4 * readings["params"]["value"]
    conditions = told["conditions"]
    assert conditions["processes"] == 2
    assert conditions["wall_s"] > 0 < conditions["cpu_s"]
    assert (conditions["disturbed"] is None) == (told["disturbance"] is None) == conditions["tight"]
    for reading in readings.values():
        assert reading["provenance"]
        assert reading["value"] is not None or reading["provenance"].startswith("unavailable: ")


@pytest.mark.parametrize(
    ("factory", "kind", "options"),
    [
        ("infinite", "non-finite", ()),
        ("illegal", "died", ()),
        ("crashing", "died", ()),
        ("greedy_for_memory", "out of memory", ("--memory-limit", 1)),
        ("hanging", "hung", ("--time-limit", 4)),
    ],
)
def test_whatever_becomes_of_a_model_is_told_and_never_takes_the_command_down(apportion, factory, kind, options):
    told = apportion.json("measure", f"tests.factories:{factory}", "--processes", 1, *options)
    assert told["exit"] == 4
    assert told["failures"][f"tests.factories:{factory}"]["kind"] == kind
    readings = told["readings"]
    assert readings["latency"]["value"] is None
    assert readings["latency"]["provenance"].startswith(f"unavailable: {kind}: ")
    if kind == "non-finite":
        assert readings["flops"]["value"] > 0  # torch counts them all the same
    else:
        assert readings["flops"]["provenance"].startswith(f"unavailable: {kind}: ")
    if kind != "hung":  # which a slow machine may be with loading already
        assert readings["params"]["value"] == 20


def test_a_model_that_there_is_not_is_refused_in_one_line(told):
    done = told("measure", "no-such-model", "--json")
    assert done.returncode == 2
    assert "no model 'no-such-model'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "size", "part"),
    [
        ("vit-64", 96, "its own are 64x64"),
        (CNN, 0, "sides from 1 to 8192"),
        (CNN, "8by9", "such as 96 or"),
        ("tests.factories:small_linear", 16, "no images"),
    ],
)
@pytest.mark.parametrize("command", ["measure", "calibrate", "fit"])
def test_a_size_that_a_model_does_not_take_is_refused_in_one_line(told, command, model, size, part):
    more = {"measure": (), "calibrate": ("-o", "p.json"), "fit": ("--budget", "60%", "-o", "run")}[command]
    assert_one_line(told(command, model, "--size", size, *more, "--json"), 2, part)


@pytest.mark.slow
def test_targets_says_of_every_target_whether_it_works(apportion):
    told = apportion.json("targets")
    assert told["exit"] == 0
    found = {target["name"]: target for target in told["targets"]}
    assert found["torch-cpu-1t"]["available"]
    for target in found.values():
        assert target["why"]
        assert "\n" not in target["why"]
    assert set(told["energy"]) == {"cpu", "cuda"}


def test_audit_refuses_what_is_no_profile(told, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"hello": 1}))
    for name, part in (("x.json", "not a profile"), ("gone.json", "no profile")):
        done = told("audit", name, "--json")
        assert done.returncode == 2
        assert part in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_profile_is_made_audited_corrected_and_planned_with(apportion, told, tmp_path, images):
    made = apportion.json("calibrate", CNN, "--target", "torch-cpu-1t", "-o", "p.json")
    assert made["exit"] == 0
    assert made["baseline"]["value"] > made["floor_ms"] > 0
    assert all(price >= 0 for price in made["prices_ms"].values())
    profile = Profile.load(tmp_path / "p.json")
    assert made["conditions"] == profile.conditions
    assert profile.conditions["disturbed"] in (None, "busy", "noisy")
    assert profile.cost.monotone
    assert profile.cost.bound.finite
    found = apportion.json("audit", "p.json", "--model", CNN, "--count", 8, "--plot", "plot.html")
    assert found["exit"] == 0
    assert found["count"] == 8
    assert found["conditions"]["processes"] >= 4
    assert 0 <= found["coverage"] <= 1
    assert found["baseline_then"] == made["baseline"]
    assert found["baseline_ratio"] == pytest.approx(found["baseline_now"]["value"] / made["baseline"]["value"])
    assert found["absolute"]["count"] == 8
    assert found["machine_differs"] is None
    assert "<html" in (tmp_path / "plot.html").read_text()[:200]
    options = ("--count", 8, "--recalibrate", "affine", "-o", "today.json")
    corrected = apportion.json("audit", "p.json", "--model", CNN, *options)
    assert corrected["count"] == 4  # judged on the half that did not correct it
    assert "more configurations" in corrected["correction"]
    today = json.loads((tmp_path / "today.json").read_text())
    assert today["cost"]["recalibration"]["kind"] == "affine"
    assert today["baseline"] == corrected["baseline_now"]
    asked = ("--budget", "latency<=80%@torch-cpu-1t", "--profile", "today.json", "--rules", "prune")
    result = apportion.json("fit", CNN, *asked, "--data", images, "-o", "run")
    assert result["outcome"] in ("met", "budget violation")
    for args, part in (
        (("audit", "p.json"), "--model"),
        (("audit", "p.json", "--model", CNN, "--seed", 0), "another seed"),
        (("audit", "p.json", "--model", CNN, "--recalibrate", "magic", "-o", "x.json"), "affine, isotonic, margin"),
        (
            ("fit", CNN, "--budget", "8ms@torch-cpu-2t", "--profile", "today.json", "--data", images, "-o", "other"),
            "is about torch-cpu-1t",
        ),
    ):
        refused = told(*args, "--json")
        assert refused.returncode == 2
        assert part in refused.stderr
