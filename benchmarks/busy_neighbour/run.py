"""Does the ratio of two latencies cancel what another program takes? An int8 network beside its original, in turns.

    .venv/bin/python benchmarks/busy_neighbour/run.py       # two minutes on two cores

Processes alternate: with nothing else running, and with neighbours on the other cores that multiply or copy numbers.
Printed are the ratio in each, and what a session says whose processes are half of each kind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.cases import CASES, Case

from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.probe import working_target
from apportion.methods.compress.quantise import Quantise
from apportion.models.network import Int8
from apportion.models.save import save
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TARGET = "ort-cpu-1t"
TURNS = 5
RECIPES = {"resnet20": Int8(scope="graph"), "minilm": Int8(scope="dynamic")}
NEIGHBOURS = {
    "multiplies": "import numpy; a = numpy.ones((256, 256), 'float32')\nwhile True: a @ a",
    "copies": "import numpy; a = numpy.ones(2**25, 'float32'); b = a.copy()\nwhile True: numpy.copyto(b, a)",
}


def main() -> None:
    summary, rows = Summary(HERE), {}
    for name in RECIPES:
        for kind, busy in NEIGHBOURS.items():
            rows[f"{name} {kind}"] = compare(CASES[name], busy)
    heads = ("network in int8", "neighbour", "alone", "beside it", "slowdown", "both")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name, row in rows.items():
        shown = " | ".join(f"{row[key]:.3f}" for key in ("calm", "busy", "slowdown", "both"))
        print(f"| {' | '.join(name.split())} | {shown} |")
    figures = {f"{key} {name}".replace(" ", "_"): row[key] for name, row in rows.items() for key in row}
    summary.write(figures, packages=("torch", "onnxruntime"), rows=rows)


def compare(case: Case, neighbour: str) -> dict[str, float]:
    target = working_target(TARGET)
    with tempfile.TemporaryDirectory() as scratch:
        small = Quantise(case.splits.calibration, RECIPES[case.name]).quantised(case.network)
        save(small, Path(scratch))
        candidates = [
            Candidate(name="original", ref=case.ref),
            Candidate(name="int8", ref=scratch, factory=case.factory),
        ]
        calm, busy = [], []
        for _ in range(TURNS):
            calm.append(measure(candidates, target, Shape(), seconds=1.0).require())
            others = [subprocess.Popen([sys.executable, "-c", neighbour]) for _ in range((os.cpu_count() or 2) - 1)]
            try:
                busy.append(measure(candidates, target, Shape(), seconds=1.0).require())
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    both = joined([session for pair in zip(calm, busy, strict=True) for session in pair])
    told = {name: joined(sessions) for name, sessions in (("calm", calm), ("busy", busy))}
    found = {name: session.ratio("int8", "original").value for name, session in told.items()}
    slower = told["busy"].latency("original").value / told["calm"].latency("original").value
    found |= {"slowdown": slower, "both": both.ratio("int8", "original").value}
    return {name: round(value, 4) for name, value in found.items()}


def joined(sessions: list[Session]) -> Session:
    whole = sessions[0]
    for session in sessions[1:]:
        whole = whole.plus(session)
    return whole


if __name__ == "__main__":
    main()
