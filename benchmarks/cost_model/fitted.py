"""A saved sweep, fitted: the calibrated model with the samples it has seen and those it has not."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.cost_model.samples import Saved

from apportion.cost.calibrate import Calibrated, anchor_sizes, bounding_among, fit_samples, whole_sample
from apportion.cost.parts import Parts
from apportion.cost.sample import Sample
from apportion.cost.sweep import Swept
from apportion.cost.view import resee
from apportion.models import Partition, load


@dataclass(frozen=True)
class Fitted:
    """One network on one target. Samples are asked for under the view of some parts: how those see sizes."""

    saved: Saved
    parts: Parts
    bounding: frozenset[int]
    calibrated: Calibrated

    @classmethod
    def of(cls, path: Path) -> Fitted:
        saved = Saved.load(path)
        parts = _parts(saved.network.removesuffix("_batched"))
        last = saved.num_fit + saved.num_bound
        known = {i: sample for i, sample in saved.swept.samples.items() if i < last}
        num_anchors = len(anchor_sizes(parts.partition))
        bounding = bounding_among(num_anchors, saved.num_fit - num_anchors, saved.num_bound)
        swept = Swept(known, {}, saved.swept.baseline, saved.swept.drift)
        return cls(saved, parts, bounding, fit_samples(parts, saved.sizes, swept, bounding))

    @property
    def name(self) -> str:
        return f"{self.saved.network} {self.saved.target}"

    @property
    def num_known(self) -> int:
        """The first so many configurations were calibrated with; the others are held out."""
        return self.saved.num_fit + self.saved.num_bound

    def to_fit(self, parts: Parts) -> list[Sample]:
        """The whole network, and what the law is fitted to."""
        places = [i for i in self.saved.swept.samples if i < self.num_known and i not in self.bounding]
        return [whole_sample(parts, self.saved.swept), *self._seen(parts, places)]

    def to_bound(self, parts: Parts) -> list[Sample]:
        return self._seen(parts, self.bounding)

    def held_out(self, parts: Parts) -> list[Sample]:
        return self._seen(parts, [i for i in self.saved.swept.samples if i >= self.num_known])

    def _seen(self, parts: Parts, places: Collection[int]) -> list[Sample]:
        there = [i for i in self.saved.swept.samples if i in places]
        return resee(parts, [self.saved.sizes[i] for i in there], [self.saved.swept.samples[i] for i in there])


@cache
def _parts(network: str) -> Parts:
    loaded = load(f"benchmarks.cost_model.networks:{network}")
    return Parts.of(loaded, Partition.of(loaded))
