"""The child process that reads, builds and times candidates, so that one that dies can't take the run with it.

Run as ``python -m apportion.device.child`` with a job on standard input; ``process.py`` is its only caller. Before it
touches a candidate it marks it, which tells the parent whom a sudden death is about.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIN_ROUNDS = 12


def main() -> None:
    job = json.load(sys.stdin)
    from apportion.device.marker import Marker
    from apportion.device.target import Target

    target = Target(**job["target"])
    marker = Marker(Path(job["marker"]), job["steps"])
    actions = {"read": _read, "build": _build, "compile": _compile, "time": _time, "answer": _answer}
    _write(Path(job["result"]), actions[job["action"]](job, target, marker))


def _load(job: dict[str, Any], candidate: dict[str, Any]) -> Any:
    from apportion.models.load import load

    shape = {name: job["shape"].get(name) for name in ("batch", "tokens", "seed", "size")}
    return load(candidate["ref"], factory=candidate["factory"], **shape)


def _read(job: dict[str, Any], target: Any, marker: Any) -> dict[str, Any]:
    """Takes the readings that need no clock, and writes them as it goes: the next may be its end."""
    from apportion.device.read import LOAD, read_one
    from apportion.errors import ApportionError

    marker.at(LOAD)
    try:
        network = _load(job, job["candidate"])
    except ApportionError as error:
        return {"refused": " ".join(str(error).split())}
    found: dict[str, Any] = {}
    for name in job["steps"][1:]:
        marker.at(name)
        found[name] = read_one(name, network, target)
        _write(Path(job["result"]), {"readings": found})
    return {"readings": found}


def _build(job: dict[str, Any], target: Any, marker: Any) -> dict[str, Any]:
    """Builds the artefacts of candidates, one after the other."""
    from apportion.device.build import BUILT
    from apportion.device.runtimes import runtime_of

    failures = {}
    for candidate in job["candidates"]:
        marker.at(candidate["name"])
        folder = Path(candidate["folder"])
        folder.mkdir()
        try:
            runtime_of(target).build(_load(job, candidate), folder, target)
        except Exception as error:
            failures[candidate["name"]] = _failure(error)
        else:
            (folder / BUILT).touch()
    return {"failures": failures}


def _compile(job: dict[str, Any], target: Any, marker: Any) -> dict[str, Any]:
    """Runs candidates once, which leaves what torch compiled in its cache on disk."""
    from apportion.device.runtimes import runtime_of

    for candidate in job["candidates"]:
        marker.at(candidate["name"])
        with contextlib.suppress(Exception):
            runtime_of(target).open_network(_load(job, candidate), target)()  # type: ignore[attr-defined]
    return {}


def _time(job: dict[str, Any], target: Any, marker: Any) -> dict[str, Any]:
    """Opens every candidate, checks that it computes finite numbers, and times those that do in turns."""
    from apportion.device.build import cache_folder
    from apportion.device.runtimes import runtime_of
    from apportion.device.turn import turn, wait_for_all

    runtime = runtime_of(target)
    steps: dict[str, Any] = {}
    failures: dict[str, dict[str, str]] = {}
    for candidate in job["candidates"]:
        name = candidate["name"]
        marker.at(name)
        try:
            if candidate["artefact"] is not None:
                step = runtime.open(Path(candidate["artefact"]), target)
            else:
                step = runtime.open_network(_load(job, candidate), target)  # type: ignore[attr-defined]
            outputs = step()
        except Exception as error:
            failures[name] = _failure(error)
            continue
        if all(_finite(output) for output in outputs):
            steps[name] = step
        else:
            failures[name] = {"kind": "non-finite", "message": "its outputs are not all finite"}

    timed: dict[str, Any] = {
        "candidates": {},
        "tight": True,
        "wall_s": 0.0,
        "cpu_s": 0.0,
        "load": 0.0,
        "steal_ratio": 0.0,
    }
    marker.waiting()
    if "gate" in job:
        wait_for_all(Path(job["gate"]), job["place"], job["together"])
    if steps:
        with turn(cache_folder()):
            timed = time_in_turns(
                steps, seconds=job["seconds"], tolerance=job["tolerance"], mark=marker.at, seed=job["number"]
            )
            if job.get("energy_s"):
                timed["energy"] = _add_energy(timed["candidates"], steps, job, target, marker)
    return {**timed, "failures": failures, "versions": _versions()}


def _add_energy(timings: dict[str, Any], steps: dict[str, Any], job: dict[str, Any], target: Any, marker: Any) -> Any:
    """Adds millijoules per call to the timings where the device has a counter, and says where they come from."""
    from apportion.device.energy import find_source, read_energy
    from apportion.errors import MeasureError

    source = find_source(target.device, Path(job["rapl"]))
    told = {"provenance": source.provenance, "why": source.why}
    for name, step in steps.items() if source.joules is not None else ():
        marker.at(name)
        try:
            reading = read_energy(step, source, seconds=job["energy_s"])
        except MeasureError as error:
            return {"provenance": "unavailable", "why": str(error)}
        timings[name] |= {"energy_mj": reading.value, "energy_stderr_mj": reading.stderr}
    return told


def _answer(job: dict[str, Any], target: Any, _marker: Any) -> dict[str, Any]:
    """Runs an artefact on given inputs and keeps its outputs."""
    import numpy
    from safetensors.numpy import load_file, save_file

    from apportion.device.runtimes import graph_name, runtime_of

    step = runtime_of(target).open(Path(job["artefact"]), target)
    batches: dict[str, dict[str, Any]] = {}
    for name, array in load_file(job["given"]).items():
        number, _, key = name.partition(".")
        batches.setdefault(number, {})[graph_name(key)] = array
    found = {}
    for number, batch in batches.items():
        for place, output in enumerate(step(batch)):
            found[f"{number}.{place}"] = numpy.ascontiguousarray(output, dtype=numpy.float32)
    save_file(found, job["found"])
    return {}


def _failure(error: Exception) -> dict[str, str]:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    memory = isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
    return {"kind": "out of memory" if memory else "failed", "message": text}


def _finite(output: Any) -> bool:
    import numpy

    array = output.detach().float().cpu().numpy() if hasattr(output, "detach") else numpy.asarray(output)
    return array.dtype.kind not in "fc" or bool(numpy.isfinite(array).all())


def time_in_turns(
    steps: dict[str, Any],
    *,
    seconds: float,
    tolerance: float,
    mark: Callable[[str], None] = lambda name: None,
    seed: int = 0,
) -> dict[str, Any]:
    """Times the steps in interleaved rounds until every median is known within ``tolerance``, or the time is up.

    The order is drawn anew every round, so that what one step leaves in the caches falls on all alike; none follows
    itself, which leaves two to alternate. ``mark`` is told the name of every step before it runs, outside of the time
    taken.
    """
    from apportion.numerics.stats import bootstrap_interval, mad, median_stderr, quantile

    for name, step in steps.items():
        mark(name)
        for _ in range(3):
            step()
    samples_ms: dict[str, list[float]] = {name: [] for name in steps}
    names, generator = list(steps), random.Random(seed)
    steal, total = _cpu_ticks()
    wall, cpu = time.perf_counter(), time.process_time()
    deadline = wall + seconds
    tight = False
    while True:
        for name in names:
            mark(name)
            began = time.perf_counter_ns()
            steps[name]()
            samples_ms[name].append((time.perf_counter_ns() - began) / 1e6)
        last = names[-1]
        generator.shuffle(names)
        if names[0] == last:  # it ran a moment ago, and would find its weights in the caches
            names.append(names.pop(0))
        num_rounds = len(samples_ms[last])
        if num_rounds >= MIN_ROUNDS and num_rounds % 4 == 0:
            tight = all(1.96 * median_stderr(s) <= tolerance * quantile(s, 0.5) for s in samples_ms.values())
            if tight or time.perf_counter() > deadline:
                break
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    steal_now, total_now = _cpu_ticks()
    timings: dict[str, dict[str, float]] = {}
    for name, samples in samples_ms.items():
        low_ms, high_ms = bootstrap_interval(samples)
        timings[name] = {
            "median_ms": quantile(samples, 0.5),
            "stderr_ms": median_stderr(samples),
            "mad_ms": mad(samples),
            "p95_ms": quantile(samples, 0.95),
            "count": len(samples),
            "low_ms": low_ms,
            "high_ms": high_ms,
        }
    return {
        "candidates": timings,
        "tight": tight,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "load": os.getloadavg()[0],
        "steal_ratio": (steal_now - steal) / max(total_now - total, 1),
    }


def _cpu_ticks() -> tuple[int, int]:
    """Ticks stolen by the hypervisor, and all ticks, since boot."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 1
    return ticks[7] if len(ticks) > 7 else 0, sum(ticks)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    wanted = ("torch", "onnxruntime", "openvino", "executorch")
    loaded = {name: sys.modules[name] for name in wanted if name in sys.modules}
    return {name: str(getattr(module, "__version__", None) or version(name)) for name, module in loaded.items()}


def _write(path: Path, result: dict[str, Any]) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(result))
    draft.replace(path)


if __name__ == "__main__":
    main()
