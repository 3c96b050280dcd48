"""Does it matter which of two networks a process opens first? MiniLM and what ``fit`` left of it, both ways, in turn.

    .venv/bin/python benchmarks/compress_vs_peers/order.py [--processes 5]

Takes the points that ``run.py --models minilm`` made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers.points import ORIGINAL, read

from apportion.device.probe import working_target
from apportion.device.process import Limits, run_child
from apportion.device.target import Target
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
TARGETS, RUNGS = ("openvino-cpu-1t", "ort-cpu-1t"), (1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    args = parser.parse_args()
    rows = []
    print("| target | rung | original first | original last | difference |")
    print("|---|---|---|---|---|")
    for name in TARGETS:
        points = read(HERE / "results" / "points" / f"minilm.{name}.json")
        original = next(point.artefact for point in points if point.tool == ORIGINAL)
        for rung in RUNGS:
            point = next(p.artefact for p in points if (p.tool, p.name) == ("apportion", f"rung {rung}"))
            pair, ratios = {ORIGINAL: original, "point": point}, {"first": [], "last": []}
            for _ in range(args.processes):
                ratios["first"].append(ratio(pair, working_target(name)))
                ratios["last"].append(ratio(dict(reversed(pair.items())), working_target(name)))
            first, last = median(ratios["first"]), median(ratios["last"])
            rows.append({"target": name, "rung": rung, **{key: [round(r, 4) for r in ratios[key]] for key in ratios}})
            print(f"| {name} | {rung} | {first:.1%} | {last:.1%} | {last / first - 1:+.1%} |", flush=True)
    told = {"rows": rows, **Summary(HERE).conditions(("onnxruntime", "openvino"))}
    (HERE / "results" / "order.json").write_text(json.dumps(told, indent=1) + "\n")


def ratio(artefacts: dict[str, str], target: Target) -> float:
    """The point's latency as a share of the original's, in one process that opens them in this order."""
    job = {
        "action": "time",
        "number": 0,
        "target": target.to_json(),
        "candidates": [{"name": n, "ref": "", "factory": None, "artefact": a} for n, a in artefacts.items()],
        "shape": {"batch": 1, "tokens": 64, "seed": 0},
        "seconds": 1.0,
        "tolerance": 0.01,
    }
    ended = run_child(job, target.environment, Limits())
    assert ended.result is not None, ended.failure
    timed = ended.result["candidates"]
    return timed["point"]["median_ms"] / timed[ORIGINAL]["median_ms"]


if __name__ == "__main__":
    main()
