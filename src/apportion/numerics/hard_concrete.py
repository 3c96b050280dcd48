"""Hard-concrete gates: a differentiable stand-in for switches that are off exactly with positive probability.

Shape letter: G gates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOW, HIGH = -0.1, 1.1  # the stretched interval of Louizos et al., 2018


def sample_gates(logit_G: Tensor, generator: torch.Generator | None = None, temperature: float = 2 / 3) -> Tensor:
    r"""Draws gates in [0, 1] (eq. C12).

    .. math::
        s = \sigma\big((\log u - \log(1 - u) + \log\alpha) / \tau\big), \quad
        z = \min(1, \max(0, s (\zeta - \gamma) + \gamma))

    ``logit_G`` is :math:`\log\alpha`, ``temperature`` :math:`\tau`; :math:`\gamma` and :math:`\zeta` are ``LOW`` and
    ``HIGH``. Numbers are drawn where the generator is, on the CPU without one.
    """
    where = "cpu" if generator is None else generator.device
    uniform_G = torch.rand(logit_G.shape, generator=generator, dtype=logit_G.dtype, device=where)
    uniform_G = uniform_G.clamp(1e-6, 1 - 1e-6).to(logit_G.device)
    soft_G = ((uniform_G.log() - (-uniform_G).log1p() + logit_G) / temperature).sigmoid()
    return (soft_G * (HIGH - LOW) + LOW).clamp(0, 1)


def mean_gates(logit_G: Tensor) -> Tensor:
    """Gates without noise, as used once training is over."""
    return (logit_G.sigmoid() * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(logit_G: Tensor, temperature: float = 2 / 3) -> Tensor:
    r"""Probability that a gate is not zero (eq. C13), :math:`\sigma(\log\alpha - \tau \log(-\gamma/\zeta))`.

    Its sum is the expected number of open gates, which is penalised.
    """
    return (logit_G - temperature * math.log(-LOW / HIGH)).sigmoid()
