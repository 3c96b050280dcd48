"""The training benchmark as a CUDA machine runs it: with torch, transformers and scipy alone; here on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import argparse, json, runpy, sys

MISSING = {"PIL", "clarabel", "cvxpy", "nncf", "onnx", "onnxruntime", "openvino", "optuna", "plotly", "rich", "sklearn",
           "torch_pruning", "torchao", "typer"}

sys.modules.update(dict.fromkeys(MISSING))
bench = runpy.run_path("benchmarks/iso_cost_train/run.py")
from apportion.device.measure import Session, Timing
from apportion.methods.search import clock, run

def measure(candidates, target, shape, *, processes=1, **options):
    def told_ms(ref):
        blocks = json.load(open(ref + "/config.json"))["blocks"]
        return 0.1 + sum(1e-3 * block["width"] * (1 + block["expand"]) for block in blocks)
    timings = {one.name: (Timing(told_ms(one.ref), 1e-4, 0.0, 1.0, 100),) * processes for one in candidates}
    return Session(timings, {"processes": processes, "tight": True})

clock.measure = run.measure = measure
bench["SIZES"]["cuda"] |= {"image_size": 8, "num_train": 200, "steps": 2, "final_steps": 2, "max_evaluations": 6}
bench["CALIBRATION"]["cuda"] = 4
config = bench["config_of"]("cuda", "torch-cpu-1t", argparse.Namespace(data="digits", device="cpu"))
print(json.dumps(bench["one_target"](config, 2, bench["Here"]())))
"""


@pytest.mark.slow
def test_the_training_benchmark_needs_nothing_that_a_cuda_machine_lacks():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["in_band"] is True
    assert row["evaluations"] <= 6
    assert row["target"] == "torch-cpu-1t"
