"""Sweeps on a CUDA machine: measures configurations and saves the samples, which ``run.py`` fits and audits.

    python3 benchmarks/cost_model/gpu.py --out FOLDER [--targets torch-cuda,compile-cuda] [--configurations 64]

Fitting needs cvxpy, measuring does not, so the two can happen on different machines.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from apportion.cost.calibrate import anchor_sizes
from apportion.cost.draw import Sizes, draw_many
from apportion.cost.parts import Parts
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.target import Target, find_target
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too
from benchmarks.cost_model.samples import Saved, device_name

NUM_BOUND = 22
NETWORKS = ("minilm_like_batched", "vit_like_batched", "resnet_like_batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="torch-cuda,compile-cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--configurations", type=int, default=64)
    parser.add_argument("--workers", type=int, default=6, help="chunks compiled at a time, before the clock runs")
    parser.add_argument("--held-out", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for target in args.targets.split(","):
        for name in args.networks.split(","):
            began = time.perf_counter()
            network = load(f"benchmarks.cost_model.networks:{name}")
            parts = Parts.of(network, Partition.of(network))
            drawn = [*anchor_sizes(parts.partition).values(), *draw_many(parts, args.configurations, seed=0)]
            if target.startswith("compile"):
                warm(network, parts, drawn, find_target(target), args.workers)
            swept = sweep(network, parts, drawn, find_target(target), Shape(), processes=1, seconds_each=0.4)
            seconds = time.perf_counter() - began
            num_fit = len(drawn) - NUM_BOUND - args.held_out
            Saved(
                network=name,
                target=target,
                device=device_name(),
                seconds=seconds,
                num_fit=num_fit,
                num_bound=NUM_BOUND,
                sizes=drawn,
                swept=swept,
            ).save(args.out / f"{target}.{name}.json")
            print(target, name, f"{seconds:.0f} s, whole network {swept.baseline.value:.3f} ms", flush=True)


def warm(network: Network, parts: Parts, drawn: list[Sizes], target: Target, workers: int) -> None:
    """Compiles everything once, several at a time, so that the sweep finds it in torch's cache on disk."""

    def one(start: int) -> None:
        sweep(network, parts, drawn[start : start + 4], target, Shape(), seconds_each=0.0, processes=1)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(0, len(drawn), 4)))


if __name__ == "__main__":
    main()
