"""Sweeps on a CUDA machine: measures configurations and saves the samples, which ``run.py`` fits and audits.

Energy is read there, too, by the GPU's counter, and printed by ``run.py``.

    python3 benchmarks/cost_model/gpu.py --out FOLDER/cuda [--energy] [--targets ...] [--networks ...]

Fitting needs cvxpy, measuring does not, so the two can happen on different machines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from apportion.cost.calibrate import CHEAPEST, anchor_sizes
from apportion.cost.parts import Parts
from apportion.device.measure import Candidate, Shape, measure
from apportion.device.target import find_target
from apportion.models.cut import slice_network
from apportion.models.load import load
from apportion.models.partition import Partition
from apportion.models.save import save

sys.path.insert(0, str(Path(__file__).parents[2]))  # children find benchmarks.cost_model.networks there, too
from benchmarks.cost_model.samples import device_name, measure_pair

NETWORKS = ("minilm_like_batched", "vit_like_batched", "resnet_like_batched")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="torch-cuda,compile-cuda")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--energy", action="store_true", help="read the energy of the networks, too, first")
    args = parser.parse_args()
    if args.energy:
        read_energy(args.networks.split(","), args.out.parent / "energy.json")
    for target in args.targets.split(","):
        for name in args.networks.split(","):
            measure_pair(name, find_target(target), args.out / f"{target}.{name}.json", fit=False)


def read_energy(names: Sequence[str], path: Path) -> None:
    """Joules by the GPU's own counter: of each network whole, half and cheapest, beside their latency."""
    target, rows, told = find_target("torch-cuda"), [], {}
    for name in names:
        network = load(f"benchmarks.cost_model.networks:{name}")
        parts = Parts.of(network, Partition.of(network))
        anchors = {"whole": {}, **anchor_sizes(parts.partition)}
        wanted = {kind: anchors[kind] for kind in ("whole", "half", CHEAPEST) if kind in anchors}
        with tempfile.TemporaryDirectory() as scratch:
            candidates = []
            for kind, sizes in wanted.items():
                folder = Path(scratch) / kind
                save(slice_network(network, parts.partition, parts.partition.keep(sizes)), folder)
                candidates.append(Candidate(name=kind, ref=str(folder), factory=network.origin.factory))
            session = measure(candidates, target, Shape(), processes=2, seconds=1.0, energy_seconds=1.0).require()
        told = session.conditions["energy"]
        if told["provenance"] == "unavailable":
            print(f"no energy: {told['why']}", flush=True)
            return
        for kind in wanted:
            energy, latency = session.energy(kind), session.latency(kind)
            rows.append({"network": name, "kept": kind, "energy": energy.to_json(), "latency": latency.to_json()})
            print(f"{name} {kind}: {energy.value:.0f} mJ in {latency.value:.2f} ms", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"target": target.name, "device": device_name(), **told, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
