"""Counting with confidence: binomial limits, tolerance ranks and many tests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import beta


def binomial_upper(num_events: int, num_trials: int, confidence: float) -> float:
    r"""Clopper-Pearson upper limit on a probability (eq. K12).

    .. math:: \delta_u = \mathrm{Beta}^{-1}(\gamma;\, x + 1,\, n - x)

    ``num_events`` is :math:`x`, ``num_trials`` :math:`n`, ``confidence`` :math:`\gamma`. It is also the exact limit on
    the mass above the ``(n - x)``-th smallest of ``n`` samples, so a threshold picked from the samples may use it.

    Example:
        >>> round(binomial_upper(0, 59, 0.95), 4)
        0.0495
    """
    if num_events >= num_trials:
        return 1.0
    return float(beta.ppf(confidence, num_events + 1, num_trials - num_events))


def tolerance_rank(num_samples: int, delta: float, confidence: float) -> int:
    """The smallest rank whose sample leaves at most ``delta`` of the mass above it, with confidence (eq. K12).

    One more than the number of samples when even the largest does not.

    Example:
        >>> tolerance_rank(59, 0.05, 0.95), tolerance_rank(58, 0.05, 0.95)
        (59, 59)
    """
    low, high = 1, num_samples + 1
    while low < high:
        middle = (low + high) // 2
        if binomial_upper(num_samples - middle, num_samples, confidence) <= delta:
            high = middle
        else:
            low = middle + 1
    return low


def one_sided_p(difference: float, stderr: float) -> float:
    r"""p-value of "the true difference is not positive", :math:`1 - \Phi(d / s)` (eq. K23).

    With a standard error of zero the difference is taken as exact.

    Example:
        >>> round(one_sided_p(1.645, 1.0), 3), one_sided_p(0.1, 0.0), one_sided_p(-0.1, 0.0)
        (0.05, 0.0, 1.0)
    """
    if stderr == 0.0:
        return 0.0 if difference > 0.0 else 1.0
    return 0.5 * math.erfc(difference / stderr / math.sqrt(2.0))


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    r"""Which hypotheses to reject so that any wrong rejection has probability at most ``level`` (eq. K23).

    .. math:: \text{reject } p_{(1)}, \dots, p_{(k)} \text{ while } p_{(j)} \le \mathrm{level} / (n - j + 1)

    Example:
        >>> holm([0.01, 0.04, 0.9], 0.05)
        [True, False, False]
    """
    rejected = [False] * len(p_values)
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - place):
            break
        rejected[index] = True
    return rejected
