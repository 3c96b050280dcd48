"""Weights over losses for an objective that looks at the worst of them: tail mean, worst group, divergence ball.

Shape letters: E losses, G groups.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def cvar_weights(loss_E: Array, beta: float) -> Array:
    r"""Weights under which the mean of the losses is their CVaR (eq. A7; the paper's eq. 6).

    The worst ``(1 - beta) E`` losses share the weight evenly, the last of them by the part that fits.

    Example:
        >>> cvar_weights(np.array([1.0, 4.0, 2.0, 3.0]), 0.5).tolist()
        [0.0, 0.5, 0.0, 0.5]
    """
    if not 0 <= beta < 1:
        raise ValueError(f"beta is {beta}; give a share in [0, 1)")
    size = max((1 - beta) * len(loss_E), 1.0)
    weight_E = np.zeros(len(loss_E))
    left = size
    for place in np.argsort(-loss_E, kind="stable"):
        weight_E[place] = min(1.0, left) / size
        left -= min(1.0, left)
        if left <= 1e-12:
            break
    return weight_E


def kl_weights(loss_E: Array, radius: float) -> Array:
    r"""The worst distribution within a Kullback-Leibler ball around the uniform one (eq. A8; the paper's eq. 5).

    .. math:: q^* = \arg\max_{\mathrm{KL}(q \,\|\, u) \le r} q^\top \ell \propto e^{\ell / t}

    ``radius`` is :math:`r`; the temperature :math:`t` that uses it up is found by bisection. A radius of
    :math:`\log E` and more puts all weight on the worst.
    """
    if radius < 0:
        raise ValueError(f"a radius of {radius} is not possible; give 0 or more")
    spread = float(loss_E.max() - loss_E.min())
    if radius == 0 or spread == 0:
        return np.full(len(loss_E), 1 / len(loss_E))
    if radius >= math.log(len(loss_E) / np.count_nonzero(loss_E == loss_E.max())):
        worst_E = (loss_E == loss_E.max()).astype(np.float64)
        return np.asarray(worst_E / worst_E.sum())
    low, high = 1e-6 * spread, 1e6 * spread
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _divergence(_tilted(loss_E, middle)) > radius else (low, middle)
    return _tilted(loss_E, high)


class GroupWeights:
    r"""Weights over groups that grow with their losses (group DRO, eq. A9).

    .. math:: q_g \leftarrow q_g\, e^{\eta \ell_g} \big/ \textstyle\sum_h q_h\, e^{\eta \ell_h}
    """

    def __init__(self, num_groups: int, rate: float) -> None:
        self.rate = rate
        self.weight_G = np.full(num_groups, 1 / num_groups)

    def update(self, loss_E: Array, group_E: NDArray[np.int64]) -> Array:
        """Raises the weights of the groups seen and returns a weight for every loss, summing to one."""
        for group in np.unique(group_E):
            self.weight_G[group] *= math.exp(self.rate * float(loss_E[group_E == group].mean()))
        self.weight_G /= self.weight_G.sum()
        count_G = np.bincount(group_E, minlength=len(self.weight_G))
        weight_E = self.weight_G[group_E] / count_G[group_E]
        return np.asarray(weight_E / weight_E.sum())


def _tilted(loss_E: Array, temperature: float) -> Array:
    weight_E = np.exp((loss_E - loss_E.max()) / temperature)
    return np.asarray(weight_E / weight_E.sum())


def _divergence(weight_E: Array) -> float:
    some_E = weight_E[weight_E > 0]
    return float((some_E * np.log(some_E * len(weight_E))).sum())
