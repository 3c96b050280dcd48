"""How right are cost models, and do their bounds hold? Against predictors scaled by FLOPs or parameters, and a table.

    .venv/bin/python benchmarks/cost_model/run.py [--quick]

For every network and target, configurations are drawn and measured; the first are fitted to, the next calibrate the
bound, the last are held out. All predictors see the same measurements. Samples measured on a CUDA machine by ``gpu.py``
(``results/cuda``) are fitted and audited here too. Results are saved after every pair, so a stopped run keeps them and
goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from apportion.cost.audit import audit
from apportion.cost.calibrate import anchor_sizes, whole_sample
from apportion.cost.draw import draw_many
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.probe import working_target
from apportion.device.target import machine
from apportion.models import Partition, load
from apportion.numerics.stats import quantile

HERE = Path(__file__).parent
sys.path.insert(
    0, str(HERE.parents[1])
)  # the networks are named as benchmarks.cost_model.networks, here and in children
NETWORKS = ("minilm_like", "vit_like", "resnet_like")
TARGETS = ("torch-cpu-1t", "ort-cpu-1t", "openvino-cpu-1t", "openvino-int8-cpu-1t")
NUM_FIT, NUM_BOUND, NUM_HELD_OUT = 24, 22, 24
BUCKETS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one network on two targets")
    parser.add_argument(
        "--cuda", action="store_true", help="only fit and audit the saved CUDA samples, measuring nothing"
    )
    args = parser.parse_args()
    quick = args.quick
    if args.cuda:
        saved = sorted((HERE / "results" / "cuda").glob("*.json"))
        print_tables({}, {name: row for path in saved for name, row in audit_saved(path).items()})
        return
    began = time.perf_counter()
    rows_path = HERE / "results" / ("rows_quick.json" if quick else "rows.json")
    rows: dict[str, dict] = json.loads(rows_path.read_text()) if rows_path.is_file() else {}
    for target in TARGETS[1:3] if quick else TARGETS:
        for network in NETWORKS[:1] if quick else NETWORKS:
            if f"{network} {target}" not in rows:
                rows[f"{network} {target}"] = measure_pair(network, target)
                rows_path.write_text(json.dumps(rows, indent=1) + "\n")
    gpu = {}
    for path in [] if quick else sorted((HERE / "results" / "cuda").glob("*.json")):
        gpu.update(audit_saved(path))
    print_tables(rows, gpu)
    write_summary(rows, gpu, quick, time.perf_counter() - began)


def measure_pair(name: str, target: str) -> dict:
    began = time.perf_counter()
    network = load(f"benchmarks.cost_model.networks:{name}")
    parts = Parts.of(network, Partition.of(network))
    anchors = list(anchor_sizes(parts.partition).values())
    drawn = draw_many(parts, NUM_FIT + NUM_BOUND + NUM_HELD_OUT, seed=0)
    where, shape = working_target(target), Shape()
    calibrating = [*anchors, *drawn[: NUM_FIT + NUM_BOUND]]
    swept = sweep(network, parts, calibrating, where, shape)
    calibration_s = time.perf_counter() - began
    unseen = sweep(network, parts, drawn[NUM_FIT + NUM_BOUND :], where, shape)
    scale = swept.baseline.value / unseen.baseline.value
    to_fit = [whole_sample(parts, swept), *(s for i, s in swept.samples.items() if i < len(anchors) + NUM_FIT)]
    to_bound = [s for i, s in swept.samples.items() if i >= len(anchors) + NUM_FIT]
    held_out = [Sample(s.shares, s.latency_ms * scale, s.stderr_ms * scale) for s in unseen.samples.values()]
    row = judge(to_fit, to_bound, held_out, parts, swept.baseline.value)
    row |= {"calibration_s": round(calibration_s, 1), "failures": len(swept.failures) + len(unseen.failures)}
    print(f"{name} on {target}: {row}", flush=True)
    return row


def audit_saved(path: Path) -> dict[str, dict]:
    saved = json.loads(path.read_text())
    samples = [Sample.from_json(sample) for sample in saved["samples"]]
    whole = Sample(dict.fromkeys(saved["signature_of"], 1.0), saved["baseline"]["value"], saved["baseline"]["stderr"])
    held = len(samples) - NUM_BOUND - max(12, len(samples) // 3)
    to_fit, to_bound, rest = [whole, *samples[:held]], samples[held : held + NUM_BOUND], samples[held + NUM_BOUND :]
    network = load(f"benchmarks.cost_model.networks:{saved['network'].removesuffix('_batched')}")
    parts = Parts.of(network, Partition.of(network))
    row = judge(to_fit, to_bound, rest, parts, whole.latency_ms)
    row |= {"calibration_s": saved["seconds"], "failures": len(saved["failures"]), "device": saved["device"]}
    return {f"{saved['network']} {saved['target']}": row}


def judge(to_fit, to_bound, held_out, parts: Parts, baseline_ms: float) -> dict:
    signature_of = parts.signature_of
    model = CostModel.fit(to_fit, signature_of).bounded(to_bound)
    found = audit(model, held_out)
    peers = {
        "flops": lambda shares: baseline_ms * _share(shares, {part.name: part.flops for part in parts.parts}),
        "params": lambda shares: baseline_ms * _share(shares, {part.name: part.params for part in parts.parts}),
        "table": fit_table(to_fit, signature_of),
    }
    row = {
        "median": found.median_rel_error,
        "p95": found.p95_rel_error,
        "coverage": found.coverage,
        "looseness": found.looseness,
        "spearman": found.spearman,
        "noise": quantile([s.stderr_ms / s.latency_ms for s in held_out], 0.5),
        "held_out": len(held_out),
    }
    for name, predict in peers.items():
        errors = [abs(predict(s.shares) / s.latency_ms - 1) for s in held_out]
        row[f"{name}_median"], row[f"{name}_p95"] = quantile(errors, 0.5), quantile(errors, 0.95)
    return {key: value if isinstance(value, int) else round(value, 4) for key, value in row.items()}


def _share(shares, weights) -> float:
    return sum(weights[name] * shares[name] for name in weights) / sum(weights.values())


def fit_table(samples, signature_of):
    """A plain table: a latency for every signature and bucket of share, summed, by least squares."""
    signatures = sorted(set(signature_of.values()))
    columns = {(s, b): i for i, (s, b) in enumerate((s, b) for s in signatures for b in range(len(BUCKETS)))}

    def features(shares):
        row = np.zeros(len(columns))
        for part, share in shares.items():
            row[columns[signature_of[part], int(np.abs(BUCKETS - share).argmin())]] += 1
        return row

    design = np.array([features(s.shares) for s in samples])
    latency = np.array([s.latency_ms for s in samples])
    ridge = 1e-3 * np.eye(len(columns))
    table = np.linalg.solve(design.T @ design + ridge, design.T @ latency)
    return lambda shares: float(features(shares) @ table)


def print_tables(rows: dict, gpu: dict) -> None:
    print("\n| network, target | median error | p95 | bound (95 %) held | looseness | FLOPs p95 | table p95 | noise |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in {**rows, **gpu}.items():
        print(
            f"| {name} | {row['median']:.1%} | {row['p95']:.1%} | {row['coverage']:.0%} of {row['held_out']} | "
            f"{row['looseness']:.1%} | {row['flops_p95']:.0%} | {row['table_p95']:.0%} | {row['noise']:.1%} |"
        )


def write_summary(rows: dict, gpu: dict, quick: bool, seconds: float) -> None:
    both = [*rows.values(), *gpu.values()]
    held = sum(row["held_out"] for row in both)
    figures = {
        "targets": len({name.split()[1] for name in {**rows, **gpu}}),
        "median_rel_error": quantile([row["median"] for row in both], 0.5),
        "p95_rel_error": quantile([row["p95"] for row in both], 0.5),
        "p95_rel_error_max": max(row["p95"] for row in both),
        "coverage": sum(row["coverage"] * row["held_out"] for row in both) / held,
        "looseness": quantile([row["looseness"] for row in both], 0.5),
        "calibration_s_max": max(row["calibration_s"] for row in rows.values()),
        "flops_p95_rel_error": quantile([row["flops_p95"] for row in both], 0.5),
        "params_p95_rel_error": quantile([row["params_p95"] for row in both], 0.5),
        "table_p95_rel_error": quantile([row["table_p95"] for row in both], 0.5),
    }
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    summary = {
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "rows": {**rows, **gpu},
        "commit": done.stdout.strip() or "unknown",
        "machine": machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(seconds, 1),
        "quick": quick,
    }
    (HERE / "results" / ("summary_quick.json" if quick else "summary.json")).write_text(
        json.dumps(summary, indent=1) + "\n"
    )
    print(json.dumps(summary["figures"], indent=1))


if __name__ == "__main__":
    main()
