"""What does it save that the processes of a session open their networks together, and does it change what they time?

    .venv/bin/python benchmarks/opening_together/run.py [--quick]       # twelve minutes on two cores

Sessions of four processes alternate: in one kind a process opens its candidates and times them before the next starts,
in the other as many as there are cores open theirs together and then time one after the other, as ``measure`` does.
Both time one at a time, with nothing else running. A pair is a network beside one slice of it, a sweep beside 24.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too

from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.probe import working_target
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.models.save import save
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
NETWORK = "benchmarks.cost_model.networks:minilm_like"
TARGETS = ("torch-cpu-1t", "ort-cpu-1t")
SESSIONS = {"pair": (1, 1.0), "sweep": (24, 2.5)}  # slices beside the whole, seconds of timing in every process
TURNS, PROCESSES = 4, 4
KINDS = {"one by one": {0}, "together": os.sched_getaffinity(0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="pairs on one target, two of each kind")
    args = parser.parse_args()
    summary, rows = Summary(HERE), {}
    for target in TARGETS[: 1 if args.quick else None]:
        for name in ["pair"] if args.quick else SESSIONS:
            rows[f"{name}, {target}"] = compare(name, target, 2 if args.quick else TURNS)
    heads = ("session", "one by one", "together", "time", "apart", "spread one by one", "spread together")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for name, row in rows.items():
        seconds = " | ".join(f"{row[kind]:.1f} s" for kind in KINDS)
        spreads = " | ".join(f"{row[f'spread {kind}']:.1%}" for kind in KINDS)
        print(f"| {name} | {seconds} | {row['time']:.2f} | {row['apart']:.1%} | {spreads} |")
    figures = {
        f"{key} {name}".replace(" ", "_").replace(",", ""): row[key]
        for name, row in rows.items()
        for key in ("time", "apart")
    }
    summary.write(figures, packages=("torch", "onnxruntime"), quick=args.quick, rows=rows, cores=len(KINDS["together"]))


def compare(name: str, target: str, turns: int) -> dict[str, float]:
    """Seconds of a session of each kind, and how the ratios of slices to the whole network differ between them."""
    count, seconds = SESSIONS[name]
    network = load(NETWORK)
    parts = Parts.of(network, Partition.of(network))
    sessions: dict[str, list[Session]] = {kind: [] for kind in KINDS}
    took_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    where = working_target(target)
    with tempfile.TemporaryDirectory() as scratch:
        candidates = [Candidate(name="whole", ref=NETWORK)]
        for number, sizes in enumerate(draw_many(parts, count, seed=0)):
            folder = Path(scratch) / str(number)
            save(slice_network(network, parts.partition, parts.partition.keep(sizes)), folder)
            candidates.append(Candidate(name=str(number), ref=str(folder), factory=NETWORK))
        measure(candidates, where, Shape(), seconds=0.0)  # graphs are built once for both kinds
        for turn in range(turns):
            for kind in list(KINDS)[:: -1 if turn % 2 else 1]:
                began = time.perf_counter()
                with mock.patch("os.sched_getaffinity", lambda _, kind=kind: KINDS[kind]):
                    session = measure(candidates, where, Shape(), processes=PROCESSES, seconds=seconds, tolerance=0.0)
                took_s[kind].append(time.perf_counter() - began)
                sessions[kind].append(session.require())
    logs = {
        kind: [[session.ratio(str(number), "whole").value for session in some] for number in range(count)]
        for kind, some in sessions.items()
    }
    apart = [
        statistics.fmean(ours) / statistics.fmean(theirs) - 1
        for ours, theirs in zip(logs["together"], logs["one by one"], strict=True)
    ]
    row = {kind: statistics.median(took_s[kind]) for kind in KINDS}
    row |= {"time": row["together"] / row["one by one"], "apart": statistics.median(apart)}
    for kind, ratios in logs.items():
        row[f"spread {kind}"] = statistics.median(statistics.stdev(some) / statistics.fmean(some) for some in ratios)
    return {key: round(value, 4) for key, value in row.items()}


if __name__ == "__main__":
    main()
