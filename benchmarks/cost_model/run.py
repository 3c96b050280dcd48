"""How right are cost models, and do their bounds hold? Against predictors scaled by FLOPs or parameters, and a table.

    .venv/bin/python benchmarks/cost_model/run.py [--quick | --saved | --again]

For every network and target, configurations are drawn and measured; the first are fitted to, the next calibrate the
bound, the last are held out. All predictors see the same measurements. Samples are saved after every pair
(``results/cpu``) and taken from there unless ``--again`` is given, so a stopped run goes on; those measured on a CUDA
machine by ``gpu.py`` (``results/cuda``) are fitted and audited here too. ``--quick`` measures in a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from apportion.cost.audit import audit
from apportion.cost.model import CostModel
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.view import choose_options
from apportion.device.probe import working_target
from apportion.numerics.stats import quantile
from apportion.testing.summary import Summary

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too
from benchmarks.cost_model.fitted import Fitted
from benchmarks.cost_model.floors import judge_floor, print_floors
from benchmarks.cost_model.pieces import Judged, judge_pieces, print_pieces
from benchmarks.cost_model.samples import PACKAGES, Saved, measure_pair

HERE = Path(__file__).parent
NETWORKS = ("minilm_like", "vit_like", "resnet_like")
TARGETS = ("torch-cpu-1t", "ort-cpu-1t", "openvino-cpu-1t", "openvino-int8-cpu-1t")
SURE = 1.645  # standard errors that a held-out latency is above its bound by, where that is no noise of its own
BUCKETS = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure one network on two targets, and save nothing")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--saved", action="store_true", help="fit and audit all saved sweeps, measuring nothing")
    only.add_argument("--cuda", action="store_true", help="the same for those of a CUDA machine alone")
    only.add_argument("--again", action="store_true", help="measure the pairs on this machine even where saved")
    args = parser.parse_args()
    summary = Summary(HERE)
    with tempfile.TemporaryDirectory(prefix="cost-model-") as scratch:
        fresh = args.quick and not (args.saved or args.cuda)
        cpu = Path(scratch) if fresh else HERE / "results" / "cpu"
        networks, targets = (NETWORKS[:1], TARGETS[1:3]) if args.quick else (NETWORKS, TARGETS)
        pairs = [] if args.cuda else [(network, target) for target in targets for network in networks]
        paths = [cpu / f"{target}.{network}.json" for network, target in pairs]
        for (network, target), path in zip(pairs, paths, strict=True):
            if args.again or not (args.saved or path.is_file()):
                measure_pair(network, working_target(target), path, fit=True)
            elif path.is_file():
                tell_saved(path)
        cuda = [] if args.quick else sorted((HERE / "results" / "cuda").glob("*.json"))
        for path in cuda:
            tell_saved(path)
        fitted = [Fitted.of(path) for path in [*paths, *cuda] if path.is_file()]
    rows = {one.name: audit_fitted(one) for one in fitted}
    judged = judge_pieces(fitted)
    print_errors(rows)
    print_audits(rows)
    print_floors(rows)
    print_pieces(judged)
    print_energy(HERE / "results" / "energy.json")
    if not args.cuda:
        summarise(rows, judged, args.quick, summary)


def tell_saved(path: Path) -> None:
    saved = Saved.load(path)
    with_what = ", ".join(f"{name} {number}" for name, number in saved.versions.items()) or "versions not recorded"
    print(f"saved: {path.parent.name}/{path.name}, measured on {saved.device} ({with_what})", flush=True)


def audit_fitted(one: Fitted) -> dict[str, Any]:
    """The row of one network on one target."""
    row = judge(one.calibrated.cost, one.held_out(one.calibrated.parts))
    parts, saved = one.parts, one.saved
    plain, fitted = one.held_out(parts), one.to_fit(parts)
    row |= judge_peers([*fitted, *one.to_bound(parts)], plain, parts)  # peers see all of these
    options = choose_options(fitted, parts.signature_of, launches=True)
    unseeing = CostModel.fit(
        fitted, parts.signature_of, knots=options.knots, ridge=options.ridge, launches=options.launches
    )
    row["plain_median"] = round(audit(unseeing, plain).median_rel_error, 4)
    row |= {"view": one.calibrated.parts.view.to_json(), "calibration_s": saved.seconds}
    row["launches"] = judge_floor(one)
    row |= {"failures": len(saved.swept.failures), "device": saved.device, "drift": round(saved.swept.drift, 4)}
    return row | {"versions": dict(saved.versions), "num_fit": saved.num_fit, "num_bound": saved.num_bound}


def judge(model: CostModel, held_out: list[Sample]) -> dict[str, Any]:
    found = audit(model, held_out)
    noise = quantile([s.stderr_ms / s.latency_ms for s in held_out], 0.5)
    surely_above = sum(s.latency_ms - SURE * s.stderr_ms > model.upper(s.shares) for s in held_out)
    return {
        "median": round(found.median_rel_error, 4),
        "p95": round(found.p95_rel_error, 4),
        "coverage": _known(found.coverage),
        "looseness": _known(found.looseness),
        "noise": round(noise, 4),
        "surely_above": surely_above,
        "held_out": len(held_out),
        "audit": _rounded(found.to_json()),
    }


def _known(value: float | None) -> float:
    assert value is not None, "22 samples bound at 95 %"
    return round(value, 4)


def _rounded(value: Any) -> Any:
    """A JSON value with its numbers rounded."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


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


def print_errors(rows: dict) -> None:
    print(
        "\n| network, target | median error | p95 | bound (95 %) held | surely above | looseness | view | "
        "median, plain view | FLOPs p95 | parameters p95 | table p95 | noise | drift |"
    )
    print("|---" * 13 + "|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['median']:.1%} | {row['p95']:.1%} | {row['coverage']:.0%} of {row['held_out']} | "
            f"{row['surely_above']} | {row['looseness']:.1%} | {_view(**row['view'])} | {row['plain_median']:.1%} | "
            f"{row['flops_p95']:.0%} | {row['params_p95']:.0%} | {row['table_p95']:.0%} | {row['noise']:.1%} | "
            f"{format(row['drift'], '.1%') if row['drift'] else '–'} |"
        )


def _view(grid: int, grid_in: int, activations: bool) -> str:
    seen = f"{grid}, {grid_in}" if grid > 1 else ""
    return " + ".join(filter(None, [seen, "written" if activations else ""])) or "plain"


def print_audits(rows: dict) -> None:
    print(
        "\n| network, target | calibration | Spearman, Kendall | inside ±5 % (bands) | "
        "less work yet slower, measured | predicted | kappa | eps at kappa 1 | eta (95 %) | share above, at most |"
    )
    print("|---" * 10 + "|")
    for name, row in rows.items():
        found = row["audit"]
        pairs = found["num_ordered"]
        print(
            f"| {name} | {row['calibration_s']:.0f} s | {_ranks(found['spearman'], found['kendall'])} | "
            f"{_ranks(found['band_spearman'], found['band_kendall'])} ({found['num_bands']}) | "
            f"{found['num_violations']} of {pairs} | {found['num_model_violations']} of {pairs} | "
            f"{found['kappa']:.3f} | {found['frontier'][-1]['eps_ms']:.2g} ms | {found['eta']:.1%} | "
            f"{found['delta_upper']:.0%} |"
        )


def _ranks(*values: float | None) -> str:
    return ", ".join("–" if value is None else f"{value:.2f}" for value in values)


def print_energy(path: Path) -> None:
    """What the GPU's counter said of a network and two slices of it, and the power that makes of their latency."""
    told = json.loads(path.read_text())
    print(f"\n{told['device']}, {told['target']}, energy {told['provenance']} by {told['why']}")
    print("\n| network | kept | latency | energy of a pass | power |")
    print("|---" * 5 + "|")
    for row in told["rows"]:
        energy, latency = row["energy"], row["latency"]
        print(
            f"| {row['network']} | {row['kept']} | {latency['value']:.2f} ± {latency['stderr']:.2f} ms | "
            f"{energy['value']:.0f} ± {energy['stderr']:.0f} mJ | {energy['value'] / latency['value']:.0f} W |"
        )


def summarise(rows: dict, judged: list[Judged], quick: bool, summary: Summary) -> None:
    both = list(rows.values())
    held = sum(row["held_out"] for row in both)
    allowing = [row for row in both if row["drift"] > 0]  # older sweeps don't say how sessions move
    cpu = [row for name, row in rows.items() if not name.endswith("cuda")]
    figures = {
        "targets": len({name.split()[1] for name in rows}),
        "median_rel_error": quantile([row["median"] for row in both], 0.5),
        "p95_rel_error": quantile([row["p95"] for row in both], 0.5),
        "p95_rel_error_max": max(row["p95"] for row in both),
        "coverage": sum(row["coverage"] * row["held_out"] for row in both) / held,
        "surely_above": sum(row["surely_above"] for row in both),
        "coverage_cpu": sum(row["coverage"] * row["held_out"] for row in cpu) / max(1, sum(r["held_out"] for r in cpu)),
        "held_out_cpu": sum(row["held_out"] for row in cpu),
        "coverage_with_drift": sum(row["coverage"] * row["held_out"] for row in allowing)
        / max(1, sum(row["held_out"] for row in allowing)),
        "looseness": quantile([row["looseness"] for row in both], 0.5),
        "calibration_s_max": max(row["calibration_s"] for row in both),
        "calibration_s_max_cpu": max(row["calibration_s"] for row in cpu),
        "flops_p95_rel_error": quantile([row["flops_p95"] for row in both], 0.5),
        "params_p95_rel_error": quantile([row["params_p95"] for row in both], 0.5),
        "table_p95_rel_error": quantile([row["table_p95"] for row in both], 0.5),
    }
    figures = {name: round(value, 4) for name, value in figures.items()}
    pieces = [one.to_json() for one in judged]
    summary.write(figures, packages=PACKAGES, quick=quick, rows=rows, pieces=pieces)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
