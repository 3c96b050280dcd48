"""The measuring child process: reads a job on standard input, times every candidate in turn, writes one result file.

Run as ``python -m apportion.device.child``; ``measure.py`` is its only caller.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    threads = str(job["threads"])
    os.environ.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    import torch

    from apportion.models.load import load
    from apportion.models.network import forward

    torch.set_num_threads(job["threads"])
    torch.set_num_interop_threads(1)
    networks = {
        candidate["name"]: load(
            candidate["ref"],
            batch=job["batch"],
            tokens=job["tokens"],
            seed=job["seed"],
            factory=candidate["factory"],
        )
        for candidate in job["candidates"]
    }
    steps = {
        name: (lambda network=network: forward(network.module, network.inputs)) for name, network in networks.items()
    }
    with torch.inference_mode():
        result = time_in_turns(steps, seconds=job["seconds"], tolerance=job["tolerance"])
    result["versions"] = {"torch": torch.__version__}
    _write(Path(job["result"]), result)


def time_in_turns(steps: dict[str, Any], *, seconds: float, tolerance: float) -> dict[str, Any]:
    """Times the steps in interleaved rounds until every median is known within ``tolerance``, or the time is up.

    The order is reversed every other round, so that what one step leaves in the caches falls on all alike.
    """
    from apportion.numerics.stats import mad, median_stderr, quantile

    for _ in range(3):
        for step in steps.values():
            step()
    samples_ms: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    wall, cpu = time.perf_counter(), time.process_time()
    deadline = wall + seconds
    tight = False
    while True:
        for name in names:
            began = time.perf_counter_ns()
            steps[name]()
            samples_ms[name].append((time.perf_counter_ns() - began) / 1e6)
        names.reverse()
        num_rounds = len(samples_ms[names[0]])
        if num_rounds >= 12 and num_rounds % 4 == 0:
            tight = all(1.96 * median_stderr(s) <= tolerance * quantile(s, 0.5) for s in samples_ms.values())
            if tight or time.perf_counter() > deadline:
                break
    return {
        "candidates": {
            name: {
                "median_ms": quantile(samples, 0.5),
                "stderr_ms": median_stderr(samples),
                "mad_ms": mad(samples),
                "p95_ms": quantile(samples, 0.95),
                "count": len(samples),
            }
            for name, samples in samples_ms.items()
        },
        "tight": tight,
        "wall_per_cpu": (time.perf_counter() - wall) / max(time.process_time() - cpu, 1e-9),
        "load": os.getloadavg()[0],
    }


def _write(path: Path, result: dict[str, Any]) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(result))
    draft.replace(path)


if __name__ == "__main__":
    main()
