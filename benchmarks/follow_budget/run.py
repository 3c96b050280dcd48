"""Does a served ladder follow a budget that moves, at once and without a lost call?

    .venv/bin/python benchmarks/follow_budget/run.py [--quick] [--targets ort-cpu-1t openvino-cpu-1t]

A ResNet-20 is fitted to 25 % of its latency with five rungs, by the command. Then one process serves the rungs and is
called without pause while the budget jumps between none, tight and in between, as a thermal signal would. Every call is
timed. ``serve_ladder`` opens the certified files themselves; runs stay under ``build/follow_budget``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import Case

from apportion import serve_ladder
from apportion.methods.compress.ladder import Ladder
from apportion.methods.compress.serve import ServedLadder
from apportion.models.load import load
from apportion.numerics.stats import quantile
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
WORK = Path("build/follow_budget")
REF = "benchmarks.compress_vs_peers.networks:resnet20_guarded"
WAVE = (None, 0.3, None, 0.4, 0.25, 0.6)  # of the original's latency; None: no limit
PERIODS, CALLS = 20, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="*", default=["ort-cpu-1t", "openvino-cpu-1t"])
    parser.add_argument("--quick", action="store_true", help="two rungs, one target, a short repair")
    args = parser.parse_args()
    summary = Summary(HERE)
    rows = {target: follow(fit(target, args.quick)) for target in (args.targets[:1] if args.quick else args.targets)}
    show(rows)
    all_rows = list(rows.values())
    figures = {
        "targets": len(rows),
        "calls": sum(row["calls"] for row in all_rows),
        "failed_calls": sum(row["failed"] for row in all_rows),
        "switches": sum(row["switches"] for row in all_rows),
        "switch_us": max(row["switch_us"] for row in all_rows),
        "first_call_ratio": max(row["first_call_ratio"] for row in all_rows),
        "phases_within": min(row["phases_within"] for row in all_rows),
    }
    print(json.dumps(figures, indent=1))
    summary.write(figures, packages=("torch", "onnxruntime", "openvino", "nncf"), quick=args.quick, rows=rows)


def fit(target: str, quick: bool) -> Path:
    """The ladder, by the command as a user types it; one that is there is taken."""
    case, out = Case("resnet20", REF, steps=150, floor=0.25), WORK / f"{target}{'-quick' if quick else ''}"
    steps, rungs = ("20", "2") if quick else ("150", "5")
    asked = ["--budget", f"latency<=25%@{target}", "--data", case.data, "--rungs", rungs, "--repair-steps", steps]
    command = [sys.executable, "-m", "apportion", "fit", REF, *asked, "-o", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"fit ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return out


def follow(run: Path) -> dict[str, Any]:
    """Calls without pause while the budget jumps; the clock of every call, by phase."""
    ladder = Ladder.load(run)
    (key,) = (key for key in ladder.steps[0].certificate.measured if key.startswith("latency"))
    whole_ms = ladder.steps[0].certificate.baseline[key].value
    opened = time.perf_counter()
    serve = serve_ladder(run, factory=REF)
    opened = time.perf_counter() - opened
    inputs = {name: tensor.numpy() for name, tensor in load(REF).inputs.items()}
    for step in ladder.steps:  # what a first inference sets up is no part of a switch
        reading = step.certificate.measured[key]
        _timed_ms(serve, f"{reading.value + 1.001 * step.certificate.z * reading.stderr}ms", inputs)
    budgets = [None if share is None else f"{share * whole_ms:.6f}ms" for share in WAVE]
    switch_us, failed = [], 0
    calls_ms: dict[int, list[float]] = {phase: [] for phase in range(len(WAVE))}
    first_ms: dict[int, list[float]] = {phase: [] for phase in range(len(WAVE))}
    switches = serve.num_switches
    for _ in range(PERIODS):
        for phase, budget in enumerate(budgets):
            before, began = serve.rung, time.perf_counter_ns()
            serve.retarget(budget)
            spent_us = (time.perf_counter_ns() - began) / 1e3
            if serve.rung != before:
                switch_us.append(spent_us)
            for call in range(CALLS):
                try:
                    spent_ms = _timed_ms(serve, budget, inputs)
                except Exception:
                    failed += 1
                    continue
                (first_ms if call == 0 else calls_ms)[phase].append(spent_ms)
    switched, phases = serve.num_switches - switches, []
    for phase, (share, budget) in enumerate(zip(WAVE, budgets, strict=True)):
        rung = serve.retarget(budget)
        median_ms = quantile(calls_ms[phase], 0.5)
        certificate = next(step for step in ladder.steps if step.rung == rung).certificate
        phases.append(
            {
                "budget": share,
                "rung": rung,
                "within": serve.within_budget and (share is None or median_ms <= share * whole_ms),
                "share": round(median_ms / whole_ms, 4),
                "certified": round(certificate.measured[key].value / whole_ms, 4),
                "quality": round(certificate.quality["after"].value, 4),
                "first_call": round(quantile(first_ms[phase], 0.5) / median_ms, 3),
            }
        )
    return {
        "phases": phases,
        "calls": PERIODS * len(WAVE) * CALLS,
        "failed": failed,
        "switches": switched,
        "open_s": round(opened, 2),
        "switch_us": round(quantile(switch_us, 0.5), 1),
        "first_call_ratio": max(phase["first_call"] for phase in phases),
        "phases_within": round(sum(phase["within"] for phase in phases) / len(phases), 4),
    }


def _timed_ms(serve: ServedLadder, budget: str | None, inputs: dict[str, Any]) -> float:
    began = time.perf_counter_ns()
    serve.retarget(budget)  # as a signal does before every call
    serve(inputs)
    return (time.perf_counter_ns() - began) / 1e6


def show(rows: dict[str, Any]) -> None:
    for target, row in rows.items():
        told = f"{row['calls']} calls, {row['failed']} failed, {row['switches']} switches of the rung"
        print(f"\n{target}: {told}, {row['switch_us']:.0f} µs each; all rungs opened in {row['open_s']:.1f} s\n")
        print("| budget | rung | certified | served, median | within | first call after the jump | quality |")
        print("|---" * 7 + "|")
        for phase in row["phases"]:
            budget = "none" if phase["budget"] is None else f"{phase['budget']:.0%}"
            print(
                f"| {budget} | {phase['rung']} | {phase['certified']:.1%} | {phase['share']:.1%} | "
                f"{'yes' if phase['within'] else 'no'} | {phase['first_call']:.2f} × median | {phase['quality']:.1%} |"
            )


if __name__ == "__main__":
    main()
