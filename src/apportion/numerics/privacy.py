"""Differential privacy of Gaussian releases: the exact accountant, and Rényi's as a check from above."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.optimize import brentq
from scipy.stats import norm

_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [128, 256, 512]


def combined_shift(multipliers: Sequence[float]) -> float:
    r"""What several Gaussian releases amount to: one with :math:`\mu = \sqrt{\sum_i 1/\sigma_i^2}` (eq. C33).

    ``multipliers`` are the :math:`\sigma_i`, the noise of each release in units of its sensitivity (Dong et al., 2022).
    """
    if not multipliers or min(multipliers) <= 0:
        raise ValueError(f"noise multipliers must be positive, got {list(multipliers)}")
    return math.sqrt(sum(1 / sigma**2 for sigma in multipliers))


def delta_of(epsilon: float, multipliers: Sequence[float]) -> float:
    r"""The exact :math:`\delta` of Gaussian releases at an :math:`\varepsilon` (eq. C34; Balle and Wang, 2018).

    .. math:: \delta = \Phi(-\varepsilon/\mu + \mu/2) - e^\varepsilon \Phi(-\varepsilon/\mu - \mu/2)
    """
    mu = combined_shift(multipliers)
    log_second = epsilon + float(norm.logcdf(-epsilon / mu - mu / 2))
    return max(0.0, float(norm.cdf(-epsilon / mu + mu / 2)) - math.exp(min(log_second, 0.0)))


def epsilon_of(delta: float, multipliers: Sequence[float]) -> float:
    """The least ε that Gaussian releases keep at a δ."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta}")
    if delta_of(0.0, multipliers) <= delta:
        return 0.0
    high = 1.0
    while delta_of(high, multipliers) > delta:
        high *= 2
    return float(brentq(lambda epsilon: delta_of(epsilon, multipliers) - delta, 0.0, high, xtol=1e-10))


def multiplier_for(epsilon: float, delta: float, num_releases: int = 1) -> float:
    """The least noise multiplier at which that many releases together are (ε, δ)-private."""
    if epsilon <= 0 or num_releases < 1:
        raise ValueError(f"epsilon {epsilon} and the number of releases {num_releases} must be positive")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta}")
    low, high = 1e-6, 1.0  # the shift that all releases together may make; more shift, more delta
    while delta_of(epsilon, [1 / high]) < delta and high < 1e6:
        high *= 2
    shift = float(brentq(lambda mu: delta_of(epsilon, [1 / mu]) - delta, low, high, xtol=1e-12))
    return (1 + 1e-9) * math.sqrt(num_releases) / shift


def renyi_epsilon(delta: float, multipliers: Sequence[float]) -> float:
    r"""What a Rényi accountant says of the same releases (eq. C35): never less than the exact ε.

    .. math:: \varepsilon = \min_\alpha \frac{\alpha \mu^2}{2} + \log\frac{\alpha - 1}{\alpha}
              - \frac{\log\delta + \log\alpha}{\alpha - 1}
    """
    mu = combined_shift(multipliers)
    return max(
        0.0,
        min(
            order * mu**2 / 2 + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)
            for order in _ORDERS
        ),
    )
