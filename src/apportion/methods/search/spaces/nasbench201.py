"""NAS-Bench-201 as a space: six edges with five operations each, trained and timed by others, read from tables.

A change at one edge is paid for by changes at other edges. Utility is the validation accuracy of recorded trainings,
cost a column of measured latencies; nothing is trained or timed here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property
from itertools import combinations, product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.methods.search.band import Costs
from apportion.methods.search.proxy import FULL, Request
from apportion.methods.search.space import Ladder, Proposal, Rung, SpaceError
from apportion.numerics.radius import sub_gaussian_scale
from apportion.tasks.domain import find_file

EDGES = ("01", "02", "12", "03", "13", "23")
OPS = ("none", "skip", "conv1", "conv3", "pool")
DATASETS = ("c10", "c100", "in16")
SHORT = "utility@12"
DataSet = Literal["c10", "c100", "in16"]
_CORE = ("nas/nb201_core.npz", "4d92d150b321f6133b54ac5d624ce0631906a5698474486761c34ef3aee1adc7")
_LATENCY = ("nas/nb201_latency_help.npz", "68a2f948f0120540975f7f2211df3670b7d6417eaaac29c6bd7b4369343b2a00")


class Nasbench201:
    """The 15,625 cells less those whose recorded cost contradicts their definition.

    ``max_edits`` is how many other edges a compensation may change.
    """

    name = "nasbench201"

    def __init__(self, max_edits: int = 1) -> None:
        self.max_edits = max_edits
        with (
            np.load(find_file(*_CORE), allow_pickle=False) as core,
            np.load(find_file(*_LATENCY), allow_pickle=False) as latency,
        ):
            self.core = {name: core[name] for name in core.files}
            self.latency = {name: latency[name] for name in latency.files}
        ops = [self.core[f"op_{edge}"].tolist() for edge in EDGES]
        self.archs = [
            Setting({edge: OPS[op] for edge, op in zip(EDGES, row, strict=True)}) for row in zip(*ops, strict=True)
        ]
        self.row = {arch: row for row, arch in enumerate(self.archs)}
        self.kept = ~self.core["cost_mismatch"].astype(bool)

    @property
    def layers(self) -> Sequence[str]:
        return EDGES

    @property
    def devices(self) -> list[str]:
        """The columns of measured latencies; the one that is a tool's estimate is left out."""
        help_columns = [name.removeprefix("lat_ms_") for name in self.latency if name.startswith("lat_ms_")]
        return [name for name in help_columns if name != "eyeriss"] + [f"nats_gpu_{data}" for data in DATASETS]

    def start(self) -> Setting:
        return Setting(dict.fromkeys(EDGES, "conv1"))

    def check(self, arch: Setting) -> None:
        if arch not in self.row:
            raise SpaceError(f"{dict(arch)} is no NAS-Bench-201 cell; give one of {', '.join(OPS)} for every edge")
        if not self.kept[self.row[arch]]:
            raise SpaceError(f"{dict(arch)} is one of the cells whose recorded cost is wrong; choose another")

    def proposals(self, arch: Setting, layer: str) -> list[Proposal]:
        return [Proposal(layer, {layer: op}) for op in OPS if op != arch[layer]]

    def ladders(self, arch: Setting, layer: str) -> list[Ladder]:
        others = [edge for edge in EDGES if edge != layer]
        rungs = []
        for num_edits in range(self.max_edits + 1):
            for edges in combinations(others, num_edits):
                for ops in product(*([op for op in OPS if op != arch[edge]] for edge in edges)):
                    made = Setting({**arch, **dict(zip(edges, ops, strict=True))}) if edges else arch
                    if self.kept[self.row[made]]:
                        rungs.append(Rung(made, float(num_edits)))
        return [Ladder(tuple(rungs), ordered=False)]

    def random(self, rng: random.Random) -> Setting:
        while True:
            row = rng.randrange(len(self.archs))
            if self.kept[row]:
                return self.archs[row]

    def column(self, name: str) -> NDArray[np.float64]:
        """A cost of every cell: the latency on a device, ``params`` or ``flops``."""
        if name == "params":
            return np.asarray(self.core["params_M"], dtype=np.float64) * 1e6
        if name == "flops":
            return np.asarray(self.core["macs_M"], dtype=np.float64) * 2e6
        if name in self.devices:
            if name.startswith("nats_gpu_"):
                return np.asarray(self.core[f"{name.removeprefix('nats_gpu_')}_lat_ms_nats_gpu"], dtype=np.float64)
            return np.asarray(self.latency[f"lat_ms_{name}"], dtype=np.float64)
        raise SpaceError(f"unknown device {name!r}; possible are {', '.join(self.devices)}, params, flops")


class TableCost:
    """Costs read from columns of the table, one key per device or count."""

    def __init__(self, space: Nasbench201, names: Sequence[str]) -> None:
        units = {"params": "params", "flops": "FLOPs"}
        keys = {name: name if name in units else f"latency@{name}" for name in names}
        columns = {keys[name]: space.column(name) for name in names}
        self._row = space.row
        self._readings: list[Costs] = [
            {
                key: Reading(value=float(column[row]), unit=units.get(key, "ms"))
                for key, column in columns.items()
                if np.isfinite(column[row])
            }
            for row in range(len(space.archs))
        ]

    def __call__(self, arch: Setting) -> Costs:
        return self._readings[self._row[arch]]


class TableProxy:
    """Evaluates a cell by drawing from recorded trainings; its utility is the mean of its own recorded runs.

    ``noise`` is ``pooled``: the mean plus a residual drawn from those of all cells of the upper three quarters by
    accuracy, the same law for every cell, as theory assumes; or ``own``: one of the cell's two or three runs, with
    replacement, so that the noise differs from cell to cell. The draw depends on the seed and the request alone.
    """

    def __init__(
        self, space: Nasbench201, data: DataSet, seed: int = 0, noise: Literal["pooled", "own"] = "pooled"
    ) -> None:
        self.space, self.data, self.seed, self.noise = space, data, seed, noise

    @cached_property
    def runs(self) -> list[list[float]]:
        names = [name for name in self.space.core if name.startswith(f"{self.data}_val200_s")]
        value_RN = np.array([self.space.core[name] for name in names], dtype=np.float64)
        return [[value for value in column if np.isfinite(value)] for column in value_RN.T.tolist()]

    @cached_property
    def truth(self) -> NDArray[np.float64]:
        """The utility of every cell."""
        return np.array([sum(runs) / len(runs) for runs in self.runs])

    @cached_property
    def residuals(self) -> list[float]:
        """Differences of recorded runs from their cell's mean, scaled to the spread of one run, without bias."""
        floor = np.quantile(self.truth[self.space.kept], 0.25)
        rows = np.flatnonzero(self.space.kept & (self.truth >= floor)).tolist()
        drawn = [
            (value - self.truth[row]) * (len(self.runs[row]) / (len(self.runs[row]) - 1)) ** 0.5
            for row in rows
            for value in self.runs[row]
        ]
        mean = sum(drawn) / len(drawn)
        return [value - mean for value in drawn]

    @cached_property
    def sigma(self) -> float:
        """The sub-Gaussian scale of the pooled residuals (eq. I21)."""
        return sub_gaussian_scale(np.array(self.residuals))

    def evaluate(self, request: Request) -> float:
        row = self.space.row[request.arch]
        if request.fidelity == SHORT:
            return float(self.space.core[f"{self.data}_val12"][row])  # one recorded short training: no noise to draw
        assert request.fidelity == FULL
        text = f"{self.seed}|{row}|{request.replicate}".encode()
        draw = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
        if self.noise == "own":
            return self.runs[row][draw % len(self.runs[row])]
        return float(self.truth[row]) + self.residuals[draw % len(self.residuals)]
