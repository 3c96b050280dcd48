"""Measured points: what a tool left, how right its answers are on the test examples, and its latency beside others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from benchmarks.compress_vs_peers.cases import Case

from apportion.device.answers import answers
from apportion.device.measure import Session, Timing
from apportion.device.process import Limits, run_child
from apportion.device.target import Target
from apportion.models.network import read_output
from apportion.tasks.shaped import shaped

ORIGINAL = "original"
PROCESSES = 6


@dataclass(frozen=True, kw_only=True)
class Point:
    """One artefact of one tool.

    ``promised`` is the share of the original's latency that the tool's own figure speaks of, where it states one;
    ``right`` has a bit for every test example, as hexadecimal digits; ``seconds`` is what it took to get there, and
    ``steps`` of training, where they were counted.
    """

    tool: str
    name: str
    artefact: str
    seconds: float
    promised: float | None = None
    steps: int | None = None
    right: str = ""
    count: int = 0
    ratio: float | None = None
    ratio_error: float | None = None

    @property
    def right_N(self) -> np.ndarray:
        return np.unpackbits(np.frombuffer(bytes.fromhex(self.right), dtype=np.uint8))[: self.count].astype(float)

    @property
    def accuracy(self) -> float:
        return float(self.right_N.mean())


def judged(point: Point, case: Case, target: Target) -> Point:
    """The point with its answers on the test examples, computed by the target's runtime."""
    batches = shaped(case.test, case.network, count=None)
    found = answers(Path(point.artefact), target, batches)
    read = [read_output(case.network, tuple(outputs), batch) for outputs, batch in zip(found, batches, strict=True)]
    right_N = case.right(torch.cat(read), case.test.label_N).numpy()
    return replace(point, right=np.packbits(right_N).tobytes().hex(), count=len(right_N))


def timed(points: Sequence[Point], target: Target, seconds: float = 0.5) -> list[Point]:
    """Every point in turns with the original, in fresh processes: its latency as a share of the original's.

    Two at a time, as they would run alone: with many in one process each finds the caches full of the others. Rounds
    go over all points, so that drift falls on all tools alike.
    """
    original = next(point for point in points if point.tool == ORIGINAL)
    runs: dict[int, list[dict]] = {place: [] for place in range(len(points))}
    for turn in range(PROCESSES):
        for place, point in enumerate(points):
            pair = {"point": point.artefact, ORIGINAL: original.artefact}
            if turn % 2:  # which one is opened first matters
                pair = dict(reversed(pair.items()))
            job = {
                "action": "time",
                "number": turn,
                "target": target.to_json(),
                "candidates": [{"name": n, "ref": "", "factory": None, "artefact": a} for n, a in pair.items()],
                "shape": {"batch": 1, "tokens": 64, "seed": 0},
                "seconds": seconds,
                "tolerance": 0.01,
            }
            ended = run_child(job, target.environment, Limits())
            assert ended.result is not None, ended.failure
            runs[place].append(ended.result["candidates"])
    found = []
    for place, point in enumerate(points):
        session = Session({n: tuple(Timing(**run[n]) for run in runs[place]) for n in ("point", ORIGINAL)}, {})
        ratio = session.ratio("point", ORIGINAL)
        found.append(replace(point, ratio=ratio.value, ratio_error=ratio.stderr))
    return found


def save(points: Sequence[Point], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    draft.replace(path)


def read(path: Path) -> list[Point]:
    return [Point(**fields) for fields in json.loads(path.read_text())] if path.is_file() else []
