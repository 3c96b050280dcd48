"""Which widths does a search pick for int8 when costs are counted, and what do they cost on the target?

    .venv/bin/python benchmarks/iso_cost_grid/run.py [--quick] [--seeds 2]

The grid of an int8 target is audited on widths that include 65-like ones. Then the same search with the same trainings
runs three times: at equal measured latency on the grid found, and at equal parameters and at equal FLOPs, which know no
grid. What each picks is measured beside the anchor, as picked and with every width rounded up to the grid. Rows are
saved one by one (``results/full``), so a stopped run goes on; delete one to measure it again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.device.probe import working_target
from apportion.device.store import Store
from apportion.device.target import Target
from apportion.methods.search.band import Band, Costs
from apportion.methods.search.clock import Clock, audit_widths, counted
from apportion.methods.search.evidence import known_sigma
from apportion.methods.search.folder import SearchRunConfig
from apportion.methods.search.ground import block_space, training_proxy
from apportion.methods.search.loop import Search, SearchConfig
from apportion.methods.search.neighbours import IsoCost
from apportion.methods.search.proxy import Journal, Sampler
from apportion.methods.search.run import search
from apportion.methods.search.spaces.blocks import BlockSpace
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TARGETS = ("ort-int8-cpu-1t", "openvino-int8-cpu-1t")
WIDTHS = (48, 49, 52, 56, 60, 63, 64, 65, 68, 72, 76, 79, 80, 81, 88, 95, 96)
TAU, SIGMA, EVALUATIONS = 0.05, 4.0, 16
OURS, PARAMS, FLOPS = "measured latency", "parameters", "FLOPs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one target, one seed")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    summary = Summary(HERE)
    kind, targets, seeds = ("quick", TARGETS[:1], 1) if args.quick else ("full", TARGETS, args.seeds)
    rows: list[dict[str, Any]] = []
    audits: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in targets:
            target = working_target(name)
            audits[name] = saved(kind, f"{name}-grid", lambda target=target: fine_audit(target, Path(scratch)))
            print(f"\n{name}\n{audits[name]['table']}", flush=True)
            for seed in range(seeds):
                made = saved(kind, f"{name}-{seed}", lambda t=target, s=seed: {"rows": one_seed(t, s, Path(scratch))})
                rows += made["rows"]
    show(rows)
    figures = figures_of(rows)
    print(json.dumps(figures, indent=1))
    summary.write(
        figures, quick=args.quick, packages=("torch", "onnxruntime", "openvino", "nncf"), rows=rows, audits=audits
    )


def saved(kind: str, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row from its file, made first where there is none."""
    path = HERE / "results" / kind / f"{name}.json"
    if not path.is_file():
        row = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")
    return json.loads(path.read_text())


def config_of(name: str, seed: int) -> SearchRunConfig:
    return SearchRunConfig(
        space="mobile-cnn",
        targets=(name,),
        tolerance=TAU,
        sigma=SIGMA,
        epsilon=4.0,
        max_evaluations=EVALUATIONS,
        steps=40,
        final_steps=60,
        calibration=10,
        seed=seed,
    )


def fine_audit(target: Target, scratch: Path) -> dict[str, Any]:
    """The grid audit on widths of which some are one off a multiple of 16."""
    space = block_space(config_of(target.name, 0), [target])
    audit = audit_widths(space, target, Store(scratch / f"{target.name}.sqlite"), WIDTHS)
    return {**audit.to_json(), "table": audit.table()}


def one_seed(target: Target, seed: int, scratch: Path) -> list[dict[str, Any]]:
    """One search by each way of counting, and what its result measures beside the template."""
    config = config_of(target.name, seed)
    ours = search(config, scratch / f"{target.name}-{seed}")
    grid = int(ours["align"])
    found = {OURS: Setting(ours["arch"])}
    fine = replace(block_space(config, [target]), align=1)
    start = Setting(ours["anchor"]["arch"])  # the template on the grid, the same for all
    for unit in (PARAMS, FLOPS):
        found[unit] = counted_search(config, fine, start, unit)
    rounded = {unit: rounded_up(fine, arch, grid) for unit, arch in found.items()}
    clock = Clock(fine, [target], start, Store(scratch / f"{target.name}-{seed}-final.sqlite"), seconds=3.0)
    archs = list(dict.fromkeys([start, *found.values(), *rounded.values()]))
    measured, key = clock.measure(archs), clock.key(target)
    base = measured[start][key].value
    rows = []
    for unit, arch in found.items():
        ratio = measured[arch][key].value / base
        widths = [arch[f"{layer}.width"] for layer in fine.layers]
        rows.append(
            {
                "target": target.name,
                "seed": seed,
                "equal": unit,
                "grid": grid,
                "widths": widths,
                "num_off_grid": sum(width % grid != 0 for width in widths),
                "latency_ratio": ratio,
                "stderr": measured[arch][key].stderr / base,
                "in_band": bool(abs(ratio - 1) <= TAU + 2 * measured[arch][key].stderr / base),
                "rounded_up_ratio": measured[rounded[unit]][key].value / measured[arch][key].value,
            }
        )
    return rows


def counted_search(config: SearchRunConfig, space: BlockSpace, start: Setting, unit: str) -> Setting:
    """The same search and trainings, at equal counts instead of equal latency; any width is as good as any other."""

    def count(arch: Setting) -> Costs:
        if unit == FLOPS:
            value = sum(flops for _, flops, _ in counted(space, arch).values())
        else:
            value = float(sum(parameter.numel() for parameter in space.build(arch).module.parameters()))
        return {unit: Reading(value=value, unit=unit)}

    sampler = Sampler(training_proxy(config, space), Journal(), max_evaluations=config.max_evaluations)
    searched = Search(space, sampler, known_sigma(SIGMA), SearchConfig(epsilon=config.epsilon))
    return searched.run(IsoCost(space, Band.around(count(start), TAU), count), [start]).arch


def rounded_up(space: BlockSpace, arch: Setting, grid: int) -> Setting:
    edits = {}
    for layer in space.layers:
        width = arch[f"{layer}.width"]
        assert isinstance(width, int)
        edits[f"{layer}.width"] = -(-width // grid) * grid
    return Setting({**arch, **edits})


def show(rows: list[dict[str, Any]]) -> None:
    print("| target | seed | at equal | widths | off grid | latency / anchor | in band | rounded up / as picked |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        widths = ", ".join(map(str, row["widths"]))
        print(
            f"| {row['target']} | {row['seed']} | {row['equal']} | {widths} | {row['num_off_grid']} of "
            f"{len(row['widths'])} | {row['latency_ratio']:.3f} ± {row['stderr']:.3f} | "
            f"{'yes' if row['in_band'] else 'no'} | {row['rounded_up_ratio']:.3f} |"
        )


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    figures: dict[str, float] = {"targets": len({row["target"] for row in rows})}
    for unit, short in ((OURS, "iso_cost"), (PARAMS, "params"), (FLOPS, "flops")):
        of_unit = [row for row in rows if row["equal"] == unit]
        off = sum(row["num_off_grid"] for row in of_unit) / sum(len(row["widths"]) for row in of_unit)
        figures[f"off_grid_share_{short}"] = round(off, 4)
        figures[f"in_band_share_{short}"] = round(statistics.fmean(row["in_band"] for row in of_unit), 4)
    picked_off = [row["rounded_up_ratio"] for row in rows if row["num_off_grid"]]
    if picked_off:
        figures["rounded_up_ratio"] = round(statistics.median(picked_off), 4)
    return figures


if __name__ == "__main__":
    main()
