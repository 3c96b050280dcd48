"""All the readings of a model that need no clock, taken in a child process, each with where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.core.meter import Meter, Reading
from apportion.device.build import build_all, model_files, needs_build
from apportion.device.measure import Candidate, Shape
from apportion.device.process import Failure, Limits, run_child
from apportion.device.target import Target
from apportion.errors import ModelError

LOAD = "load"
_UNITS = {"params": "params", "flops": "FLOPs"}  # of the others: bytes


@dataclass(frozen=True)
class Readings:
    """Readings by name as JSON; one that can't be had is there with its reason instead of a value.

    ``failure`` is what kept the model from being loaded or built, where it was; ``artefact`` is what was built of it.
    """

    by_name: dict[str, dict[str, Any]]
    failure: Failure | None = None
    artefact: Path | None = None


def reading_names(target: Target) -> list[str]:
    """The readings of a model on a target; those that need no forward pass come first, as a pass may be the end."""
    names = ["params", "size", "flops", "memory (allocated)", "memory (liveness)"]
    return names + (["memory (cuda)"] if target.device == "cuda" else [])


def read_all(candidate: Candidate, target: Target, shape: Shape, limits: Limits | None = None) -> Readings:
    """Reads a model under limits on time and memory; one that dies or hangs keeps the readings taken before.

    Raises:
        ModelError: there is no such model, or it can't be read.
    """
    limits = limits or Limits()
    names = reading_names(target)
    job = {"action": "read", "target": target.to_json(), "shape": asdict(shape), "candidate": asdict(candidate)}
    ended = run_child(job, target.environment, limits, [LOAD, *names])
    result = ended.result or {}
    if "refused" in result:
        raise ModelError(result["refused"])
    found: dict[str, dict[str, Any]] = result.get("readings", {})
    if ended.failure is not None:
        found |= _lost(ended.failure, ended.culprit, [name for name in names if name not in found])
    if ended.failure is not None and ended.culprit in (None, LOAD):
        return Readings(found, ended.failure)
    if not needs_build(target):
        return Readings(found)
    built = build_all([asdict(candidate)], target, asdict(shape), limits, lambda: None)[candidate.name]
    if isinstance(built, Failure):
        return Readings(found | {"size": unavailable("size", f"{built.kind}: {built.message}")}, built)
    files = model_files(built)
    size = Reading(value=float(sum(path.stat().st_size for path in files)), unit="B").to_json()
    provenance = f"measured: {', '.join(path.name for path in files)}"
    return Readings(found | {"size": size | {"provenance": provenance}}, artefact=built)


def unavailable(name: str, why: str) -> dict[str, Any]:
    """A reading that can't be had, as JSON."""
    return {"value": None, "unit": _UNITS.get(name, "B"), "provenance": f"unavailable: {why}"}


def read_one(name: str, network: Any, target: Target) -> dict[str, Any]:
    """One reading as JSON. Runs in the child; a pass may do to it what it likes."""
    meter, provenance = _meter(name, target)
    try:
        return meter.read(network).to_json() | {"provenance": provenance}
    except Exception as error:  # an architecture that torch can't export still has its other readings
        return unavailable(name, " ".join(str(error).split())[:120] or type(error).__name__)


def _lost(failure: Failure, culprit: str | None, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is told of the readings that a failure left out: of itself, and of those that it kept from being tried."""
    why = f"{failure.kind}: {failure.message}"
    later = why if culprit in (None, LOAD) else f"not tried, as the process was lost reading {culprit} ({why})"
    return {name: unavailable(name, why if name == culprit else later) for name in names}


def _meter(name: str, target: Target) -> tuple[Meter[Any], str]:
    from apportion.device.memory import AllocatedPeak, CudaPeak, LivenessPeak
    from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk

    meters: dict[str, tuple[Meter[Any], str]] = {
        "params": (ParameterCount(), "counted"),
        "size": (SizeOnDisk(), "counted (safetensors, upper bound)"),
        "flops": (FlopCount(), "counted"),
        "memory (allocated)": (AllocatedPeak(), "torch storages alive in an eager pass"),
        "memory (liveness)": (LivenessPeak(), "liveness on the exported graph"),
        "memory (cuda)": (CudaPeak(target), "measured: torch's CUDA allocator"),
    }
    return meters[name]
