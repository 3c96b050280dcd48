"""The clock of a search: candidates measured beside the anchor on every target, and an estimate that proposes them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.cost.grid import GridAudit, audit_grid
from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.store import Store
from apportion.device.target import Target
from apportion.errors import MeasureError
from apportion.methods.search.band import Costs
from apportion.methods.search.spaces.blocks import BlockSpace

_ANCHOR = "anchor"
_AT_ONCE = 20  # starting a process takes longer than measuring a few candidates
AUDITED = (16, 20, 24, 28, 32, 40, 48, 56, 64)


class Clock:
    """Measures architectures as ratios to the anchor's latency in the same process, times the anchor's own latency.

    A slow minute then falls on both. Sessions are stored by content: nothing is measured twice, and a killed search
    goes on. ``memory`` adds peak activation memory, which is counted, not timed.
    """

    def __init__(
        self,
        space: BlockSpace,
        targets: Sequence[Target],
        anchor: Setting,
        store: Store,
        *,
        seconds: float = 1.2,
        processes: int = 1,
        memory: bool = False,
    ) -> None:
        self.space, self.targets, self.anchor, self.store = space, targets, anchor, store
        self.seconds, self.processes, self.memory = seconds, processes, memory
        self.num_measured = 0
        self.on_step: Callable[[int], None] | None = None
        self._base: dict[str, Reading] = {}

    def key(self, target: Target) -> str:
        return f"latency@{target.name}"

    def base(self) -> Costs:
        """The anchor's own latencies, from several processes."""
        for target in self.targets:
            if target.name not in self._base:
                session = self._session(target, [self.anchor], processes=4)
                if session.failures:
                    failure = next(iter(session.failures.values()))
                    raise MeasureError(
                        f"the anchor can't be measured on {target.name}: {failure.kind}: {failure.message}"
                    )
                self._base[target.name] = session.latency(_ANCHOR)
        made = {self.key(target): self._base[target.name] for target in self.targets}
        return {**made, **(self._memory(self.anchor) if self.memory else {})}

    def measure(self, archs: Sequence[Setting]) -> dict[Setting, Costs]:
        """Measures architectures side by side; one that fails on some target is left out."""
        base = self.base()
        found: dict[Setting, dict[str, Reading]] = {arch: {} for arch in archs}
        for begin in range(0, len(archs), _AT_ONCE):
            group = list(archs[begin : begin + _AT_ONCE])
            for target in self.targets:
                session = self._session(target, [self.anchor, *(arch for arch in group if arch != self.anchor)])
                anchor = base[self.key(target)]
                for arch in group:
                    name = _ANCHOR if arch == self.anchor else digest(arch)
                    if name in session.failures or _ANCHOR in session.failures:
                        found.pop(arch, None)
                        continue
                    ratio = session.ratio(name, _ANCHOR)
                    if arch in found:
                        found[arch][self.key(target)] = Reading(
                            value=ratio.value * anchor.value,
                            unit="ms",
                            stderr=0.0 if arch == self.anchor else ratio.stderr * anchor.value,
                            count=ratio.count,
                        )
        if self.memory:
            for arch in found:
                found[arch] |= self._memory(arch)
        self.num_measured += len(archs)
        if self.on_step is not None:
            self.on_step(self.num_measured)
        return dict(found)

    def check(self, arch: Setting) -> Costs:
        """One architecture beside the anchor in three fresh processes, which a decision of consequence needs."""
        if arch == self.anchor:
            return self.measure([arch])[arch]
        found = dict(self._memory(arch)) if self.memory else {}
        for target in self.targets:
            session = self._session(target, [self.anchor, arch], processes=4).require()
            ratio, anchor = session.ratio(digest(arch), _ANCHOR), self.base()[self.key(target)].value
            found[self.key(target)] = Reading(
                value=ratio.value * anchor, unit="ms", stderr=ratio.stderr * anchor, count=ratio.count
            )
        return found

    def _session(self, target: Target, archs: Sequence[Setting], processes: int | None = None) -> Session:
        processes = processes or self.processes
        what = {
            "space": self.space.name,
            "archs": [dict(arch) for arch in archs],
            "anchor": dict(self.anchor),
            "target": target.to_json(),
            "seconds": self.seconds,
            "processes": processes,
        }
        stored = self.store.get_or_make(what, lambda: self._measure_now(target, archs, processes).to_json())
        return Session.from_json(stored)

    def _measure_now(self, target: Target, archs: Sequence[Setting], processes: int) -> Session:
        from apportion.models.save import save

        with tempfile.TemporaryDirectory() as scratch:
            candidates = []
            for number, arch in enumerate(archs):
                folder = Path(scratch) / str(number)
                save(self.space.build(arch), folder)
                name = _ANCHOR if arch == self.anchor else digest(arch)
                candidates.append(Candidate(name=name, ref=str(folder)))
            seconds = self.seconds * max(1.0, len(archs) / 4)
            return measure(candidates, target, Shape(), processes=processes, seconds=seconds, tolerance=0.01)

    def _memory(self, arch: Setting) -> dict[str, Reading]:
        from apportion.device.memory import AllocatedPeak

        return {"memory": AllocatedPeak().read(self.space.build(arch))}


def audit_widths(space: BlockSpace, target: Target, store: Store, widths: Sequence[int] = AUDITED) -> GridAudit:
    """Which multiples of a width a target likes: every block at each width in turn, judged by the grid audit (K25).

    Its ``step`` is the grid to search on; the span of its inversions is the K that bracketing allows for.
    """
    fine = replace(space, align=math.gcd(*widths), min_width=min(widths), precisions=space.precisions)
    start = fine.start()
    archs = {
        width: Setting({**start, **{f"{layer}.width": width for layer in fine.layers}}) for width in sorted(widths)
    }
    clock = Clock(fine, [target], archs[max(widths)], store, seconds=2.5)
    measured = clock.measure(list(archs.values()))
    readings = {width: measured[arch][clock.key(target)] for width, arch in archs.items() if arch in measured}
    return audit_grid(
        list(readings), [one.value for one in readings.values()], [one.stderr for one in readings.values()]
    )


def digest(arch: Setting) -> str:
    """A short name of an architecture."""
    import hashlib

    return hashlib.sha256(repr(sorted(arch.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Work:
    """Estimated latency from counted work: a price per call, FLOP and byte of every kind of layer (eq. I22).

    Prices are fitted to measured architectures and never negative, so more work never costs less.
    """

    space: BlockSpace
    kinds: tuple[str, ...]
    prices: Mapping[str, tuple[float, ...]]
    memory: bool = False

    def __call__(self, arch: Setting) -> Costs:
        row = features(self.space, arch, self.kinds)
        made = {
            key: Reading(value=max(float(row @ np.array(price)), 1e-6), unit="ms") for key, price in self.prices.items()
        }
        if self.memory:
            from apportion.device.memory import AllocatedPeak

            made["memory"] = AllocatedPeak().read(self.space.build(arch))
        return made

    @classmethod
    def fit(cls, space: BlockSpace, measured: Mapping[Setting, Costs], *, memory: bool = False) -> Work:
        r"""Non-negative least squares on relative errors, with a little shrinkage (eq. I22).

        .. math:: \min_{p \ge 0} \sum_i \Big(\frac{\phi(x_i)^\top p}{y_i} - 1\Big)^2
            + \rho^2 \sum_k \Big(\frac{p_k \bar\phi_k}{\bar y}\Big)^2
        """
        kinds = tuple(sorted({kind for arch in measured for kind in counted(space, arch)}))
        row_NF = np.array([features(space, arch, kinds) for arch in measured])
        scale_F = np.maximum(row_NF.mean(axis=0), 1e-12)
        prices = {}
        for key in sorted({key for costs in measured.values() for key in costs if key.startswith("latency")}):
            latency_N = np.array([costs[key].value for costs in measured.values()])
            scaled = row_NF / scale_F / latency_N[:, None] * latency_N.mean()
            ridge = 0.03 * np.eye(len(scale_F))
            solution, _ = nnls(
                np.vstack([scaled, ridge]), np.concatenate([np.ones(len(latency_N)), np.zeros(len(scale_F))])
            )
            prices[key] = tuple((solution * latency_N.mean() / scale_F).tolist())
        return cls(space, kinds, prices, memory)


def features(space: BlockSpace, arch: Setting, kinds: Sequence[str]) -> Any:
    """A constant, then calls, FLOPs and bytes of every kind of layer."""
    work = counted(space, arch)
    return np.array([1.0, *(value for kind in kinds for value in work.get(kind, (0.0, 0.0, 0.0)))])


def counted(space: BlockSpace, arch: Setting) -> dict[str, tuple[float, float, float]]:
    """Calls, FLOPs and bytes written by every kind of layer in one forward pass; in fp32 a kind of its own beside int8.

    The pass is real, on weights that nobody drew: at these sizes several times faster than one without numbers.
    """
    import torch
    from torch import nn
    from transformers.initialization import no_init_weights

    from apportion.models.templates import ARCHITECTURES

    with no_init_weights():
        module = ARCHITECTURES[space.architecture](space.config(arch)).eval()
    inputs = torch.zeros(1, space.num_channels, space.image_size, space.image_size)
    work: dict[str, list[float]] = {}

    def count(where: str, layer: Any, given: Any, output: Any) -> None:
        values = output.numel()
        if isinstance(layer, nn.Conv2d):
            each = layer.weight[0].numel()
            shape = "depthwise" if layer.groups > 1 else "point" if layer.kernel_size == (1, 1) else "dense"
            kind = f"{shape}{layer.kernel_size[0]}" if shape == "depthwise" else shape
        elif isinstance(layer, nn.Linear):
            kind, each = "linear", layer.in_features
        else:
            kind, each = "elementwise", 1
        kind += where
        row = work.setdefault(kind, [0.0, 0.0, 0.0])
        row[0] += 1
        row[1] += 2.0 * values * each
        row[2] += 4.0 * values

    left = [f"{part}." for part in module.fp32_parts] if "int8" in space.precisions else []
    handles = [
        part.register_forward_hook(partial(count, " in fp32" if name.startswith(tuple(left)) else ""))
        for name, part in module.named_modules()
        if not list(part.children()) and not isinstance(part, nn.Identity)
    ]
    try:
        with torch.no_grad():
            module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {kind: (row[0], row[1], row[2]) for kind, row in work.items()}
