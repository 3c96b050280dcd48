"""Sweeps on a CUDA machine: measures configurations and saves the samples, which ``run.py`` fits and audits.

    python3 benchmarks/cost_model/gpu.py --out FOLDER [--targets torch-cuda,compile-cuda] [--networks ...]

Fitting needs cvxpy, measuring does not, so the two can happen on different machines.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apportion.cost.calibrate import anchor_sizes, num_to_fit
from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.target import Target, find_target
from apportion.models.load import load
from apportion.models.partition import Partition

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too
from benchmarks.cost_model.samples import NUM_BOUND, NUM_HELD_OUT, measure_pair

NETWORKS = ("minilm_like_batched", "vit_like_batched", "resnet_like_batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="torch-cuda,compile-cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--workers", type=int, default=6, help="chunks compiled at a time, before the clock runs")
    args = parser.parse_args()
    for target in args.targets.split(","):
        for name in args.networks.split(","):
            if target.startswith("compile"):
                warm(name, find_target(target), args.workers)
            measure_pair(name, find_target(target), args.out / f"{target}.{name}.json", fit=False)


def warm(name: str, target: Target, workers: int) -> None:
    """Compiles everything once, several at a time, so that the sweep finds it in torch's cache on disk."""
    began = time.perf_counter()
    network = load(f"benchmarks.cost_model.networks:{name}")
    parts = Parts.of(network, Partition.of(network))
    drawn = [
        *anchor_sizes(parts.partition).values(),
        *draw_many(parts, num_to_fit(parts) + NUM_BOUND + NUM_HELD_OUT, seed=0),
    ]

    def one(start: int) -> None:
        sweep(network, parts, drawn[start : start + 4], target, Shape(), seconds_each=0.0, processes=1)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(0, len(drawn), 4)))
    print(f"{name} on {target.name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
