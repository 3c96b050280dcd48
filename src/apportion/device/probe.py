"""Probing targets: which work on this machine, which do not and why, and which instruction-set cap each needs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.device.build import cache_folder
from apportion.device.measure import Candidate, Shape, measure
from apportion.device.process import Failure, Limits
from apportion.device.runtimes import missing_packages
from apportion.device.target import Target, find_target, machine
from apportion.errors import TargetError

ISA_CAPS = (None, "AVX512_CORE_VNNI", "AVX2", "SSE41")
"""Tried in this order; a machine whose hypervisor hides instructions dies at the first and runs at a later one."""

QUICK_INT8 = ("ort", "openvino", "compile")
"""Runtimes with int8 that pays; eager torch runs it no quicker, as torchao's kernels live off the compiler."""

_PROBE_MODEL = "apportion.device.probe:probe_model"
_PACKAGES = ("apportion", "torch", "onnxruntime", "openvino", "nncf", "torchao", "executorch")


@dataclass(frozen=True)
class Probed:
    """Whether a target works here, in one line, and the instruction-set cap it works with."""

    name: str
    available: bool
    why: str
    isa: str | None = None


def probe_model() -> Any:
    """A small network with a convolution and a linear layer, to try every target on."""
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 32, 3)
            self.linear = nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.relu(self.conv(x)).mean((2, 3)))

    return Small(), torch.zeros(1, 3, 32, 32)


def probe(target: Target, limits: Limits | None = None) -> Probed:
    """Builds and runs the probe model in child processes, under ever lower instruction-set caps where it dies."""
    missing = missing_packages(target)
    if missing:
        return Probed(target.name, False, f"not installed: {', '.join(missing)}")
    failure = Failure("failed", "never tried")
    for isa in ISA_CAPS if target.device == "cpu" else ISA_CAPS[:1]:
        candidate = Candidate(name="probe", ref=_PROBE_MODEL)
        session = measure(
            [candidate], target.with_isa(isa), Shape(), seconds=0.1, tolerance=1.0, limits=limits or Limits(seconds=180)
        )
        if not session.failures:
            cap = f", oneDNN capped at {isa}: it dies without" if isa else ""
            return Probed(target.name, True, f"works{cap}", isa)
        failure = session.failures["probe"]
        if failure.kind != "died":
            break  # a lower cap helps only against illegal instructions
    return Probed(target.name, False, f"{failure.kind}: {failure.message}")


def probe_all(
    names: Sequence[str], *, refresh: bool = False, on_probe: Callable[[Probed], None] | None = None
) -> list[Probed]:
    """Probes targets, remembering the answers until the machine or a runtime's version changes."""
    path = cache_folder() / "targets" / f"{_fingerprint()}.json"
    known = {} if refresh else _read(path)
    results = []
    for name in names:
        if name not in known:
            known[name] = probe(find_target(name))
            _write(path, known)
        results.append(known[name])
        if on_probe is not None:
            on_probe(known[name])
    return results


def working_target(name: str | None) -> Target:
    """The target of a name, with the cap it needs here.

    Torch's own fp32 kernels on the CPU are what this program runs on itself, so they are not tried first.

    Raises:
        TargetError: it does not exist or does not work here; says why.
    """
    target = find_target(name)
    if (target.runtime, target.device) == ("torch", "cpu"):
        return target
    (found,) = probe_all([target.name])
    if not found.available:
        raise TargetError(f"target {target.name!r} does not work here: {found.why}; see apportion targets")
    return target.with_isa(found.isa)


def _fingerprint() -> str:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    return hashlib.sha256(json.dumps([machine(), versions], sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Probed]:
    try:
        return {name: Probed(**fields) for name, fields in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: dict[str, Probed]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({name: asdict(found) for name, found in known.items()}, indent=1))
    draft.replace(path)


def int8_twin(target: Target) -> Target | None:
    """The int8 target beside an fp32 one, where its runtime can quantise and it works here."""
    if target.runtime not in QUICK_INT8 or target.precision != "fp32":
        return None
    try:
        return working_target(target.name.replace(target.runtime, f"{target.runtime}-int8", 1))
    except TargetError:
        return None
