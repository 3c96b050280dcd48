"""A quality as a sample: its value with what every example adds to it, so that two models can be compared in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from apportion.core.meter import Reading
from apportion.models.network import Network


@dataclass(frozen=True)
class Sample:
    """A value whose standard error is that of the mean of its parts, one part for every example.

    ``counted`` parts are shares of one, which may all be alike by luck.
    """

    value: float
    part_N: Tensor
    counted: bool = True

    def reading(self) -> Reading:
        count = len(self.part_N)
        error = self.part_N.double().std().item() / math.sqrt(count) if count > 1 else 0.0
        return Reading(value=self.value, unit="ratio", stderr=error, count=count)

    def share_of(self, original: Sample) -> Reading:
        r"""The share of the original's value that this one keeps, both over the same examples (eq. Q2).

        .. math:: s = \frac{q}{q_0}, \quad
            \sigma = \frac{1}{q_0 (n + 2)} \sqrt{2 + \textstyle\sum_i (d_i - \bar d)^2}, \quad d_i = p_i - s\,p_{0i}

        ``part_N`` are the :math:`p_i`, the original's the :math:`p_{0i}`. Examples that both answer alike add nothing,
        so it is far smaller than the error of either value. Where parts are counted, one example lost and one won are
        added to those seen (Bonett and Price's adjustment: the 2s), as none seen is no proof that there is none.
        """
        share, count = self.value / original.value, len(self.part_N)
        part_N = self.part_N.double() - share * original.part_N.double()
        square = (part_N - part_N.mean()).square().sum().item()
        error = math.sqrt(square + 2) / (count + 2) if self.counted else math.sqrt(square / (count * max(1, count - 1)))
        return Reading(value=share, unit="ratio", stderr=error / original.value, count=count)


def apart(after: Reading, before: Reading) -> Reading:
    """The share of ``before`` that is left after, with both errors counted as if the examples were different ones."""
    share = after.value / before.value
    error = math.hypot(after.stderr, share * before.stderr) / before.value
    return Reading(value=share, unit="ratio", stderr=error, count=min(after.count, before.count))


@runtime_checkable
class Sampled(Protocol):
    """A quality meter that tells what every example adds."""

    def sample(self, model: Network) -> Sample: ...


@runtime_checkable
class SampledAnswers(Protocol):
    """One that can do so from answers computed elsewhere, too, in the order of its examples."""

    def sample_of(self, answer_ND: Tensor, readout: str) -> Sample: ...
