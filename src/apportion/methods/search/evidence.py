"""Evidence: what the proxy said about every architecture, with intervals that all hold at once, whenever looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from apportion.core.knob import Setting
from apportion.errors import ApportionError
from apportion.numerics.radius import (
    bernstein_radius,
    mixture_radius,
    spend,
    stitched_radius,
    student_radius,
    union_radius,
)

Radius: TypeAlias = Callable[[int, float, float], float]
"""From the count, the sample variance and the failure probability to the radius."""
Bound: TypeAlias = Literal["mixture", "stitched", "union"]
BOUNDS = {"mixture": mixture_radius, "stitched": stitched_radius, "union": union_radius}


def known_sigma(sigma: float, bound: Bound = "mixture", best_at: int = 16) -> Radius:
    """Sub-Gaussian noise of a known scale."""
    if not (math.isfinite(sigma) and sigma > 0.0) or bound not in BOUNDS:
        raise ApportionError(f"sigma is {sigma!r} with bound {bound!r}; give a scale above 0 and one of {[*BOUNDS]}")
    if bound == "mixture":
        return lambda count, variance, delta: mixture_radius(count, sigma, delta, best_at)
    return lambda count, variance, delta: BOUNDS[bound](count, sigma, delta)


def estimated_sigma(best_at: int = 16) -> Radius:
    """Normal noise of a scale estimated from each arm's own samples."""
    return lambda count, variance, delta: student_radius(count, variance, delta, best_at)


def bounded(width: float) -> Radius:
    """Samples in an interval of a known width, by the empirical Bernstein radius."""
    return lambda count, variance, delta: bernstein_radius(count, variance, width, delta)


@dataclass(slots=True)
class Arm:
    """A candidate competing for evaluations: count, running mean and sum of squares, and what it may spend of delta."""

    delta: float
    num_pulls: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.num_pulls += 1
        step = value - self.mean
        self.mean += step / self.num_pulls
        self.squares += step * (value - self.mean)

    @property
    def variance(self) -> float:
        return self.squares / (self.num_pulls - 1) if self.num_pulls > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its simultaneous confidence interval."""

    mean: float
    low: float
    high: float
    num_pulls: int

    def to_json(self) -> dict[str, float | None]:
        def finite(value: float) -> float | None:
            return round(value, 6) if math.isfinite(value) else None

        return {"mean": finite(self.mean), "low": finite(self.low), "high": finite(self.high), "n": self.num_pulls}


class Evidence:
    """Samples by architecture. The ``i``-th architecture seen may spend ``delta / (i (i + 1))`` (eq. I7), so that all
    intervals hold at every time with probability ``1 - delta``, however the architectures came up."""

    def __init__(self, radius: Radius, delta: float, *, num_arms: int | None = None) -> None:
        if not 0.0 < delta < 1.0:
            raise ApportionError(f"confidence is {1 - delta!r}; give one above 0 and below 1, such as 95%")
        self.radius, self.delta, self.num_arms = radius, delta, num_arms
        self.arms: dict[Setting, Arm] = {}
        self._cache: dict[Setting, Interval] = {}

    def arm(self, arch: Setting) -> Arm:
        found = self.arms.get(arch)
        if found is None:
            number = len(self.arms) + 1
            share = self.delta / self.num_arms if self.num_arms else spend(self.delta, number)
            found = self.arms[arch] = Arm(share)
        return found

    def add(self, arch: Setting, value: float) -> None:
        if not math.isfinite(value):
            raise ApportionError(f"the proxy returned {value!r}; a candidate that can't be evaluated must be left out")
        self.arm(arch).add(value)
        self._cache.pop(arch, None)

    def interval(self, arch: Setting) -> Interval:
        found = self._cache.get(arch)
        if found is None:
            arm = self.arm(arch)
            radius = self.radius(arm.num_pulls, arm.variance, arm.delta)
            found = self._cache[arch] = Interval(arm.mean, arm.mean - radius, arm.mean + radius, arm.num_pulls)
        return found

    def num_pulls(self, arch: Setting) -> int:
        arm = self.arms.get(arch)
        return arm.num_pulls if arm else 0

    def mean(self, arch: Setting) -> float:
        return self.arm(arch).mean
