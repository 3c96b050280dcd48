"""Does a gain found at equal cost by short trainings stay after longer ones, and is the result in the band?

    .venv/bin/python benchmarks/iso_cost_train/run.py [--quick] [--device cuda --targets torch-cuda,... --workers 8]

A real search per target: mobile CNN blocks on Fashion-MNIST images of 16 × 16 pixels, every candidate measured on the
target beside the anchor. Afterwards anchor and result are evaluated anew, by as many fresh short trainings as long
ones, so that neither gain is one that chance had selected. The command with its defaults is timed too, up to its
verified certificate. Rows are saved one by one (``results/cpu``), so a stopped run goes on; delete one to measure it
again. On a CUDA machine the same script searches on 28 × 28 pixels with longer trainings; it needs torch, transformers,
numpy, scipy and scikit-learn there, nothing else, and takes the rest of apportion from ``src``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
WORK = HERE.parents[1] / "build" / "iso_cost_train"
sys.path.insert(0, str(HERE.parents[1] / "src"))

from apportion.core.knob import Setting  # noqa: E402
from apportion.device.probe import working_target  # noqa: E402
from apportion.methods.search.folder import SearchRunConfig  # noqa: E402
from apportion.methods.search.ground import block_space, training_proxy  # noqa: E402
from apportion.methods.search.proxy import FULL, Executor, Here, Processes, Request  # noqa: E402
from apportion.methods.search.run import search  # noqa: E402
from apportion.methods.search.utilities import accuracy  # noqa: E402
from apportion.testing.summary import Summary  # noqa: E402

TARGETS = ("torch-cpu-1t", "ort-cpu-1t", "openvino-cpu-1t")
FRESH = 1000  # replicates that no search has used
SIZES: dict[str, dict[str, Any]] = {
    "quick": {"image_size": 16, "num_train": 3000, "steps": 60, "final_steps": 200, "max_evaluations": 16},
    "cpu": {"image_size": 16, "num_train": 3000, "steps": 60, "final_steps": 200, "max_evaluations": 40},
    "cuda": {"image_size": 28, "num_train": 5000, "steps": 150, "final_steps": 600, "max_evaluations": 100},
}
NUM_FRESH = {"quick": 2, "cpu": 4, "cuda": 4}
CALIBRATION = {"quick": 8, "cpu": 8, "cuda": 24}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one target and fewer trainings")
    parser.add_argument("--device", default="cpu", help="where to train")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--data", default="fashion_mnist")
    parser.add_argument("--workers", type=int, default=1, help="processes that train, where a GPU can feed them")
    args = parser.parse_args()
    summary = Summary(HERE)
    kind = "quick" if args.quick else "cpu" if args.device == "cpu" else "cuda"
    targets = args.targets.split(",")[:1] if args.quick else args.targets.split(",")
    executor: Executor = Processes(args.workers) if args.workers > 1 else Here()
    rows = [
        saved(summary, kind, name, lambda name=name: one_target(config_of(kind, name, args), NUM_FRESH[kind], executor))
        for name in targets
    ]
    if isinstance(executor, Processes):
        executor.close()
    show(rows)
    short, long = (float(np.mean([row[f"{length}_gain"] for row in rows])) for length in ("short", "long"))
    figures = {
        "targets": len(rows),
        "retained_gain": round(long / short, 4) if short > 0 else None,
        "in_band_share": round(float(np.mean([row["in_band"] for row in rows])), 4),
        "short_gain_points": round(short, 4),
        "long_gain_points": round(long, 4),
    }
    more: dict[str, Any] = {"rows": rows}
    if kind == "cpu":
        demo = saved(summary, kind, "demo", the_command)
        print(
            f"\n{demo['command']}: {demo['search_seconds']:.0f} s with {demo['num_evaluations']} trainings, exit "
            f"{demo['search_exit']}; apportion verify: {demo['verify_seconds']:.0f} s, exit {demo['verify_exit']}\n"
        )
        figures |= {"demo_seconds": demo["search_seconds"], "demo_verified": int(demo["verify_exit"] == 0)}
        more["demo"] = demo
    print(json.dumps(figures, indent=1))
    summary.write(figures, name="summary_cuda" if kind == "cuda" else "summary", quick=args.quick, **more)


def saved(summary: Summary, kind: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row from its file, made first where there is none; it keeps the commit that it was made at."""
    path = HERE / "results" / kind / f"{name}.json"
    if not path.is_file():
        row = make() | {"commit": summary.commit}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")
    return json.loads(path.read_text())


def config_of(kind: str, name: str, args: argparse.Namespace) -> SearchRunConfig:
    return SearchRunConfig(
        space="mobile-cnn",
        targets=(name,),
        data=args.data,
        tolerance=0.05,
        epsilon=3.0,
        align=8,
        calibration=CALIBRATION[kind],
        pilot=4,
        train_on=args.device,
        **SIZES[kind],
    )


class Stages:
    """Says when a stage begins."""

    def stage(self, name: str) -> contextlib.AbstractContextManager[Callable[[float], None]]:
        print(f"{time.strftime('%X')} {name}", flush=True)
        return contextlib.nullcontext(lambda _share: None)


def one_target(config: SearchRunConfig, num: int, executor: Executor) -> dict[str, Any]:
    """A search on one target, and what fresh trainings make of its result, ``num`` of every kind."""
    (name,) = config.targets
    run = WORK / hashlib.sha256(repr(config).encode()).hexdigest()[:12]  # a stopped one goes on
    result = search(config, run, Stages(), executor)
    proxy = training_proxy(config, block_space(config, [working_target(name)]))
    pairs = {"anchor": Setting(result["anchor"]["arch"]), "found": Setting(result["arch"])}
    values: dict[str, np.ndarray] = {}
    for who, arch in pairs.items():
        requests = [Request(arch, FULL, FRESH + i) for i in range(num)]
        short = [values[FULL] for values in executor.map(proxy, requests)]
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
    shutil.rmtree(run)
    return row


def the_command() -> dict[str, Any]:
    """``apportion search`` with its defaults on two cores, as a user types it, and ``apportion verify`` after it."""
    asked = ["search", "mobile-cnn", "--workers", "2"]
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        found = subprocess.run([sys.executable, "-m", "apportion", *asked, "-o", f"{scratch}/run"])
        searched = time.perf_counter()
        checked = subprocess.run([sys.executable, "-m", "apportion", "verify", f"{scratch}/run"])
        result = json.loads(Path(scratch, "run", "result.json").read_text())
    return {
        "command": f"apportion {' '.join(asked)}",
        "search_seconds": round(searched - began, 1),
        "search_exit": found.returncode,
        "verify_seconds": round(time.perf_counter() - searched, 1),
        "verify_exit": checked.returncode,
        "num_evaluations": result["num_evaluations"],
        "num_measured": result["num_measured"],
        "claim": result["claim"],
        "in_band": result["in_band"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    print("\n| target | anchor, ms | found, ms | in band | short gain | long gain | long: anchor, found | claim |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        claim = "none" if row["epsilon"] is None else f"within {row['epsilon']:.1f}"
        gains = [f"{row[f'{kind}_gain']:+.2f} ± {row[f'{kind}_stderr']:.2f}" for kind in ("short", "long")]
        print(
            f"| {row['target']} | {row['anchor_ms']:.3f} | {row['found_ms']:.3f} | {'yes' if row['in_band'] else 'no'} "
            f"| {gains[0]} | {gains[1]} | {row['anchor_long']:.2f} %, {row['found_long']:.2f} % | {claim} |"
        )


if __name__ == "__main__":
    main()
