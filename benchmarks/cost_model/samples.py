"""Saved sweeps: what was measured of one network on one target, in a file that is fitted and audited later."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from apportion.cost.calibrate import anchor_sizes, bounding_among, fit_samples, num_to_fit
from apportion.cost.draw import Sizes, draw_many
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.sweep import Swept, sweep
from apportion.device.measure import Shape
from apportion.device.target import Target, machine
from apportion.models.load import load
from apportion.models.partition import Partition

NUM_BOUND, NUM_HELD_OUT = 22, 24
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf", "cvxpy")


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A sweep over ``sizes``: the first ``num_fit + num_bound`` are for fitting and the bound, the rest is held out.

    ``device`` and ``versions`` are those of the machine that measured, which need not be the one that fits; they are
    empty where they were not recorded.
    """

    network: str
    target: str
    device: str
    seconds: float
    versions: Mapping[str, str]
    num_fit: int
    num_bound: int
    sizes: Sequence[Sizes]
    swept: Swept

    def save(self, path: Path) -> None:
        fields = {
            **{name: getattr(self, name) for name in ("network", "target", "device", "num_fit", "num_bound")},
            "seconds": round(self.seconds, 1),
            "versions": dict(self.versions),
            "sizes": list(self.sizes),
            "swept": self.swept.to_json(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(fields))

    @classmethod
    def load(cls, path: Path) -> Saved:
        fields = json.loads(path.read_text())
        return cls(**fields | {"swept": Swept.from_json(fields["swept"])})


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else str(machine()["processor"])


def installed_versions() -> dict[str, str]:
    """Of the packages that the figures depend on, those that are installed here."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def measure_pair(name: str, target: Target, path: Path, *, fit: bool) -> None:
    """Measures one network on one target: a calibration, timed, then configurations to hold out, and saves both.

    With ``fit`` the time of fitting counts, too; a machine without a solver leaves that to another one.
    """
    began = time.perf_counter()
    network = load(f"benchmarks.cost_model.networks:{name}")
    parts = Parts.of(network, Partition.of(network))
    anchors, num_fit = list(anchor_sizes(parts.partition).values()), num_to_fit(parts)
    sizes = [*anchors, *draw_many(parts, num_fit + NUM_BOUND + NUM_HELD_OUT, seed=0)]
    last = len(anchors) + num_fit + NUM_BOUND
    swept = sweep(network, parts, sizes[:last], target, Shape())
    if fit:
        fit_samples(parts, sizes[:last], swept, bounding_among(len(anchors), num_fit, NUM_BOUND))
    seconds = time.perf_counter() - began
    later = sweep(network, parts, sizes[last:], target, Shape())
    Saved(
        network=name,
        target=target.name,
        device=device_name(),
        seconds=seconds,
        versions=installed_versions(),
        num_fit=last - NUM_BOUND,
        num_bound=NUM_BOUND,
        sizes=sizes,
        swept=joined(swept, later, last),
    ).save(path)
    print(f"{name} on {target.name}: calibrated in {seconds:.0f} s", flush=True)


def joined(first: Swept, later: Swept, offset: int) -> Swept:
    """Two sweeps as one, in units of the first one's baseline."""
    scale = first.baseline.value / later.baseline.value
    moved = [Sample(s.shares, s.latency_ms * scale, s.stderr_ms * scale) for s in later.samples.values()]
    samples = {offset + i: sample for i, sample in zip(later.samples, moved, strict=True)}
    failures = {offset + i: failure for i, failure in later.failures.items()}
    return Swept({**first.samples, **samples}, {**first.failures, **failures}, first.baseline, first.drift)
