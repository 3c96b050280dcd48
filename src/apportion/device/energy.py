"""Energy: joules from the processor's or the GPU's own counters where the machine has them, and never a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from apportion.core.meter import Reading
from apportion.errors import MeasureError
from apportion.numerics.stats import mean_stderr

RAPL = Path("/sys/class/powercap")
NUM_PARTS = 4


@dataclass(frozen=True)
class EnergySource:
    """Where joules come from. ``joules`` reads a counter that only grows; None where there is none, and ``why``."""

    provenance: Literal["measured", "unavailable"]
    why: str
    joules: Callable[[], float] | None = None


def find_source(device: str, rapl: Path | None = None) -> EnergySource:
    """The energy counter of a device: RAPL for a CPU, below ``RAPL`` unless told otherwise, NVML for a CUDA device."""
    return _nvml() if device == "cuda" else _rapl(rapl or RAPL)


def read_energy(step: Callable[[], Any], source: EnergySource, *, seconds: float = 1.0) -> Reading:
    """Millijoules per step over a period long enough for the counter; includes whatever else ran meanwhile.

    The period is cut into a few parts, whose spread is the error.

    Raises:
        MeasureError: there is no counter, or it did not move.
    """
    if source.joules is None:
        raise MeasureError(f"energy is not available here: {source.why}")
    per_step_mj, count, start = [], 0, source.joules()
    before = start
    for _ in range(NUM_PARTS):
        steps, began = 0, time.perf_counter()
        while not steps or time.perf_counter() - began < seconds / NUM_PARTS:
            step()
            steps += 1
        now = source.joules()
        per_step_mj.append((now - before) * 1e3 / steps)
        count, before = count + steps, now
    if before <= start:
        raise MeasureError(f"the counter ({source.why}) did not move in {count} calls")
    value_mj = (before - start) * 1e3 / count
    return Reading(value=value_mj, unit="mJ", stderr=mean_stderr(per_step_mj), count=count)


def _rapl(folder: Path) -> EnergySource:
    counters = sorted(folder.glob("intel-rapl:?/energy_uj"))
    if not counters:
        return EnergySource("unavailable", "the system shows no RAPL counter (usual in a virtual machine)")
    try:
        limits = [int((path.parent / "max_energy_range_uj").read_text()) for path in counters]
        start = [int(path.read_text()) for path in counters]
    except (OSError, ValueError) as error:
        return EnergySource("unavailable", f"the RAPL counter can't be read ({error}); it usually needs root")
    state = {"last": start, "turns": [0] * len(counters)}

    def joules() -> float:
        now = [int(path.read_text()) for path in counters]
        for index, (value, last) in enumerate(zip(now, state["last"], strict=True)):
            state["turns"][index] += value < last  # the counter wraps around
        state["last"] = now
        return sum(v + turn * limit for v, turn, limit in zip(now, state["turns"], limits, strict=True)) / 1e6

    return EnergySource("measured", f"RAPL, {len(counters)} package(s)", joules)


def _nvml() -> EnergySource:
    try:
        import pynvml
    except ImportError:
        return EnergySource("unavailable", "nvidia-ml-py is not installed; run: pip install apportion[cuda]")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return EnergySource("unavailable", f"NVML gives no energy counter ({error})")
    return EnergySource("measured", "NVML", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
