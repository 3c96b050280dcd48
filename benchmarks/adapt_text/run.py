"""Does budgeted few-shot adaptation beat its baselines at equal measured latency, and do its budgets hold?

    .venv/bin/python benchmarks/adapt_text/run.py [--suite text] [--measure] [--trained FILE]

Methods are trained and judged by ``train.py`` on a CUDA machine, which leaves accuracies and the sizes chosen for every
target and budget (``results/trained.jsonl.gz``). With ``--measure`` these sizes are measured here, beside the whole
network, in processes of their own (``results/measured.json``). Without, both are read and the tables printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from apportion.cost.parts import Parts
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.probe import working_target
from apportion.device.target import machine
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.numerics.cvar import cvar

SUITES = {"text": ("minilm", "adapt_text"), "vision": ("vit-64", "adapt_vision")}
TIGHT = 0.3  # budgets up to here are the tight half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--measure", action="store_true", help="measure the sizes again")
    parser.add_argument("--trained", type=Path, help="take over what train.py left")
    args = parser.parse_args()
    began = time.perf_counter()
    model, folder = SUITES[args.suite]
    results = Path(__file__).parents[1] / folder / "results"
    results.mkdir(exist_ok=True)
    trained = results / "trained.jsonl.gz"
    if args.trained is not None:
        trained.write_bytes(gzip.compress(args.trained.read_bytes(), mtime=0))
    methods = {row["method"]: row for row in map(json.loads, gzip.decompress(trained.read_bytes()).splitlines())}
    measured_path = results / "measured.json"
    if args.measure:
        measured_path.write_text(json.dumps(measure_all(model, methods), indent=1) + "\n")
    measured = json.loads(measured_path.read_text())
    figures = print_tables(methods, measured)
    summary = {
        "figures": figures,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "machine": machine(),
        "trained_on": next(iter(methods.values()))["device"],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.perf_counter() - began, 1),
    }
    (results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n" + json.dumps(figures, indent=1))


def measure_all(model: str, methods: dict) -> dict:
    """Latency of every size chosen, as a share of the whole network's in the same process."""
    network = load(model, tokens=32)
    orders = [method["orders"] for method in methods.values()]
    assert all(order == orders[0] for order in orders)  # all start from the same importance, so blocks go alike
    parts = Parts.of(network, Partition.of(network).ordered(orders[0]))
    names = [module.name for module in parts.partition]
    found = {}
    for target in dict.fromkeys(row["target"] for row in methods["ours"]["rows"] if row["target"] != "whole"):
        wanted = {
            tuple(sizes): dict(zip(names, sizes, strict=True))
            for method in methods.values()
            for row in method["rows"]
            if row["target"] == target
            for sizes in row["sizes"]
        }
        swept = sweep(network, parts, list(wanted.values()), working_target(target), Shape(batch=1, tokens=32))
        keys = list(wanted)
        found[target] = {
            " ".join(map(str, keys[index])): [
                round(sample.latency_ms / swept.baseline.value, 4),
                round((sample.stderr_ms or 0.0) / swept.baseline.value, 4),
            ]
            for index, sample in swept.samples.items()
        }
        print(f"{target}: {len(swept.samples)} of {len(wanted)} measured", flush=True)
    return found


def print_tables(methods: dict, measured: dict) -> dict[str, float]:
    """The tables of the README; returns the figures."""
    targets = list(measured)
    budgets = [row["rho"] for row in methods["ours"]["rows"] if row["target"] == targets[0]]
    count = min(len(method["rows"][0]["accuracy"]) for method in methods.values())  # the episodes that all have judged
    sides = list(dict.fromkeys(methods["ours"]["rows"][0]["side"][:count]))
    cells: dict[tuple, np.ndarray] = {}
    latency: dict[tuple, np.ndarray] = {}
    for name, method in methods.items():
        for row in method["rows"]:
            if row["target"] == "whole":
                continue
            for side in sides:
                mine = np.array(row["side"][:count]) == side
                cells[name, row["target"], row["rho"], side] = np.array(row["accuracy"][:count])[mine]
            ratios = [measured[row["target"]][" ".join(map(str, sizes))][0] for sizes in row["sizes"]]
            latency[name, row["target"], row["rho"]] = np.array([ratios[i] for i in row["chosen"][:count]])
    num = {side: len(cells["ours", targets[0], budgets[0], side]) for side in sides}
    for side in sides:
        print(f"\n{side}, {num[side]} episodes, mean of {len(targets)} targets, %; budgets are shares of the whole\n")
        print("| method | steps | " + " | ".join(f"{rho:g}" for rho in budgets) + " | worst tenth |")
        print("|---" * (len(budgets) + 3) + "|")
        for name, method in methods.items():
            means = [np.mean([cells[name, t, rho, side].mean() for t in targets]) for rho in budgets]
            tail = np.mean(
                [1 - cvar((1 - cells[name, t, rho, side]).tolist(), 0.9) for t in targets for rho in budgets]
            )
            print(
                f"| {name} | {method['steps']} | "
                + " | ".join(f"{100 * m:.1f}" for m in means)
                + f" | {100 * tail:.1f} |"
            )
    print("\nfeasibility and utilisation of ours, as measured\n")
    print("| target | " + " | ".join(f"{rho:g}" for rho in budgets) + " | held |")
    print("|---" * (len(budgets) + 2) + "|")
    feasible, used = [], []
    for target in targets:
        ratios = [latency["ours", target, rho] for rho in budgets]
        held = [float((ratio <= rho).mean()) for ratio, rho in zip(ratios, budgets, strict=True)]
        feasible += held
        used += [float((ratio / rho).mean()) for ratio, rho in zip(ratios, budgets, strict=True)]
        print(
            f"| {target} | " + " | ".join(f"{r.mean() / b:.0%}" for r, b in zip(ratios, budgets, strict=True)), end=""
        )
        print(f" | {np.mean(held):.0%} |")
    others = [name for name in methods if name not in ("ours", "ours-cvar")]
    wins, losses, num_tight, num_all = 0, 0, 0, 0
    for target in targets:
        for rho in budgets:
            for side in sides:
                ours = cells["ours", target, rho, side]
                ahead = [float((ours - cells[name, target, rho, side]).mean()) for name in others]
                noise = [
                    1.96 * float((ours - cells[n, target, rho, side]).std(ddof=1) / len(ours) ** 0.5) for n in others
                ]
                num_all += 1
                losses += any(a < -n for a, n in zip(ahead, noise, strict=True))
                if rho <= TIGHT:
                    num_tight += 1
                    wins += min(ahead) > 0
    area = {
        name: np.mean(
            [
                np.trapezoid([cells[name, t, b, s].mean() for b in budgets], np.log(budgets))
                for t in targets
                for s in sides
            ]
        )
        for name in methods
    }
    tails = {
        name: np.mean(
            [1 - cvar((1 - cells[name, t, b, s]).tolist(), 0.9) for t in targets for b in budgets for s in sides]
        )
        for name in methods
    }
    return {
        "targets": len(targets),
        "episodes": count,
        "feasibility": round(float(np.mean(feasible)), 4),
        "utilisation": round(float(np.mean(used)), 4),
        "frontier_wins_tight": round(wins / num_tight, 4),
        "frontier_losses": round(losses / num_all, 4),
        "area_ratio_best_baseline": round(float(area["ours"] / max(area[n] for n in others)), 4),
        "cvar_gain": round(float(tails["ours"] - max(tails[n] for n in others)), 4),
    }


if __name__ == "__main__":
    main()
