"""Confidence radii of a mean: one that holds at a single fixed count, and four that hold at every stopping time.

All are two-sided: the mean stays within the radius of its expectation with probability at least ``1 - delta``.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import lambertw


def fixed_radius(count: int, sigma: float, delta: float) -> float:
    r"""The sub-Gaussian radius at one count chosen beforehand (eq. I1); not valid at a data-dependent one.

    .. math:: r = \sigma \sqrt{2 \log(2/\delta) / n}

    ``count`` is :math:`n`, ``sigma`` the sub-Gaussian scale of one sample.

    Example:
        >>> round(fixed_radius(8, 1.0, 0.05), 3)
        0.96
    """
    return math.inf if count < 1 else sigma * math.sqrt(2.0 * math.log(2.0 / delta) / count)


def union_radius(count: int, sigma: float, delta: float) -> float:
    r"""The radius at every count at once, by a union bound with :math:`\delta_n = \delta / (n(n+1))` (eq. I2).

    .. math:: r = \sigma \sqrt{2 \log(2 n (n + 1)/\delta) / n}
    """
    return math.inf if count < 1 else fixed_radius(count, sigma, delta / (count * (count + 1)))


def stitched_radius(count: int, sigma: float, delta: float) -> float:
    r"""The polynomial stitched boundary of Howard, Ramdas, McAuliffe and Sekhon 2021, their eq. 2 (eq. I3).

    .. math:: r = 1.7\, \sigma \sqrt{\frac{\log\log(2n) + 0.72 \log(10.4/\delta)}{n}}

    Its growth, the iterated logarithm, is the slowest possible; its constant shows at small counts.
    """
    if count < 1:
        return math.inf
    return 1.7 * sigma * math.sqrt((math.log(math.log(2.0 * count)) + 0.72 * math.log(10.4 / delta)) / count)


def mixture_radius(count: int, sigma: float, delta: float, best_at: int = 16) -> float:
    r"""The two-sided normal mixture boundary of Robbins, valid at every count (eq. I4).

    .. math:: r = \frac{\sigma}{n} \sqrt{(n + \rho) \log\frac{n + \rho}{\rho\, \delta^2}}

    :math:`\rho` makes the radius smallest at ``best_at`` samples.
    """
    if count < 1:
        return math.inf
    rho = mixture_rho(best_at, delta)
    return sigma * math.sqrt((count + rho) * math.log((count + rho) / (rho * delta**2))) / count


@lru_cache(maxsize=4096)
def mixture_rho(best_at: int, delta: float) -> float:
    r"""The :math:`\rho` that makes :func:`mixture_radius` smallest at ``best_at`` samples (eq. I4).

    .. math:: \rho = \frac{n}{-W_{-1}(-\delta^2/e) - 1}
    """
    return best_at / (-float(lambertw(-(delta**2) / math.e, k=-1).real) - 1.0)


def student_radius(count: int, variance: float, delta: float, best_at: int = 16) -> float:
    r"""The anytime-valid Student radius: normal noise whose scale is not known (eq. I5; Lai 1976).

    .. math:: r^2 = \frac{S (1 - 1/T)}{n^2/(n + \rho) - n(1 - 1/T)}, \quad
        T = \Big(\frac{n + \rho}{\rho\,\delta^2}\Big)^{1/n}, \quad S = (n - 1) s^2

    ``variance`` is the sample variance :math:`s^2` with ``n - 1`` in the denominator. From a normal mixture over the
    effect size under the scale-invariant prior; infinite while the samples are too few to say anything. It assumes
    normal noise, where the other radii ask only for a sub-Gaussian scale.
    """
    if count < 2:
        return math.inf
    rho = mixture_rho(best_at, delta)
    inverse = (rho * delta**2 / (count + rho)) ** (1.0 / count)
    room = count**2 / (count + rho) - count * (1.0 - inverse)
    if room <= 0.0:
        return math.inf
    return math.sqrt((count - 1) * variance * (1.0 - inverse) / room)


def bernstein_radius(count: int, variance: float, width: float, delta: float) -> float:
    r"""The empirical Bernstein radius of Maurer and Pontil 2009 at every count, by the union bound of I2 (eq. I6).

    .. math:: r = \sqrt{\frac{2 s^2 \log(4/\delta_n)}{n}} + \frac{7\, w \log(4/\delta_n)}{3 (n - 1)}, \quad
        \delta_n = \frac{\delta}{n (n + 1)}

    For samples in an interval of the given ``width`` :math:`w`; ``variance`` is the sample variance :math:`s^2`.
    """
    if count < 2:
        return math.inf
    log = math.log(4.0 * count * (count + 1) / delta)
    return math.sqrt(2.0 * variance * log / count) + 7.0 * width * log / (3.0 * (count - 1))


def spend(delta: float, number: int) -> float:
    r"""What the ``number``-th of arbitrarily many intervals may spend so that all hold at once (eq. I7).

    .. math:: \delta_i = \frac{\delta}{i (i + 1)}, \qquad \sum_{i \ge 1} \delta_i = \delta

    Example:
        >>> spend(0.06, 1), round(spend(0.06, 2), 6)
        (0.03, 0.01)
    """
    return delta / (number * (number + 1))


def sub_gaussian_scale(sample_N: NDArray[np.float64]) -> float:
    r"""The smallest sigma for which draws from a finite population of mean zero are sub-Gaussian (eq. I21).

    .. math:: \sigma^2 = \sup_{t \ne 0} \frac{2}{t^2} \log \frac1N \sum_i e^{t x_i}

    The supremum is taken over a fine logarithmic grid of ``t``, on both sides.
    """
    spread = float(np.abs(sample_N).max())
    best = float(np.var(sample_N))  # the limit at zero
    for t in np.geomspace(0.01, 100.0, 200) / spread:
        for side in (t, -t):
            log_mean = float(np.logaddexp.reduce(side * sample_N) - np.log(len(sample_N)))
            best = max(best, 2.0 * log_mean / side**2)
    return math.sqrt(best)
