"""Recursive least squares with forgetting: one exact update per new point, no history kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def recursive_least_squares(
    theta_D: Array, spread_DD: Array, row_D: Array, value: float, forgetting: float
) -> tuple[Array, Array]:
    r"""One step of recursive least squares (eq. K20).

    .. math:: g = \frac{P x}{\lambda + x^\top P x}, \quad
        \theta' = \theta + g\,(y - x^\top \theta), \quad P' = (P - g\, x^\top P) / \lambda

    ``theta_D`` is :math:`\theta`, ``spread_DD`` :math:`P`, ``row_D`` :math:`x`, ``value`` :math:`y`, ``forgetting``
    :math:`\lambda`. After ``n`` steps from :math:`(\theta_0, P_0)`, :math:`\theta` minimises
    :math:`\sum_i \lambda^{n-i} (y_i - x_i^\top \theta)^2 + \lambda^n \|\theta - \theta_0\|^2_{P_0^{-1}}`.
    """
    along_D = spread_DD @ row_D
    gain_D = along_D / (forgetting + row_D @ along_D)
    shrunk_DD = (spread_DD - np.outer(gain_D, along_D)) / forgetting
    return theta_D + gain_D * (value - row_D @ theta_D), (shrunk_DD + shrunk_DD.T) / 2
