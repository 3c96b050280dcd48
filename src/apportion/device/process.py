"""Running the child process under limits; whatever becomes of it is a value, not an exception."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apportion.device.marker import Marker

DEFAULT_MEMORY_BYTES = 16 * 2**30
CHILD = "apportion.device.child"
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a child may take for one step (a candidate, a reading) and how much memory it may hold."""

    seconds: float = 300.0
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(frozen=True)
class Failure:
    """What became of a candidate that could not be measured.

    ``kind`` is one of: died, hung, out of memory, non-finite, failed.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a failure about the step it was at (if it said), or without.

    ``result`` is what it had written by then; some actions write as they go.
    """

    result: dict[str, Any] | None
    failure: Failure | None = None
    culprit: str | None = None


def run_child(
    job: dict[str, Any],
    environment: dict[str, str],
    limits: Limits,
    steps: Sequence[str] = (),
    child: str = CHILD,
) -> Ended:
    """Runs one job in a fresh process.

    Args:
        child: the module that is run; it reads the job from its standard input and writes to the file ``result`` names.
        steps: what the child works on, by the names that it marks; each may take the time limit. By default the names
            of the job's candidates.
    """
    steps = steps or [candidate["name"] for candidate in job.get("candidates", ())]
    with tempfile.TemporaryDirectory(prefix="apportion-") as scratch:
        result, place, errors = (Path(scratch) / name for name in ("result.json", "marker", "errors"))
        marker = Marker(place, steps)
        told = {**job, "result": str(result), "marker": str(place), "steps": list(steps)}
        search = os.pathsep.join(path for path in sys.path if path)  # a factory is found where the parent found it
        with errors.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", child],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environment, "PYTHONPATH": search},
            )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(told).encode())
            process.stdin.close()
            failure = _watch(process, limits, marker, max(len(steps), 1))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if failure is None and process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            failure = Failure("died", f"killed by {name}{_HINTS.get(name, '')}")
        if failure is None and (process.returncode or not result.is_file()):
            lines = errors.read_text(errors="replace").strip().splitlines()
            failure = Failure("failed", lines[-1][:300] if lines else f"exit code {process.returncode}")
        written = json.loads(result.read_text()) if result.is_file() else None
        return Ended(written, failure, marker.step if failure else None)


def run_together(jobs: Sequence[dict[str, Any]], environment: dict[str, str], limits: Limits) -> list[Ended]:
    """Runs jobs that time, side by side: they load together and time one after the other, once all have loaded.

    Together they may hold no more than the machine has free, whatever the limit of each is.
    """
    if len(jobs) == 1:
        return [run_child(jobs[0], environment, limits)]
    room = replace(limits, memory_bytes=min(limits.memory_bytes, free_bytes() // len(jobs)))
    with tempfile.TemporaryDirectory(prefix="apportion-gate-") as gate, ThreadPoolExecutor(len(jobs)) as pool:

        def run(place: int) -> Ended:
            try:
                told = {**jobs[place], "gate": gate, "place": place, "together": len(jobs)}
                return run_child(told, environment, room)
            finally:
                (Path(gate) / str(place)).touch()  # one that died is not waited for

        return list(pool.map(run, range(len(jobs))))


def ran_out(ended: Ended) -> bool:
    """Whether memory was, or may have been, what a child or one of its candidates lacked."""
    failures = [] if ended.failure is None else [ended.failure]
    failures += [Failure(**failure) for failure in (ended.result or {}).get("failures", {}).values()]
    return any(failure.kind == "out of memory" or "SIGKILL" in failure.message for failure in failures)


_HINTS = {
    "SIGILL": " (an instruction this machine does not have)",
    "SIGKILL": " (most likely the system ran out of memory)",
}


def _watch(process: subprocess.Popen[bytes], limits: Limits, marker: Marker, num_steps: int) -> Failure | None:
    """Waits for the end; one step may take the time limit, and all together as many times that as there are steps."""
    begun, on_step_s, in_all_s, last = marker.num_begun, 0.0, 0.0, time.monotonic()
    while True:
        try:
            process.wait(_POLL_S)
            return None
        except subprocess.TimeoutExpired:
            pass
        passed_s, last = time.monotonic() - last, time.monotonic()
        if not marker.is_waiting:
            on_step_s = on_step_s + passed_s if marker.num_begun == begun else 0.0
            in_all_s += passed_s
            begun = marker.num_begun
        if on_step_s > limits.seconds:
            return Failure("hung", f"killed after {limits.seconds:g} s")
        if in_all_s > limits.seconds * num_steps:
            return Failure("hung", f"killed after {limits.seconds * num_steps:g} s")
        held = _resident_bytes(process.pid)
        if held > limits.memory_bytes:
            return Failure("out of memory", f"held {held / 2**30:.1f} GiB of {limits.memory_bytes / 2**30:.1f} allowed")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_bytes() -> int:
    """Memory that can be taken without pushing others out, less a fifth; no limit where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            told = dict(line.split(":", 1) for line in file)
        return int(told["MemAvailable"].split()[0]) * 1024 * 4 // 5
    except (OSError, KeyError, ValueError):
        return sys.maxsize


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
