"""A method's frontier on one target: the accuracy of every episode over measured latency, read between its points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """Points by rising latency: ``latency_K`` as shares of the whole network's, ``accuracy_KN`` of the same episodes.

    Between two points every episode's accuracy is a line over the logarithm of latency, so differences of two methods
    stay paired by episode. Under the smallest latency there is nothing: a method is not judged where it was not
    measured. Above the largest the last point stays: time may be left over.
    """

    latency_K: Array
    accuracy_KN: Array

    @classmethod
    def of(cls, latency: Sequence[float], accuracy: Sequence[Array]) -> Curve:
        """Points in any order; of those with one latency the last, which had the larger budget."""
        last = {float(at): accuracy_N for at, accuracy_N in zip(latency, accuracy, strict=True)}
        order = sorted(last)
        return cls(np.array(order), np.stack([last[at] for at in order]))

    @property
    def smallest(self) -> float:
        return float(self.latency_K[0])

    def at(self, latency: float) -> Array | None:
        """Accuracy of every episode at a latency; None under the smallest.

        Example:
            >>> curve = Curve.of([0.1, 0.4], [np.array([0.0, 1.0]), np.array([1.0, 1.0])])
            >>> curve.at(0.2).round(6).tolist()
            [0.5, 1.0]
            >>> curve.at(0.09) is None
            True
        """
        if latency < self.smallest:
            return None
        place = min(int(np.searchsorted(self.latency_K, latency, side="right")) - 1, len(self.latency_K) - 1)
        if place == len(self.latency_K) - 1:
            return self.accuracy_KN[-1]
        low, high = np.log(self.latency_K[place : place + 2])
        weight = (np.log(latency) - low) / (high - low)
        return (1 - weight) * self.accuracy_KN[place] + weight * self.accuracy_KN[place + 1]

    def mean_from(self, latency: float) -> float:
        """Mean accuracy from a latency to the largest, over its logarithm: the area under the frontier by its width."""
        first = self.at(latency)
        assert first is not None
        some = self.latency_K > latency
        x = np.log([latency, *self.latency_K[some]])
        y = np.array([first.mean(), *self.accuracy_KN[some].mean(1)])
        return float(np.trapezoid(y, x) / (x[-1] - x[0]))


def meet(ours: Curve, other: Curve, latency: float) -> tuple[Array, Array] | None:
    """Two methods' accuracies at one latency, by episode: at the given one, or where the other begins if that is later.

    None if the other begins only where ours has its next point, which tells more about that latency.
    """
    later = ours.latency_K[ours.latency_K > latency]
    at = max(latency, other.smallest)
    if at > latency and (not len(later) or at >= later[0]):
        return None
    left, right = ours.at(at), other.at(at)
    assert left is not None
    assert right is not None
    count = min(len(left), len(right))
    return left[:count], right[:count]
