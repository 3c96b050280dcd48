"""Robust statistics of timings: medians, their standard errors and intervals, quantiles of a few process means."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence


def mad(samples: Sequence[float]) -> float:
    r"""Median absolute deviation, scaled to agree with the standard deviation of a normal law (eq. S1).

    .. math:: \mathrm{MAD} = 1.4826 \, \mathrm{med}_i |x_i - \mathrm{med}_j x_j|

    Example:
        >>> round(mad([1.0, 2.0, 3.0, 4.0, 100.0]), 4)
        1.4826
    """
    centre = statistics.median(samples)
    return 1.4826 * statistics.median(abs(sample - centre) for sample in samples)


def median_stderr(samples: Sequence[float]) -> float:
    r"""Standard error of the median from its order statistics, free of the law of the samples (eq. S2).

    .. math:: s = \frac{x_{(u)} - x_{(l)}}{2 z}, \quad l, u = \frac{n}{2} \mp \frac{z \sqrt{n}}{2}, \quad z = 1.96

    ``x_(l)`` and ``x_(u)`` bound the distribution-free 95 % interval of the median. Infinite below six samples, where
    that interval does not exist.
    """
    n = len(samples)
    if n < 6:
        return math.inf
    ordered = sorted(samples)
    half = 1.96 * math.sqrt(n) / 2
    lower, upper = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half) - 1)
    return (ordered[upper] - ordered[lower]) / (2 * 1.96)


def bootstrap_interval(
    samples: Sequence[float], *, confidence: float = 0.95, num_draws: int = 1000, seed: int = 0
) -> tuple[float, float]:
    r"""Percentile bootstrap interval of the median (eq. S4).

    .. math:: [Q_{\alpha/2}(m^*), Q_{1-\alpha/2}(m^*)], \quad m^* = \mathrm{med}(x^*_1 \dots x^*_n)

    :math:`x^*` are drawn from the samples with replacement. Of a sorted list a draw's median needs one place in the
    middle (two, if :math:`n` is even), and places follow from uniform order statistics, which are beta variables: no
    resample is written out, and the law is the same. Samples that follow each other closely in time are alike, which
    no bootstrap of single samples sees; fresh processes show that.

    Example:
        >>> bootstrap_interval([1.0, 2.0, 3.0, 4.0, 100.0])
        (1.0, 100.0)
    """
    ordered, n, rng = sorted(samples), len(samples), random.Random(seed)
    medians = []
    for _ in range(num_draws):
        lower = (n + 1) // 2
        at = rng.betavariate(lower, n + 1 - lower)
        after = at if n % 2 else at + (1 - at) * rng.betavariate(1, n - lower)
        medians.append((ordered[min(int(n * at), n - 1)] + ordered[min(int(n * after), n - 1)]) / 2)
    return quantile(medians, (1 - confidence) / 2), quantile(medians, (1 + confidence) / 2)


def quantile(samples: Sequence[float], q: float) -> float:
    """The ``q``-quantile by linear interpolation.

    Example:
        >>> quantile([1.0, 2.0, 3.0], 0.75)
        2.5
    """
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def normal_quantile(confidence: float) -> float:
    """The one-sided ``z`` of a confidence level.

    Example:
        >>> round(normal_quantile(0.95), 3)
        1.645
    """
    return statistics.NormalDist().inv_cdf(confidence)


_T_95 = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # one-sided, by degrees


def mean_stderr(values: Sequence[float]) -> float:
    r"""Standard error of a mean of few values, widened so that normal quantiles apply at 95 % (eq. S3).

    .. math:: s = \frac{\hat\sigma}{\sqrt n} \cdot \frac{t_{0.95, n-1}}{z_{0.95}}

    Infinite for a single value, whose spread is unknown.
    """
    n = len(values)
    if n < 2:
        return math.inf
    degrees = n - 1
    t = _T_95[degrees] if degrees < len(_T_95) else normal_quantile(0.95)
    return statistics.stdev(values) / math.sqrt(n) * t / normal_quantile(0.95)
