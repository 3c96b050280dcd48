"""Does a gain found at equal cost by short trainings stay after longer ones, and is the result in the band?

    .venv/bin/python benchmarks/iso_cost_train/run.py [--quick] [--device cuda --targets torch-cuda,...]

A real search per target: mobile CNN blocks on Fashion-MNIST images of 16 × 16 pixels, every candidate measured on the
target beside the anchor. Afterwards anchor and result are evaluated anew, by as many fresh short trainings as long
ones, so that neither gain is one that chance had selected. Rows are saved target by target (``results/cpu``), so a
stopped run goes on; delete one to measure it again. On a CUDA machine the same script searches on 28 × 28 pixels with
longer trainings; it needs torch, transformers, safetensors, numpy and scipy.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apportion.core.knob import Setting
from apportion.device.probe import working_target
from apportion.device.target import machine
from apportion.methods.search.folder import SearchRunConfig
from apportion.methods.search.ground import block_space, training_proxy
from apportion.methods.search.proxy import FULL, Request
from apportion.methods.search.run import search
from apportion.methods.search.utilities import accuracy

HERE = Path(__file__).parent
TARGETS = ("torch-cpu-1t", "ort-cpu-1t", "openvino-cpu-1t")
FRESH = 1000  # replicates that no search has used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one target and fewer trainings")
    parser.add_argument("--device", default="cpu", help="where to train")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--data", default="fashion_mnist")
    args = parser.parse_args()
    began, commit = time.perf_counter(), _commit()
    targets = args.targets.split(",")[:1] if args.quick else args.targets.split(",")
    large = args.device != "cpu"
    kind = "quick" if args.quick else "cuda" if large else "cpu"
    rows = []
    for name in targets:
        path = HERE / "results" / kind / f"{name}.json"
        if not path.is_file():
            row = one_target(name, args, large)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row, indent=1) + "\n")
        rows.append(json.loads(path.read_text()))
    print("\n| target | anchor, ms | found, ms | in band | short gain | long gain | long: anchor, found | claim |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        claim = "none" if row["epsilon"] is None else f"within {row['epsilon']:.1f}"
        gains = [f"{row[f'{kind}_gain']:+.2f} ± {row[f'{kind}_stderr']:.2f}" for kind in ("short", "long")]
        print(
            f"| {row['target']} | {row['anchor_ms']:.3f} | {row['found_ms']:.3f} | {'yes' if row['in_band'] else 'no'} "
            f"| {gains[0]} | {gains[1]} | {row['anchor_long']:.2f} %, {row['found_long']:.2f} % | {claim} |"
        )
    short, long = (float(np.mean([row[f"{kind}_gain"] for row in rows])) for kind in ("short", "long"))
    figures = {
        "targets": len(rows),
        "retained_gain": round(long / short, 4) if short > 0 else None,
        "in_band_share": round(float(np.mean([row["in_band"] for row in rows])), 4),
        "short_gain_points": round(short, 4),
        "long_gain_points": round(long, 4),
    }
    print(json.dumps(figures, indent=1))
    summary = {
        "figures": figures,
        "rows": rows,
        "commit": commit,
        "machine": machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.perf_counter() - began, 1),
        "quick": args.quick,
    }
    (HERE / "results").mkdir(exist_ok=True)
    name = "summary_quick.json" if args.quick else "summary_cuda.json" if large else "summary.json"
    (HERE / "results" / name).write_text(json.dumps(summary, indent=1) + "\n")


def one_target(name: str, args: argparse.Namespace, large: bool) -> dict[str, Any]:
    """A search on one target, and what fresh trainings make of its result."""
    config = SearchRunConfig(
        space="mobile-cnn",
        targets=(name,),
        data=args.data,
        tolerance=0.05,
        epsilon=3.0,
        image_size=28 if large else 16,
        num_train=5000 if large else 3000,
        steps=400 if large else 60,
        final_steps=4000 if large else 200,
        max_evaluations=400 if large else 16 if args.quick else 40,
        align=8,
        calibration=24 if large else 8,
        pilot=4,
        train_on=args.device,
    )
    with tempfile.TemporaryDirectory() as scratch:
        result = search(config, Path(scratch) / "run")
    space = block_space(config, [working_target(name)])
    proxy = training_proxy(config, space)
    num = 8 if large else 2 if args.quick else 4
    pairs = {"anchor": Setting(result["anchor"]["arch"]), "found": Setting(result["arch"])}
    values: dict[str, np.ndarray] = {}
    for who, arch in pairs.items():
        short = [proxy.evaluate(Request(arch, FULL, FRESH + i))[FULL] for i in range(num)]
        long = []
        for i in range(num):
            network = proxy.train(Request(arch, "long", FRESH + i), 2 * config.final_steps)
            long.append(accuracy(network.module, proxy.images, "report"))
        values |= {f"{who}_short": np.array(short), f"{who}_long": np.array(long)}
    key = f"latency@{name}"

    def gain(kind: str) -> tuple[float, float]:
        found, anchor = values[f"found_{kind}"], values[f"anchor_{kind}"]
        spread = (found.var(ddof=1) / num + anchor.var(ddof=1) / num) ** 0.5
        return float(found.mean() - anchor.mean()), float(spread)

    row = {
        "target": name,
        "anchor_ms": result["anchor"]["costs"][key]["value"],
        "found_ms": result["final"][key]["value"],
        "in_band": bool(result["in_band"]),
        "met": bool(result["met"]),
        "short_gain": gain("short")[0],
        "short_stderr": gain("short")[1],
        "long_gain": gain("long")[0],
        "long_stderr": gain("long")[1],
        "anchor_long": float(values["anchor_long"].mean()),
        "found_long": float(values["found_long"].mean()),
        "epsilon": result["claim"]["epsilon"],
        "sigma": result["sigma"],
        "evaluations": result["num_evaluations"],
        "measured": result["num_measured"],
        "changed": {k: v for k, v in result["arch"].items() if v != result["anchor"]["arch"][k]},
        "search_seconds": round(result["seconds"], 1),
    }
    print(f"{name}: {row['search_seconds']:.0f} s, changed {row['changed']}", flush=True)
    return row


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
