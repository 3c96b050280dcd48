"""Measuring latency and energy: candidates take turns in fresh child processes with a limit; a death is an outcome."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from threading import Event
from typing import Any

from apportion.core.meter import Reading
from apportion.device import energy
from apportion.device.build import build_all, compile_all, needs_build
from apportion.device.conditions import conditions_of, merged
from apportion.device.process import Failure, Limits, num_cores, ran_out, run_together
from apportion.device.target import Target
from apportion.errors import MeasureError
from apportion.models.size import Size, explain_size
from apportion.numerics.stats import mad, mean_stderr

MANY_PROCESSES = 5
CROWDED = Event()  # set once candidates that several processes opened at the same time were too much for the memory
MEDIAN_FACTOR = 1.2533  # the standard error of a median over that of a mean, for a normal variable


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The inputs that a latency is about; ``size`` is that of images, None the model's own."""

    batch: int = 1
    tokens: int = 64
    seed: int = 0
    size: Size | None = None

    def to_json(self) -> dict[str, Size]:
        """Without a size that is the model's own: what was kept before there were sizes stays what it was."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def explain(self) -> str:
        """In words."""
        images = "" if self.size is None else f", {explain_size(self.size)}"
        return f"batch {self.batch}, {self.tokens} tokens{images}"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to measure: its reference, and the factory to rebuild it with where it needs one.

    ``artefact`` is the folder of what a graph runtime opens, where it is built already.
    """

    name: str
    ref: str
    factory: str | None = None
    artefact: str | None = None


@dataclass(frozen=True)
class Timing:
    """One candidate in one process.

    ``low_ms`` and ``high_ms`` bound the median at 95 % by the bootstrap; None in what was stored before they were
    taken. ``energy_mj`` is per call, where it was asked for and the device has a counter.
    """

    median_ms: float
    stderr_ms: float
    mad_ms: float
    p95_ms: float
    count: int
    low_ms: float | None = None
    high_ms: float | None = None
    energy_mj: float | None = None
    energy_stderr_mj: float = 0.0


@dataclass(frozen=True)
class Session:
    """Interleaved timings of some candidates, process by process, with the conditions they ran under.

    ``failures`` holds the candidates that could not be measured, which have no timings. ``parts`` are the numbers of
    processes that were taken together, where they were taken apart in time.
    """

    timings: Mapping[str, tuple[Timing, ...]]
    conditions: Mapping[str, Any]
    failures: Mapping[str, Failure] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    def require(self) -> Session:
        """This session, if every candidate was measured.

        Raises:
            MeasureError: naming the first that was not, and what became of it.
        """
        for name, failure in self.failures.items():
            raise MeasureError(f"{name} could not be measured: {failure.kind}: {failure.message}")
        return self

    def plus(self, other: Session, *, later: bool = False) -> Session:
        """This session with the processes of another added, as a part of their own where they were taken later.

        How far parts are apart is in the error, as one sitting on a machine differs from another.
        """
        parts = self.parts or (self.conditions["processes"],) if later or self.parts else ()
        if later:
            parts = (*parts, other.conditions["processes"])
        elif parts:
            parts = (*parts[:-1], parts[-1] + other.conditions["processes"])
        both = self.timings.keys() & other.timings.keys()
        timings = {name: rows + other.timings[name] for name, rows in self.timings.items() if name in both}
        return Session(timings, merged(self.conditions, other.conditions), {**self.failures, **other.failures}, parts)

    def reading(self, quantity: str, name: str) -> Reading:
        """Latency or energy of a candidate: the median over processes; with several their spread is in the error.

        Raises:
            MeasureError: a process did not measure it; says why.
        """
        return _pooled(self._by_process(quantity, name), self.parts)

    def latency(self, name: str) -> Reading:
        """Milliseconds per call, the median of the medians."""
        return self.reading("latency", name)

    def energy(self, name: str) -> Reading:
        """Millijoules per call."""
        return self.reading("energy", name)

    def ratio(self, name: str, to: str, quantity: str = "latency") -> Reading:
        """Latency or energy relative to another candidate in the same processes."""
        pairs = zip(self._by_process(quantity, name), self._by_process(quantity, to), strict=True)
        return _pooled([_divided(ours, theirs) for ours, theirs in pairs], self.parts)

    def _by_process(self, quantity: str, name: str) -> list[Reading]:
        timings = self.timings[name]
        if quantity == "latency":
            return [Reading(value=t.median_ms, unit="ms", stderr=t.stderr_ms, count=t.count) for t in timings]
        assert quantity == "energy", quantity
        read = [
            Reading(value=t.energy_mj, unit="mJ", stderr=t.energy_stderr_mj) for t in timings if t.energy_mj is not None
        ]
        if len(read) < len(timings):
            why = self.conditions.get("energy", {}).get("why", "it was not asked for")
            raise MeasureError(f"the energy of {name} was not measured: {why}")
        return read

    def interval(self, name: str) -> tuple[float, float] | None:
        """What holds the 95 % bootstrap interval of every process; None where one has none."""
        bounds = [(t.low_ms, t.high_ms) for t in self.timings[name] if t.low_ms is not None and t.high_ms is not None]
        if len(bounds) < len(self.timings[name]):
            return None
        return min(low for low, _ in bounds), max(high for _, high in bounds)

    def to_json(self) -> dict[str, Any]:
        return {
            "timings": {name: [asdict(timing) for timing in timings] for name, timings in self.timings.items()},
            "conditions": dict(self.conditions),
            "failures": {name: asdict(failure) for name, failure in self.failures.items()},
            "parts": list(self.parts),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Session:
        timings = {name: tuple(Timing(**timing) for timing in rows) for name, rows in fields["timings"].items()}
        failures = {name: Failure(**failure) for name, failure in fields["failures"].items()}
        return cls(timings, fields["conditions"], failures, tuple(fields.get("parts", ())))


def measure(
    candidates: Sequence[Candidate],
    target: Target,
    shape: Shape,
    *,
    processes: int = 1,
    seconds: float = 3.0,
    tolerance: float = 0.01,
    energy_seconds: float = 0.0,
    before: int = 0,
    limits: Limits | None = None,
    on_step: Callable[[], None] | None = None,
) -> Session:
    """Times candidates side by side in ``processes`` fresh processes, one after the other.

    A candidate that dies, hangs, eats memory, fails or computes numbers that are not finite is left out and recorded
    in the session's failures; the others are measured all the same. Every other process opens them in reverse: on
    OpenVINO what is opened first is up to 5 % slower than what is opened after it. As many processes as there are cores
    open them at the same time, and then time one after the other.

    Args:
        seconds: of timing per process; it ends earlier once every median is known within ``tolerance``.
        energy_seconds: of reading the device's energy counter for every candidate in every process, after timing; where
            there is none, ``conditions["energy"]`` says why.
        before: how many processes of the same session came before these.
        limits: on time and memory of every child process.
        on_step: called after each build and each process, for progress display.
    """
    limits = limits or Limits()
    tell = on_step or (lambda: None)
    failures: dict[str, Failure] = {}
    jobs: list[dict[str, Any]] = [asdict(candidate) for candidate in candidates]
    if needs_build(target):
        built = build_all([job for job in jobs if not job["artefact"]], target, asdict(shape), limits, tell)
        failures = {name: found for name, found in built.items() if isinstance(found, Failure)}
        jobs = [job for job in jobs if job["name"] not in failures]
        jobs = [job if job["artefact"] else job | {"artefact": str(built[job["name"]])} for job in jobs]
    elif target.runtime == "compile":
        compile_all(jobs, target, asdict(shape), limits)
    job: dict[str, Any] = {
        "action": "time",
        "target": target.to_json(),
        "shape": asdict(shape),
        "seconds": seconds,
        "tolerance": tolerance,
        "energy_s": energy_seconds,
        "rapl": str(energy.RAPL),
    }
    runs: list[dict[str, Any]] = []
    while jobs and len(runs) < processes:
        most = 1 if CROWDED.is_set() else num_cores()
        numbers = range(before + len(runs), before + min(processes, len(runs) + most))
        asked = [job | {"number": number, "candidates": jobs[::-1] if number % 2 else jobs} for number in numbers]
        together = run_together(asked, target.environment, limits)
        if len(together) > 1 and any(ran_out(ended) for ended in together):
            CROWDED.set()  # what is too much for several at once need not be for one
            continue
        for ended in together:
            if ended.result is None:
                assert ended.failure is not None
                lost = {ended.culprit: ended.failure} if ended.culprit else {one["name"]: ended.failure for one in jobs}
                failures |= lost
            else:
                failures |= {name: Failure(**failure) for name, failure in ended.result["failures"].items()}
                runs.append(ended.result)
                tell()
        jobs = [one for one in jobs if one["name"] not in failures]
    timings = {one["name"]: tuple(Timing(**run["candidates"][one["name"]]) for run in runs) for one in jobs}
    return Session(timings, conditions_of(runs, target.threads), failures)


def _pooled(readings: Sequence[Reading], parts: Sequence[int]) -> Reading:
    """The median of what processes read, with the largest of the errors within and between them and their parts."""
    values = [reading.value for reading in readings]
    within = statistics.fmean(reading.stderr for reading in readings) / len(readings) ** 0.5
    return Reading(
        value=statistics.median(values),
        unit=readings[0].unit,
        stderr=max(within, _between(values), _apart(values, parts)),
        count=sum(reading.count for reading in readings),
    )


def _apart(values: Sequence[float], parts: Sequence[int]) -> float:
    """Standard error of the mean over parts; of two, half their distance.

    It is not widened for their small number, as that of a few processes is: two parts that differ by chance alone would
    ask for several times the room.
    """
    left = iter(values)
    medians = [statistics.median(islice(left, size)) for size in parts]
    return statistics.stdev(medians) / len(medians) ** 0.5 if len(medians) > 1 else 0.0


def _divided(ours: Reading, theirs: Reading) -> Reading:
    ratio = ours.value / theirs.value
    relative = ((ours.stderr / ours.value) ** 2 + (theirs.stderr / theirs.value) ** 2) ** 0.5
    return Reading(value=ratio, unit="ratio", stderr=ratio * relative, count=ours.count)


def _between(values: Sequence[float]) -> float:
    """Standard error of the median over processes; with enough of them, one that was disturbed does not count."""
    if len(values) < MANY_PROCESSES:
        return mean_stderr(values) if len(values) > 1 else 0.0
    return MEDIAN_FACTOR * mad(values) / len(values) ** 0.5
