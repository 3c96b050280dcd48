"""Quality at equal measured latency: apportion fit against tools that prune, quantise, or do both.

    .venv/bin/python benchmarks/compress_vs_peers/run.py [--quick] [--saved] [--models resnet20 …] [--only peers]

Every tool gets the same network, calibration examples, training examples and steps of fine-tuning per stage. What each
leaves is judged by the target's runtime on test examples that no tool saw, and all of it is timed in turns in the same
processes. Points are saved as they are made (``results/points``), so a stopped run goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from apportion.device.probe import working_target
from apportion.device.target import Target
from apportion.testing.summary import Summary

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers import others, table, tools
from benchmarks.compress_vs_peers.cases import CASES, WORK, Case
from benchmarks.compress_vs_peers.points import ORIGINAL, Point, judged, read, save, timed

HERE = Path(__file__).parent
TARGETS = ("ort-cpu-1t", "openvino-cpu-1t")
PACKAGES = ("torch", "torch-pruning", "nncf", "onnxruntime", "openvino", "moocore")


class Pair:
    """One model on one target: its points, made where they are not saved yet."""

    def __init__(self, case: Case, target: Target, folder: Path, again: bool = False) -> None:
        self.case, self.target, self.again = case, target, again
        self.work = WORK / case.name / target.name
        self.path = folder / f"{case.name}.{target.name}.json"
        self.points = [point for point in read(self.path) if Path(point.artefact).is_dir()]

    def has(self, tool: str) -> bool:
        return any(point.tool == tool for point in self.points)

    def add(self, tool: str, name: str, seconds: float, artefact: Path, **more: float) -> None:
        """Adds a point; ``more`` are what it promises, and its steps of training."""
        point = Point(tool=tool, name=name, artefact=str(artefact), seconds=round(seconds, 1), **more)
        point = judged(point, self.case, self.target)
        mine = {one.tool for one in (*self.points, point)}
        saved = (one for one in read(self.path) if Path(one.artefact).is_dir())
        beside = [one for one in saved if one.tool not in mine]  # made by another process meanwhile
        self.points = [*self.points, *beside, point]
        save(self.points, self.path)
        print(f"  {self.case.name} on {self.target.name}: {tool} {name}: {point.accuracy:.3f}", flush=True)

    def made(self, tool: str, name: str, make: Callable[[Path], None], before: float = 0.0, **more: float) -> None:
        """Adds a point whose artefact a function writes; ``before`` are the seconds that led to it."""
        folder = self.work / tool.replace(" ", "_") / name
        began = time.perf_counter()
        make(folder)
        self.add(tool, name, before + time.perf_counter() - began, folder, **more)

    def time_all(self) -> None:
        if self.again or any(point.ratio is None for point in self.points):
            self.points = timed(self.points, self.target)
            save(self.points, self.path)


def run_ours(pair: Pair) -> None:
    """One run of ``apportion fit``, whose ladder has a rung for every budget."""
    case, target = pair.case, pair.target
    run = pair.work / "ours"
    command = [
        sys.executable,
        "-m",
        "apportion",
        "fit",
        case.ref,
        "--budget",
        f"latency<={case.floor:.0%}@{target.name}",
    ]
    command += ["--data", case.data, "--rungs", str(case.rungs), "--repair-steps", str(case.repair)]
    done = subprocess.run([*command, "-o", str(run), "--json"], capture_output=True, text=True)
    if done.returncode == 2 or not (run / "result.json").is_file():
        raise SystemExit(f"apportion fit failed: {done.stderr[-500:]}")
    told = json.loads((run / "result.json").read_text())
    steps = 0
    for rung in told["ladder"]:
        folder = run / "rungs" / str(rung["rung"])
        steps += json.loads((folder / "result.json").read_text())["repair_steps"]
        if rung["met"]:
            limit = case.budgets[rung["rung"] - 1]
            files = folder / "artefact"  # the certified ones themselves
            pair.add(table.OURS, f"rung {rung['rung']}", told["seconds"], files, promised=limit, steps=steps)


def run_peers(pairs: list[Pair]) -> None:
    case = pairs[0].case
    for pair in pairs:
        if not pair.has(ORIGINAL):
            pair.made(ORIGINAL, ORIGINAL, lambda f, pair=pair: tools.build_fp32(case.network, f, pair.target))
        if not pair.has("NNCF"):
            pair.made("NNCF", "int8", lambda f, pair=pair: tools.build_nncf(case, case.network, f, pair.target))
        if not pair.has("NNCF controlled"):
            pair.made(
                "NNCF controlled",
                "int8",
                lambda f, pair=pair: tools.build_nncf(case, case.network, f, pair.target, control=True),
            )
        if pair.target.runtime == "ort" and not pair.has("ORT static"):
            pair.made("ORT static", "int8", lambda f: tools.build_ort_static(case, case.network, f))
    for mode in ("uniform", "global"):
        plain, both = f"TP {mode}", f"TP {mode} + NNCF"
        if all(sum(point.tool == both for point in pair.points) >= tools.STAGES for pair in pairs):
            continue
        spent, began = 0.0, time.perf_counter()
        for stage, (network, macs) in enumerate(tools.prune_in_stages(case, everywhere=mode == "global"), start=1):
            spent += time.perf_counter() - began
            for pair in pairs:
                pair.points = [p for p in pair.points if not (p.tool in (plain, both) and p.name == f"stage {stage}")]
                pair.made(
                    plain,
                    f"stage {stage}",
                    lambda f, pair=pair, n=network: tools.build_fp32(n, f, pair.target),
                    spent,
                    promised=macs,
                    steps=stage * case.steps,
                )
                pair.made(
                    both,
                    f"stage {stage}",
                    lambda f, pair=pair, n=network: tools.build_nncf(case, n, f, pair.target),
                    spent,
                    steps=stage * case.steps,
                )
            began = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ResNet-20 on ONNX Runtime, three budgets, few steps")
    parser.add_argument("--saved", action="store_true", help="print the tables of the saved points, measuring nothing")
    parser.add_argument("--again", action="store_true", help="time all saved points again")
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--points", type=Path, help="another folder of saved points; the summary is left as it is")
    parser.add_argument("--only", choices=("ours", "peers"), help="make these points and time nothing yet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    summary = Summary(HERE)
    folder = args.points or (WORK / "quick" if args.quick else HERE / "results" / "points")
    names, targets = args.models, TARGETS
    if args.quick:
        names, targets, tools.STAGES = ["resnet20"], TARGETS[:1], 3
    results: dict[tuple[str, str], list[Point]] = {}
    budgets: dict[str, list[float]] = {}
    for name in names:
        case = replace(CASES[name], steps=30, repair=25, rungs=3) if args.quick else CASES[name]
        budgets[name] = case.budgets
        if args.saved:
            found = {target: read(folder / f"{name}.{target}.json") for target in targets}
        else:
            pairs = [Pair(case, working_target(target), folder, args.again) for target in targets]
            for pair in pairs:
                if args.quick:
                    pair.work = WORK / "quick" / name
                if args.only != "peers" and not pair.has(table.OURS):
                    run_ours(pair)
            if args.only != "ours":
                run_peers(pairs)
                for pair in pairs if not args.quick else ():
                    others.run(pair)
            if args.only:
                continue
            for pair in pairs:
                pair.time_all()
            found = {pair.target.name: pair.points for pair in pairs}
        for target, points in found.items():
            if points and all(point.ratio is not None for point in points):
                results[name, target] = points
            else:
                print(f"{name} on {target}: not measured to the end yet; run again without --saved", flush=True)
    if args.only:
        return
    figures = table.show(results, budgets)
    if args.points is None:
        summary.write(figures, packages=PACKAGES, quick=args.quick)


if __name__ == "__main__":
    main()
