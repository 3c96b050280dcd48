"""Does ``apportion fit`` meet 40 % of the latency at 98 % of the quality, on unlike networks and runtimes?

    .venv/bin/python benchmarks/fit_shows/run.py [--models resnet20] [--targets ort-cpu-1t] [--saved] [--again]

Every cell is the command as a user types it, then ``apportion verify`` in fresh processes. Last: a budget under the
floor, which must be refused with exit code 3, and a run that is killed in the middle and started again. Runs stay under
build/fit_shows; a cell that is there is not made again, unless asked for and that folder is gone.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES, Case

from apportion.core.folder import write_whole
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
WORK = Path("build/fit_shows")
SHARE, FLOOR = "40%", "98%"
GUARDED = "benchmarks.compress_vs_peers.networks:resnet20_guarded"  # its training left out what floors are judged on
MODELS = {"resnet20": Case("resnet20", GUARDED, steps=300, floor=0.4), "minilm": CASES["minilm"]}
TARGETS = ("ort-cpu-1t", "openvino-cpu-1t", "torch-cpu-1t")
USUAL = ("--rungs", "1")
MORE = {  # eager torch has no quicker int8: a long way, with repairs on it, and texts without their padding
    "resnet20 torch-cpu-1t": ("--rungs", "4"),
    "minilm torch-cpu-1t": ("--rungs", "2", "--rules", "prune,tokens,repair"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--saved", action="store_true", help="print what is in results/, measuring nothing")
    parser.add_argument("--again", action="store_true", help="make rows anew that are there")
    args = parser.parse_args()
    summary, path = Summary(HERE), HERE / "results" / "rows.json"
    rows: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if not args.saved:
        made = {f"{m} {t}": (lambda m=m, t=t: cell(MODELS[m], t)) for m in args.models for t in args.targets}
        case = MODELS[args.models[0]]
        made |= {"refused": lambda: refused(case), "resumed": lambda: resumed(case)}
        for name, make in made.items():
            if args.again or name not in rows:
                rows[name] = make()
                path.parent.mkdir(exist_ok=True)
                write_whole(path, (json.dumps(rows, indent=1) + "\n").encode())
                print(name, json.dumps(rows[name]), flush=True)
    show(rows)
    cells = [row for name, row in rows.items() if " " in name]
    figures = {
        "cells": len(cells),
        "met": sum(row["met"] for row in cells),
        "verified": sum(row["verified"] for row in cells),
        "broken_promises": sum(row["met"] and not row["verified"] for row in cells),
    }
    print(json.dumps(figures, indent=1))
    summary.write(figures, packages=("torch", "onnxruntime", "openvino", "nncf"), rows=rows)


def cell(case: Case, target: str) -> dict[str, Any]:
    """One fit and its verification."""
    out = WORK / f"{case.name}-{target}"
    done = fit(case, target, SHARE, out)
    if not (out / "result.json").is_file():
        return {"met": False, "verified": False, "exit": done.returncode, "said": done.stderr.strip()[-200:]}
    told = json.loads((out / "result.json").read_text())
    (key,) = (key for key in told["limits"] if key.startswith("latency"))
    start = told["baseline"][key]["value"]
    again = run("verify", str(out), *(("--model", case.ref) if case.factory else ()))
    seen = json.loads(again.stdout) if told["met"] else None  # what was not met has no certificate
    return {
        "met": told["met"],
        "exit": done.returncode,
        "verified": again.returncode == 0,
        "share": round(told["final"][key]["value"] / start, 4),
        "share_verified": seen and round(seen["final"][key]["value"] / seen["baseline"][key]["value"], 4),
        "quality_before": round(told["quality_before"]["value"], 4),
        "quality_after": round(told["quality_after"]["value"], 4),
        "quality_stderr": round(told["quality_after"]["stderr"], 4),
        "floor": told["floor"] and {name: round(told["floor"]["kept"][name], 4) for name in ("value", "stderr")},
        "precision": told["precision"],
        "rungs": [round(rung["final"][key]["value"] / start, 4) for rung in told["ladder"] if rung["met"]],
        "outcome": told["outcome"],
        "seconds": round(told["seconds"]),
    }


def refused(case: Case) -> dict[str, Any]:
    """A budget that no part of this network can meet."""
    done = fit(case, TARGETS[0], "1%", WORK / "refused")
    return {"exit": done.returncode, "said": done.stderr.strip().splitlines()[-1]}


def resumed(case: Case) -> dict[str, Any]:
    """A run killed while it works, then started again: what was in the ledger stays as it was."""
    out = WORK / "resumed"
    process = subprocess.Popen(command(case, TARGETS[0], SHARE, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    ledger, lines = out / "rungs" / "1" / "ledger.jsonl", b""
    while process.poll() is None and lines.count(b"\n") < 12:
        time.sleep(0.1)
        lines = ledger.read_bytes() if ledger.is_file() else b""
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = ledger.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    done = fit(case, TARGETS[0], SHARE, out)
    kept = ledger.read_bytes().startswith(whole)
    return {"rows_before": whole.count(b"\n"), "kept": kept, "exit": done.returncode}


def command(case: Case, target: str, share: str, out: Path) -> list[str]:
    asked = ["--budget", f"latency<={share}@{target}", "--quality-floor", FLOOR, "--data", case.data]
    more = [*MORE.get(f"{case.name} {target}", USUAL), "--repair-steps", "300", "-o", str(out), "--json"]
    return [sys.executable, "-m", "apportion", "fit", case.ref, *asked, *more]


def fit(case: Case, target: str, share: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(case, target, share, out), capture_output=True, text=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "apportion", *arguments, "--json"], capture_output=True, text=True)


def show(rows: dict[str, Any]) -> None:
    heads = ("model", "target", "latency", "verified", "kept where the floor is judged", "held out", "precision")
    print(f"\n| {' | '.join((*heads, 'exit', 'seconds'))} |\n{'|---' * 9}|")
    for name in (f"{model} {target}" for model in MODELS for target in TARGETS):
        if name not in rows:
            continue
        row, start = rows[name], f"| {' | '.join(name.split())} | "
        if "share" not in row:
            print(start + f" | | | | | {row['exit']} | {row['said']} |")
            continue
        quality = f"{row['quality_before']:.1%} to {row['quality_after']:.1%}"
        ladder = ", ".join(f"{share:.0%}" for share in row["rungs"])
        seen = f"{row['share_verified']:.1%}" if row["met"] else f"none: {row['outcome']}; rungs met: {ladder}"
        print(
            start + f"{row['share']:.1%} | {seen}{'' if row['verified'] or not row['met'] else ', broken'} | ", end=""
        )
        floor = row.get("floor")
        print(
            f"{floor['value']:.1%} ± {floor['stderr'] * 100:.1f}" if floor else "not told",
            quality,
            sep=" | ",
            end=" | ",
        )
        print(f"{row['precision']} | {row['exit']} | {row['seconds']} |")
    if "refused" in rows:
        print(f"\na budget of 1%: exit {rows['refused']['exit']}: `{rows['refused']['said']}`")
    if "resumed" in rows:
        told = rows["resumed"]
        kept = "all kept" if told["kept"] else "LOST"
        print(f"\nkilled after {told['rows_before']} rows of its ledger, started again: {kept}, exit {told['exit']}")


if __name__ == "__main__":
    main()
