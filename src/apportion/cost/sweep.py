"""Measuring many configurations of a network on a target, in chunks beside the whole network."""

from __future__ import annotations

import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from apportion.core.meter import Reading
from apportion.cost.draw import Sizes
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.device.conditions import merged
from apportion.device.measure import Candidate, Session, Shape, Timing, measure
from apportion.device.process import Failure
from apportion.device.store import Store
from apportion.device.target import Target, machine
from apportion.models.cut import slice_network
from apportion.models.network import Int8, Network
from apportion.models.save import save

WHOLE = "whole"
COPIES = tuple(f"{WHOLE} {number}" for number in (1, 2, 3))
"""The whole network, three times in every process: where its memory lies moves it, and with it every ratio.

One is opened first, one in the middle and one last, since what is opened first is slower than what is opened later.
"""
MIN_CHUNK, MAX_CHUNK = 8, 40
MAX_CHUNK_CUDA = 96  # starting processes that open a GPU is most of a sweep there
MAX_CHUNK_BYTES = 2 * 10**9  # of weights that a measuring process holds at a time
PROCESSES = 4


@dataclass(frozen=True)
class Swept:
    """Measured configurations: a sample for each that ran, a failure for each that did not, by its number.

    ``drift`` is the relative standard error that all samples of one session share; ``conditions`` are those of all
    processes, and say what disturbed them where something did.
    """

    samples: Mapping[int, Sample]
    failures: Mapping[int, Failure]
    baseline: Reading
    drift: float = 0.0
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": {str(index): sample.to_json() for index, sample in self.samples.items()},
            "failures": {str(index): asdict(failure) for index, failure in self.failures.items()},
            "baseline": self.baseline.to_json(),
            "drift": self.drift,
            "conditions": dict(self.conditions),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Swept:
        return cls(
            {int(index): Sample.from_json(sample) for index, sample in fields["samples"].items()},
            {int(index): Failure(**failure) for index, failure in fields["failures"].items()},
            Reading.from_json(fields["baseline"]),
            float(fields.get("drift", 0.0)),
            dict(fields.get("conditions", {})),
        )


def sweep(
    network: Network,
    parts: Parts,
    configurations: Sequence[Sizes],
    target: Target,
    shape: Shape,
    *,
    seconds_each: float = 0.1,
    processes: int = PROCESSES,
    store: Store | None = None,
    on_chunk: Callable[[float], None] | None = None,
) -> Swept:
    """Latency of every configuration, as its ratio to the whole network in the same process times the baseline.

    Chunks of configurations are sliced, saved, built and timed interleaved with the whole network, which cancels drift
    between chunks; the baseline is the mean over all chunks. Several processes time each chunk, since where a process
    happens to lay out its memory moves single candidates by some per cent.

    Args:
        seconds_each: of timing for every candidate in every process.
        store: keeps every chunk when it is done; one that it holds of the same network, target and sizes on this
            machine is not measured again.
    """
    samples: dict[int, tuple[Mapping[str, float], Reading]] = {}
    failures: dict[int, Failure] = {}
    wholes: list[Reading] = []
    drifts: list[float] = []
    conditions: list[Mapping[str, Any]] = []
    size = chunk_size(network, len(configurations), MAX_CHUNK_CUDA if target.device == "cuda" else MAX_CHUNK)
    chunks = [range(start, min(start + size, len(configurations))) for start in range(0, len(configurations), size)]
    where = {} if store is None else _circumstances(network, target, shape)

    def read_chunk(wanted: Mapping[int, Sizes]) -> Session:
        def made() -> dict[str, Any]:
            session = _measure_chunk(network, parts, wanted, target, shape, seconds_each, processes)
            if session.failures.keys() & set(COPIES):
                session.require()
            return session.to_json()

        what = {
            **where,
            "sizes": [[i, dict(sizes)] for i, sizes in wanted.items()],
            "timing": [seconds_each, processes],
        }
        return Session.from_json(made() if store is None else store.get_or_make(what, made))

    for done, chunk in enumerate(chunks):
        wanted = {i: configurations[i] for i in chunk}
        session = _averaging_copies(read_chunk(wanted))
        conditions.append(session.conditions)
        wholes.append(session.latency(WHOLE))
        for index in chunk:
            if str(index) in session.failures:
                failures[index] = session.failures[str(index)]
            else:
                shares = parts.shares(parts.partition.keep(configurations[index]))
                samples[index] = (shares, session.ratio(str(index), to=WHOLE))
        drifts.append(shared_error(session, [str(index) for index in chunk if index in samples]))
        if on_chunk is not None:
            on_chunk((done + 1) / len(chunks))
    value_ms = sum(reading.value for reading in wholes) / len(wholes)
    stderr_ms = sum(reading.stderr**2 for reading in wholes) ** 0.5 / len(wholes)
    baseline = Reading(value=value_ms, unit="ms", stderr=stderr_ms, count=sum(reading.count for reading in wholes))
    return Swept(
        {
            index: Sample(shares=shares, latency_ms=ratio.value * value_ms, stderr_ms=ratio.stderr * value_ms)
            for index, (shares, ratio) in samples.items()
        },
        failures,
        baseline,
        fmean(drift**2 for drift in drifts) ** 0.5,
        reduce(merged, conditions),
    )


def shared_error(session: Session, names: Sequence[str]) -> float:
    r"""The relative standard error that all ratios to the whole share, from how they move together (eq. K27).

    .. math:: \delta = s\Big(\frac{1}{n} \sum_i \log r_{ip}\Big) / \sqrt{P}

    :math:`r_{ip}` is the ratio of candidate :math:`i` in process :math:`p` of :math:`P`, and :math:`s` the standard
    deviation over processes. What single candidates do on their own averages out.
    """
    wholes = session.timings[WHOLE]
    if len(wholes) < 2 or not names:
        return 0.0
    level_P = [
        fmean(math.log(session.timings[name][place].median_ms / whole.median_ms) for name in names)
        for place, whole in enumerate(wholes)
    ]
    return float(stdev(level_P) / len(wholes) ** 0.5)


def _averaging_copies(session: Session) -> Session:
    """The same with the whole network's timing in every process: the mean over its copies."""
    made = tuple(
        Timing(
            median_ms=fmean(timing.median_ms for timing in copies),
            stderr_ms=fmean(timing.stderr_ms for timing in copies) / len(copies) ** 0.5,
            mad_ms=fmean(timing.mad_ms for timing in copies),
            p95_ms=fmean(timing.p95_ms for timing in copies),
            count=sum(timing.count for timing in copies),
        )
        for copies in zip(*(session.timings[copy] for copy in COPIES), strict=True)
    )
    return Session({**session.timings, WHOLE: made}, session.conditions, session.failures)


def chunk_size(network: Network, count: int, largest: int = MAX_CHUNK) -> int:
    """How many candidates a process measures: as many as fit in memory beside each other, in chunks of even size."""
    size_bytes = sum(p.numel() * p.element_size() for p in network.module.parameters())
    most = min(largest, max(MIN_CHUNK, MAX_CHUNK_BYTES // max(size_bytes, 1)))
    num_chunks = max(1, -(-count // most))
    return max(1, -(-count // num_chunks))


def _circumstances(network: Network, target: Target, shape: Shape) -> dict[str, Any]:
    """All that a latency depends on besides sizes, as JSON: the network by its content, where it runs and with what."""
    digest = hashlib.sha256(f"{network.module} {network.edits} {network.int8}".encode())
    tensors = [network.module.state_dict(), network.inputs, *network.calibration]
    for name, tensor in ((name, tensor) for some in tensors for name, tensor in some.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {
        "network": digest.hexdigest(),
        "target": target.to_json(),
        "shape": shape.to_json(),
        "machine": machine(),
        "torch": torch.__version__,
    }


def _measure_chunk(
    network: Network,
    parts: Parts,
    configurations: Mapping[int, Sizes],
    target: Target,
    shape: Shape,
    seconds_each: float,
    processes: int,
) -> Session:
    factory = network.origin.factory
    scratch = Path(tempfile.mkdtemp(prefix="apportion-sweep-"))
    try:
        whole = network.origin.ref
        if network.int8 != Int8():  # the original's files don't say how to quantise it
            whole = str(scratch / WHOLE)
            save(network, Path(whole))
        slices = []
        for index, sizes in configurations.items():
            sliced = slice_network(network, parts.partition, parts.partition.keep(sizes))
            save(sliced, scratch / str(index))
            slices.append(Candidate(name=str(index), ref=str(scratch / str(index)), factory=factory))
        first, middle, last = (Candidate(name=copy, ref=whole, factory=factory) for copy in COPIES)
        half = len(slices) // 2
        candidates = [first, *slices[:half], middle, *slices[half:], last]
        seconds = seconds_each * len(candidates)
        return measure(candidates, target, shape, processes=processes, seconds=seconds, tolerance=0.01)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
