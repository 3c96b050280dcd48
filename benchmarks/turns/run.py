"""Does the order of turns favour some candidates? Copies of one network must read alike.

    .venv/bin/python benchmarks/turns/run.py [--quick]       # four minutes on two cores

A process opens twelve copies of one network and times them in two orders, block by block in alternation: one that turns
round every round, as measuring used to, and one that is drawn anew every round, as it does now. The ratio of a copy's
medians under the two is the order's doing alone, since it is the same copy in the same memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from apportion.device.child import time_in_turns
from apportion.device.probe import working_target
from apportion.device.runtimes import runtime_of
from apportion.device.target import Target
from apportion.models.load import load
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
PAIRS = (
    ("minilm_like", "openvino-int8-cpu-1t"),
    ("resnet_like", "openvino-int8-cpu-1t"),
    ("minilm_like", "ort-cpu-1t"),
)
COPIES, OPENINGS, BLOCKS, SECONDS = 12, 6, 2, 2.0
Medians = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, opened twice")
    parser.add_argument("--opening", nargs=2, metavar=("ARTEFACT", "TARGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.opening:
        artefact, target = args.opening
        print(json.dumps(time_copies(Path(artefact), Target(**json.loads(target)))))
        return
    summary, rows = Summary(HERE), {}
    for network, target in PAIRS[: 1 if args.quick else None]:
        rows[f"{network}, {target}"] = compare(network, target, 2 if args.quick else OPENINGS)
    heads = ("network, target", "at the ends", "in between", "copies differ, turning", "copies differ, drawn")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name, row in rows.items():
        shares = [f"{row[key]:.3f}" for key in ("ends", "between")]
        spreads = [f"{row[key]:.1%}" for key in ("spread_turning", "spread_drawn")]
        print(f"| {' | '.join([name, *shares, *spreads])} |")
    figures = {f"{key} {name}": value for name, row in rows.items() for key, value in row.items()}
    figures = {name.replace(", ", "_").replace(" ", "_"): value for name, value in figures.items()}
    summary.write(figures, packages=("openvino", "onnxruntime", "nncf"), quick=args.quick)


def compare(network: str, name: str, openings: int) -> dict[str, float]:
    """Medians in the turning order over those in the drawn one, at the ends and between, and how copies differ."""
    target = working_target(name)
    ends: list[float] = []
    between: list[float] = []
    spreads: dict[str, list[float]] = {"turning": [], "drawn": []}
    with tempfile.TemporaryDirectory() as scratch:
        runtime_of(target).build(load(f"benchmarks.cost_model.networks:{network}"), Path(scratch), target)
        command = [sys.executable, __file__, "--opening", scratch, json.dumps(target.to_json())]
        for _ in range(openings):
            done = subprocess.run(command, env=os.environ | target.environment, capture_output=True, check=True)
            median_ms = json.loads(done.stdout.splitlines()[-1])
            ratios = [median_ms["turning"][copy] / median_ms["drawn"][copy] for copy in median_ms["drawn"]]
            ends += [ratios[0], ratios[-1]]
            between += ratios[1:-1]
            for order, of in median_ms.items():
                spreads[order].append(statistics.stdev(of.values()) / statistics.fmean(of.values()))
    row = {"ends": statistics.median(ends), "between": statistics.median(between)}
    row |= {f"spread_{order}": statistics.median(some) for order, some in spreads.items()}
    return {key: round(value, 4) for key, value in row.items()}


def time_copies(artefact: Path, target: Target) -> dict[str, Medians]:
    """Medians of copies that this process opens, under both orders: of each the median over blocks in alternation."""
    runtime = runtime_of(target)
    steps = {str(number): runtime.open(artefact, target) for number in range(COPIES)}
    orders: dict[str, Callable[[dict[str, Any]], Medians]] = {"turning": turning, "drawn": drawn}
    blocks: dict[str, list[Medians]] = {name: [] for name in orders}
    for block in range(BLOCKS):
        for name in list(orders)[:: -1 if block % 2 else 1]:
            blocks[name].append(orders[name](steps))
    return {
        name: {copy: statistics.median(block[copy] for block in some) for copy in steps}
        for name, some in blocks.items()
    }


def drawn(steps: dict[str, Any]) -> Medians:
    """As measuring does it."""
    found = time_in_turns(steps, seconds=SECONDS, tolerance=0.0)["candidates"]
    return {name: one["median_ms"] for name, one in found.items()}


def turning(steps: dict[str, Any]) -> Medians:
    """In an order that turns round every round: candidates at its ends run twice in a row."""
    for step in steps.values():
        for _ in range(3):
            step()
    samples_ms: dict[str, list[float]] = {name: [] for name in steps}
    names, deadline = list(steps), time.perf_counter() + SECONDS
    while time.perf_counter() < deadline:
        for name in names:
            began = time.perf_counter_ns()
            steps[name]()
            samples_ms[name].append((time.perf_counter_ns() - began) / 1e6)
        names.reverse()
    return {name: statistics.median(some) for name, some in samples_ms.items()}


if __name__ == "__main__":
    main()
