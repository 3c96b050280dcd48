"""All the readings of a model that need no timing, each with where it comes from."""

from __future__ import annotations

from typing import Any

from apportion.core.meter import Meter
from apportion.device.energy import find_source, read_energy
from apportion.device.memory import AllocatedPeak, LivenessPeak
from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk
from apportion.device.target import Target
from apportion.models.load import load
from apportion.models.network import Network


def read_all(ref: str, target: Target, *, batch: int, tokens: int, seed: int) -> dict[str, dict[str, Any]]:
    """Readings by name as JSON; one that can't be had is there with its reason instead of a value."""
    network = load(ref, batch=batch, tokens=tokens, seed=seed)
    meters: dict[str, tuple[Meter[Network], str]] = {
        "params": (ParameterCount(), "counted"),
        "size": (SizeOnDisk(), "counted (safetensors, upper bound)"),
        "flops": (FlopCount(), "counted"),
        "memory (allocated)": (AllocatedPeak(), "torch storages alive in an eager pass"),
        "memory (liveness)": (LivenessPeak(), "liveness on the exported graph"),
    }
    readings: dict[str, dict[str, Any]] = {}
    for name, (meter, provenance) in meters.items():
        try:
            readings[name] = meter.read(network).to_json() | {"provenance": provenance}
        except Exception as error:  # an architecture that torch can't export still has its other readings
            why = " ".join(str(error).split())[:120]
            readings[name] = {"value": None, "unit": meter.unit, "provenance": f"unavailable: {why}"}
    readings["energy"] = _energy(network, target)
    return readings


def _energy(network: Network, target: Target) -> dict[str, Any]:
    source = find_source(target.device)
    if source.joules is None or target.runtime not in ("torch", "compile"):
        why = source.why if source.joules is None else "energy is read on torch targets only"
        return {"value": None, "unit": "mJ", "provenance": f"unavailable: {why}"}
    from apportion.device.runtimes.eager import RUNTIME

    step = RUNTIME.open_network(network, target)
    step()
    return read_energy(step, source).to_json() | {"provenance": f"measured: {source.why}"}
