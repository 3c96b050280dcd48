"""What changes the clock? Zeros in dense weights, against slicing heads, neurons and blocks, side by side.

.venv/bin/python benchmarks/what_changes_the_clock/run.py [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from apportion.device.measure import Candidate, Shape, measure
from apportion.device.target import find_target
from apportion.models import Partition, load, mask, save, slice_network
from apportion.testing.summary import Summary

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two processes instead of five")
    quick = parser.parse_args().quick
    summary = Summary(HERE)
    network = load("minilm")
    partition = Partition.of(network)

    def half(*kinds: str) -> dict[str, tuple[int, ...]]:
        return {part.name: part.kept(part.num_units // 2) for part in partition if part.kind in kinds}

    arms = {
        "half the heads and neurons zeroed": mask(network, partition, half("heads", "neurons")),
        "half the heads sliced": slice_network(network, partition, half("heads")),
        "half the neurons sliced": slice_network(network, partition, half("neurons")),
        "half the heads and neurons sliced": slice_network(network, partition, half("heads", "neurons")),
        "half the blocks skipped": slice_network(network, partition, half("blocks")),
    }
    processes = 2 if quick else 5
    with tempfile.TemporaryDirectory() as scratch:
        candidates = [Candidate(name="original", ref="minilm")]
        for number, (name, arm) in enumerate(arms.items()):
            save(arm, Path(scratch) / str(number))
            candidates.append(Candidate(name=name, ref=str(Path(scratch) / str(number))))
        session = measure(candidates, find_target("torch-cpu-1t"), Shape(), processes=processes, seconds=20)
    print("| MiniLM, 1 thread, 64 tokens | latency, ratio to the original |\n|---|---|")
    figures = {}
    for name in arms:
        ratio = session.ratio(name, to="original")
        figures[name.replace(" ", "_")] = round(ratio.value, 4)
        print(f"| {name} | {ratio.value:.2f} ± {ratio.stderr:.2f} |")
    packages = ("torch", "transformers")
    summary.write(figures, packages=packages, quick=quick, conditions=dict(session.conditions))


if __name__ == "__main__":
    main()
