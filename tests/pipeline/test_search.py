"""A search end to end on a small budget: a certified network in its folder, verified in a fresh process, resumable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from tests.pipeline.check import assert_one_line

from apportion.tasks.domain import data_root

# the noise and the grid are given, so that only the search itself is measured; test_run.py has them found
OPTIONS = ("--evaluations", "8", "--sigma", "5", "--align", "8", "--steps", "4", "--final-steps", "6")
OPTIONS += ("--image-size", "8", "--tolerance", "30%")


def apportion(*args):
    return subprocess.run(
        [sys.executable, "-m", "apportion", *map(str, args)], capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "run"
    done = apportion("search", "mobile-cnn", *OPTIONS, "-o", folder, "--json")
    assert done.returncode in (0, 4), done.stderr
    return folder, json.loads(done.stdout), done.returncode


@pytest.mark.slow
def test_a_search_leaves_network_trace_and_result(run):
    folder, result, code = run
    assert (code == 0) == result["met"]
    assert result["num_evaluations"] <= 8
    assert (folder / "model" / "model.safetensors").is_file()
    trace = json.loads((folder / "trace.json").read_text())
    assert trace
    assert all(step["arms"] for step in trace)
    low, high = result["band"]["latency@torch-cpu-1t"]
    assert low < result["anchor"]["costs"]["latency@torch-cpu-1t"]["value"] < high
    assert all(width % 8 == 0 for name, width in result["arch"].items() if name.endswith(".width"))


@pytest.mark.slow
def test_a_finished_search_is_returned_as_it_is_and_another_is_refused(told, run):
    folder, result, _ = run
    again = told("search", "mobile-cnn", *OPTIONS, "-o", folder, "--json")
    assert json.loads(again.stdout) == result
    assert_one_line(told("search", "mobile-cnn", *OPTIONS, "--seed", 7, "-o", folder, "--json"), 2, "other settings")


@pytest.mark.slow
def test_verify_measures_again_and_refuses_another_network(told, run, tmp_path):
    folder, result, _ = run
    if not result["met"]:
        pytest.skip("the clock disagreed on this machine; nothing was certified")
    done = apportion("verify", folder, "--json")
    verdict = json.loads(done.stdout)
    assert done.returncode == (0 if verdict["met"] else 4)
    assert set(verdict["final"]) == {"latency@torch-cpu-1t"}
    forged = tmp_path / "forged"
    shutil.copytree(folder, forged)
    shutil.rmtree(forged / "model")
    shutil.copytree(forged / "anchor", forged / "model")
    if (folder / "model/model.safetensors").read_bytes() != (folder / "anchor/model.safetensors").read_bytes():
        assert_one_line(told("verify", forged), 2, "not the network that was certified")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("resnet",), "possible are mobile-cnn, small-encoder, nasbench201"),
        pytest.param(
            ("nasbench201",),
            "can't be built",
            marks=pytest.mark.skipif(not (data_root() / "nas").is_dir(), reason="no NAS tables; set APPORTION_DATA"),
        ),
        (("mobile-cnn", "--tolerance", "0%"), "between 0 and 1"),
        (("mobile-cnn", "--tolerance", "much"), "is no share"),
        (("mobile-cnn", "--confidence", "100%"), "between 0 and 1"),
        (("mobile-cnn", "--epsilon", "0"), "above 0 that matters"),
        (("mobile-cnn", "--rule", "best"), "lucb, elimination, uniform"),
        (("mobile-cnn", "--target", "toaster"), "unknown target"),
        (("mobile-cnn", "--data", "no-such"), "no domain"),
        (("mobile-cnn", "--workers", "0"), "at least 1"),
        (("mobile-cnn", "--budget", "5 parsecs"), "parsecs"),
        (("mobile-cnn", "--anchor", "no-such.json"), "can't read an architecture"),
        (("mobile-cnn", "--evaluations", "0"), "at least 1"),
        (("mobile-cnn", "--anchor", "cheap"), "cheap"),
        (("mobile-cnn", "--anchor", "0%"), "more than 0%"),
        (("mobile-cnn", "--anchor", "900%"), "at most 400%"),
        (("mobile-cnn", "--anchor", "80%", "--anchor", "80%"), "give each once"),
        (("mobile-cnn", "--anchor", "80%", "--anchor", "90%", "--budget", "1ms"), "anchored at one of them"),
        (("mobile-cnn", "--utility", "beauty"), "accuracy, robust, worst-class"),
        (("mobile-cnn", "--utility", "robust", "--utility", "robust"), "each once"),
        (("mobile-cnn", "--sigma", "-1"), "above 0"),
        (("mobile-cnn", "--align", "0"), "at least 1"),
        (("mobile-cnn", "--image-size", "0"), "at least 4"),
        (("small-encoder", "--image-size", "7"), "no architecture for images of 7 pixels"),
    ],
)
def test_mistakes_are_one_line(told, args, part, tmp_path):
    assert_one_line(told("search", *args, "-o", tmp_path / "run"), 2, part)
    assert not (tmp_path / "run").exists()
