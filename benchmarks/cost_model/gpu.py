"""Sweeps on a CUDA machine: measures configurations and writes the samples, which ``run.py --samples`` fits and audits.

    python3 benchmarks/cost_model/gpu.py --out FOLDER [--targets torch-cuda,compile-cuda] [--configurations 80]

Fitting needs cvxpy, measuring does not, so the two can happen on different machines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from apportion.cost.draw import draw_many
from apportion.cost.parts import Parts
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.target import find_target, machine
from apportion.models import Partition, load

sys.path.insert(0, str(Path(__file__).parents[2]))  # the networks are named as benchmarks.cost_model.networks
NETWORKS = ("minilm_like_batched", "vit_like_batched", "resnet_like_batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="torch-cuda,compile-cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--configurations", type=int, default=80)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for target in args.targets.split(","):
        for name in args.networks.split(","):
            began = time.perf_counter()
            network = load(f"benchmarks.cost_model.networks:{name}")
            parts = Parts.of(network, Partition.of(network))
            drawn = draw_many(parts, args.configurations, seed=0)
            swept = sweep(network, parts, drawn, find_target(target), Shape())
            told = {
                "network": name,
                "target": target,
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else machine()["processor"],
                "versions": {"torch": torch.__version__},
                "seconds": round(time.perf_counter() - began, 1),
                "baseline": swept.baseline.to_json(),
                "signature_of": parts.signature_of,
                "flops": {part.name: part.flops for part in parts.parts},
                "failures": {str(i): f"{f.kind}: {f.message}" for i, f in swept.failures.items()},
                "samples": [s.to_json() | {"sizes": drawn[i]} for i, s in swept.samples.items()],
            }
            (args.out / f"{target}.{name}.json").write_text(json.dumps(told))
            print(target, name, f"{told['seconds']} s, whole network {swept.baseline.value:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
