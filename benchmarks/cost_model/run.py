"""How right are cost models, and do their bounds hold? Against predictors scaled by FLOPs or parameters, and a table.

    .venv/bin/python benchmarks/cost_model/run.py [--quick]

For every network and target, configurations are drawn and measured; the first are fitted to, the next calibrate the
bound, the last are held out. All predictors see the same measurements. Samples are saved after every pair
(``results/cpu``), so a stopped run goes on; those measured on a CUDA machine by ``gpu.py`` (``results/cuda``) are
fitted and audited here too. Delete a file to measure it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from apportion.cost.audit import audit
from apportion.cost.calibrate import anchor_sizes, bounding_among, fit_samples, whole_sample
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.sweep import Swept
from apportion.cost.view import choose_options, resee
from apportion.device.probe import working_target
from apportion.models import Partition, load
from apportion.numerics.stats import quantile
from apportion.testing.summary import Summary

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too
from benchmarks.cost_model.samples import Saved, measure_pair

HERE = Path(__file__).parent
NETWORKS = ("minilm_like", "vit_like", "resnet_like")
TARGETS = ("torch-cpu-1t", "ort-cpu-1t", "openvino-cpu-1t", "openvino-int8-cpu-1t")
BUCKETS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one network on two targets")
    parser.add_argument(
        "--cuda", action="store_true", help="only fit and audit the saved CUDA samples, measuring nothing"
    )
    parser.add_argument("--saved", action="store_true", help="fit and audit all saved sweeps, measuring nothing")
    args = parser.parse_args()
    summary = Summary(HERE)
    rows: dict[str, dict] = {}
    for target in () if args.cuda else TARGETS[1:3] if args.quick else TARGETS:
        for network in NETWORKS[:1] if args.quick else NETWORKS:
            path = HERE / "results" / "cpu" / f"{target}.{network}.json"
            if not path.is_file() and not args.saved:
                measure_pair(network, working_target(target), path, fit=True)
            if path.is_file():
                rows |= audit_saved(path)
    gpu: dict[str, dict] = {}
    for path in [] if args.quick else sorted((HERE / "results" / "cuda").glob("*.json")):
        gpu |= audit_saved(path)
    print_tables(rows, gpu)
    if not args.cuda:
        summarise(rows, gpu, args.quick, summary)


def audit_saved(path: Path) -> dict[str, dict]:
    """The row of one network on one target, from its saved sweep."""
    saved = Saved.load(path)
    network = load(f"benchmarks.cost_model.networks:{saved.network.removesuffix('_batched')}")
    parts = Parts.of(network, Partition.of(network))
    last = saved.num_fit + saved.num_bound
    known = {i: s for i, s in saved.swept.samples.items() if i < last}
    unseen = {i: s for i, s in saved.swept.samples.items() if i >= last}
    num_anchors = len(anchor_sizes(parts.partition))
    bounding = bounding_among(num_anchors, saved.num_fit - num_anchors, saved.num_bound)
    calibrated = fit_samples(parts, saved.sizes, Swept(known, {}, saved.swept.baseline, saved.swept.drift), bounding)
    held_out = resee(calibrated.parts, [saved.sizes[i] for i in unseen], list(unseen.values()))
    row = judge(calibrated.cost, held_out)
    whole = whole_sample(parts, saved.swept)
    to_fit = [whole, *(resee(parts, [saved.sizes[i]], [s])[0] for i, s in known.items())]  # peers see all of these
    plain = resee(parts, [saved.sizes[i] for i in unseen], list(unseen.values()))
    row |= judge_peers(to_fit, plain, parts)
    first = [i for i in known if i not in bounding]
    fitted = [whole, *resee(parts, [saved.sizes[i] for i in first], [known[i] for i in first])]
    options = choose_options(fitted, parts.signature_of)
    unseeing = CostModel.fit(fitted, parts.signature_of, knots=options.knots, ridge=options.ridge)
    row["plain_median"] = round(audit(unseeing, plain).median_rel_error, 4)
    row |= {"grid": calibrated.parts.grid, "widths": calibrated.parts.widths, "calibration_s": saved.seconds}
    row |= {"failures": len(saved.swept.failures), "device": saved.device, "drift": round(saved.swept.drift, 4)}
    return {f"{saved.network} {saved.target}": row}


def judge(model: CostModel, held_out: list[Sample]) -> dict:
    found = audit(model, held_out)
    row = {
        "median": found.median_rel_error,
        "p95": found.p95_rel_error,
        "coverage": found.coverage,
        "looseness": found.looseness,
        "spearman": found.spearman,
        "noise": quantile([s.stderr_ms / s.latency_ms for s in held_out], 0.5),
        "held_out": len(held_out),
    }
    return {key: value if isinstance(value, int) else round(value, 4) for key, value in row.items()}


def judge_peers(to_fit: list[Sample], held_out: list[Sample], parts: Parts) -> dict:
    """Predictors that scale the whole network's latency by operations or parameters, and a table."""
    baseline_ms = to_fit[0].latency_ms
    peers = {
        "flops": lambda shares: baseline_ms * _share(shares, {part.name: part.flops for part in parts.parts}),
        "params": lambda shares: baseline_ms * _share(shares, {part.name: part.params for part in parts.parts}),
        "table": fit_table(to_fit, parts.signature_of),
    }
    row = {}
    for name, predict in peers.items():
        errors = [abs(predict(s.shares) / s.latency_ms - 1) for s in held_out]
        row[f"{name}_median"] = round(quantile(errors, 0.5), 4)
        row[f"{name}_p95"] = round(quantile(errors, 0.95), 4)
    return row


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
    print(
        "\n| network, target | median error | p95 | bound (95 %) held | looseness | grid | median with grid 1 | "
        "FLOPs p95 | table p95 | noise | drift |"
    )
    print("|---" * 11 + "|")
    for name, row in {**rows, **gpu}.items():
        print(
            f"| {name} | {row['median']:.1%} | {row['p95']:.1%} | {row['coverage']:.0%} of {row['held_out']} | "
            f"{row['looseness']:.1%} | {row['grid']} | {row['plain_median']:.1%} | {row['flops_p95']:.0%} | "
            f"{row['table_p95']:.0%} | {row['noise']:.1%} | {format(row['drift'], '.1%') if row['drift'] else '–'} |"
        )


def summarise(rows: dict, gpu: dict, quick: bool, summary: Summary) -> None:
    both = [*rows.values(), *gpu.values()]
    held = sum(row["held_out"] for row in both)
    allowing = [row for row in both if row["drift"] > 0]  # older sweeps don't say how sessions move
    figures = {
        "targets": len({name.split()[1] for name in {**rows, **gpu}}),
        "median_rel_error": quantile([row["median"] for row in both], 0.5),
        "p95_rel_error": quantile([row["p95"] for row in both], 0.5),
        "p95_rel_error_max": max(row["p95"] for row in both),
        "coverage": sum(row["coverage"] * row["held_out"] for row in both) / held,
        "coverage_with_drift": sum(row["coverage"] * row["held_out"] for row in allowing)
        / max(1, sum(row["held_out"] for row in allowing)),
        "looseness": quantile([row["looseness"] for row in both], 0.5),
        "calibration_s_max": max(row["calibration_s"] for row in rows.values()),
        "flops_p95_rel_error": quantile([row["flops_p95"] for row in both], 0.5),
        "params_p95_rel_error": quantile([row["params_p95"] for row in both], 0.5),
        "table_p95_rel_error": quantile([row["table_p95"] for row in both], 0.5),
    }
    figures = {name: round(value, 4) for name, value in figures.items()}
    summary.write(figures, quick=quick, rows={**rows, **gpu})
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
