"""Measuring latency: candidates take turns inside fresh child processes with a time limit; a death is an outcome."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.core.meter import Reading
from apportion.device.target import Target
from apportion.errors import MeasureError
from apportion.numerics.stats import mean_stderr


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The inputs that a latency is about."""

    batch: int = 1
    tokens: int = 64
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to measure: its reference, and the factory to rebuild it with where it needs one."""

    name: str
    ref: str
    factory: str | None = None


@dataclass(frozen=True)
class Timing:
    """One candidate in one process."""

    median_ms: float
    stderr_ms: float
    mad_ms: float
    p95_ms: float
    count: int


@dataclass(frozen=True)
class Session:
    """Interleaved timings of some candidates, process by process, with the conditions they ran under."""

    timings: Mapping[str, tuple[Timing, ...]]
    conditions: Mapping[str, Any]

    def plus(self, other: Session) -> Session:
        """This session with the processes of another added."""
        conditions = {
            "processes": self.conditions["processes"] + other.conditions["processes"],
            "tight": self.conditions["tight"] and other.conditions["tight"],
            "wall_per_cpu": max(self.conditions["wall_per_cpu"], other.conditions["wall_per_cpu"]),
            "load": max(self.conditions["load"], other.conditions["load"]),
            "versions": self.conditions["versions"],
        }
        return Session({name: rows + other.timings[name] for name, rows in self.timings.items()}, conditions)

    def latency(self, name: str) -> Reading:
        """Median over processes of the median latency; with several processes their spread is in the error."""
        timings = self.timings[name]
        medians = [timing.median_ms for timing in timings]
        within = statistics.fmean(timing.stderr_ms for timing in timings) / len(timings) ** 0.5
        between = mean_stderr(medians) if len(medians) > 1 else 0.0
        count = sum(timing.count for timing in timings)
        return Reading(value=statistics.median(medians), unit="ms", stderr=max(within, between), count=count)

    def ratio(self, name: str, to: str) -> Reading:
        """Latency relative to another candidate of the same processes, which cancels what slowed both."""
        pairs = list(zip(self.timings[name], self.timings[to], strict=True))
        ratios = [ours.median_ms / theirs.median_ms for ours, theirs in pairs]
        within = (
            statistics.fmean(
                ratio * ((ours.stderr_ms / ours.median_ms) ** 2 + (theirs.stderr_ms / theirs.median_ms) ** 2) ** 0.5
                for ratio, (ours, theirs) in zip(ratios, pairs, strict=True)
            )
            / len(pairs) ** 0.5
        )
        between = mean_stderr(ratios) if len(ratios) > 1 else 0.0
        count = sum(ours.count for ours, _ in pairs)
        return Reading(value=statistics.median(ratios), unit="ratio", stderr=max(within, between), count=count)

    def to_json(self) -> dict[str, Any]:
        return {
            "timings": {name: [asdict(timing) for timing in timings] for name, timings in self.timings.items()},
            "conditions": dict(self.conditions),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Session:
        timings = {name: tuple(Timing(**timing) for timing in rows) for name, rows in fields["timings"].items()}
        return cls(timings, fields["conditions"])


def measure(
    candidates: Sequence[Candidate],
    target: Target,
    shape: Shape,
    *,
    processes: int = 1,
    seconds: float = 3.0,
    tolerance: float = 0.01,
    timeout_s: float = 300.0,
    on_process: Callable[[], None] | None = None,
) -> Session:
    """Times candidates side by side in ``processes`` fresh processes, one after the other.

    Args:
        seconds: of timing per process; it ends earlier once every median is known within ``tolerance``.
        timeout_s: after which a child is killed.
        on_process: called after each process, for progress display.

    Raises:
        MeasureError: the child died, hung or said why it could not.
    """
    runs = []
    for _ in range(processes):
        runs.append(_run_child(candidates, target, shape, seconds, tolerance, timeout_s))
        if on_process is not None:
            on_process()
    timings = {
        candidate.name: tuple(Timing(**run["candidates"][candidate.name]) for run in runs) for candidate in candidates
    }
    conditions = {
        "processes": processes,
        "tight": all(run["tight"] for run in runs),
        "wall_per_cpu": max(run["wall_per_cpu"] for run in runs),
        "load": max(run["load"] for run in runs),
        "versions": runs[0]["versions"],
    }
    return Session(timings, conditions)


def _run_child(
    candidates: Sequence[Candidate],
    target: Target,
    shape: Shape,
    seconds: float,
    tolerance: float,
    timeout_s: float,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="apportion-") as scratch:
        result = Path(scratch) / "result.json"
        job = {
            "candidates": [asdict(candidate) for candidate in candidates],
            "threads": target.threads,
            "seconds": seconds,
            "tolerance": tolerance,
            "result": str(result),
            **asdict(shape),
        }
        search = os.pathsep.join(path for path in sys.path if path)  # a factory is found where the parent found it
        process = subprocess.Popen(
            [sys.executable, "-m", "apportion.device.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search},
        )
        try:
            _, errors = process.communicate(json.dumps(job).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise MeasureError(f"the measuring process hung and was killed after {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            raise MeasureError(f"the measuring process was killed by {name}; the model does not run on {target.name}")
        if process.returncode or not result.is_file():
            lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
            raise MeasureError(f"the measuring process failed: {lines[-1][:300]}")
        return json.loads(result.read_text())
