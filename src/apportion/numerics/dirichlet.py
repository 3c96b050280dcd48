"""Uncertain mixtures: a Dirichlet law around predicted weights. Shape letters: T tasks, S sources."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FLOOR = 1e-3  # weights of zero are lifted to this before their logarithm is taken


def log_likelihood(weight_TS: Tensor, mean_TS: Tensor, precision: float) -> Tensor:
    r"""Mean log density of weights under Dirichlet laws of given means and one precision (eq. C32).

    .. math:: w \sim \mathrm{Dir}(\kappa \bar w), \quad
              \log p = \log\Gamma(\kappa) - \sum_s \log\Gamma(\kappa \bar w_s) + \sum_s (\kappa \bar w_s - 1) \log w_s
    """
    weight_TS, mean_TS = _inside(weight_TS), _inside(mean_TS)
    alpha_TS = precision * mean_TS
    each_T = torch.lgamma(alpha_TS.sum(-1)) - torch.lgamma(alpha_TS).sum(-1)
    return (each_T + ((alpha_TS - 1) * weight_TS.log()).sum(-1)).mean()


def fit_precision(weight_TS: Tensor, mean_TS: Tensor) -> float:
    """The precision that makes the weights seen on held-out tasks most likely, by golden section on its logarithm."""
    if len(weight_TS) == 0:
        raise ValueError("a precision needs at least one task to be fitted on")
    low, high = math.log(1e-2), math.log(1e5)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if log_likelihood(weight_TS, mean_TS, math.exp(left)) < log_likelihood(weight_TS, mean_TS, math.exp(right)):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


def sample(mean_S: Tensor, precision: float, count: int, generator: torch.Generator) -> Tensor:
    """Draws mixtures from Dir(precision · mean), shape (count, S)."""
    alpha_S = (precision * _inside(mean_S)).double()
    gamma = torch._standard_gamma(alpha_S.expand(count, -1).contiguous(), generator)
    drawn: Tensor = gamma.clamp_min(1e-300)
    return drawn / drawn.sum(-1, keepdim=True)


def top_probability(mean_S: Tensor, precision: float, *, count: int = 4000, seed: int = 0) -> float:
    """Probability that the source of largest mean weight is in truth the one of largest weight."""
    drawn = sample(mean_S, precision, count, torch.Generator().manual_seed(seed))
    return float((drawn.argmax(-1) == mean_S.argmax()).double().mean())


def _inside(weight_S: Tensor) -> Tensor:
    lifted = weight_S.double().clamp_min(_FLOOR)
    return lifted / lifted.sum(-1, keepdim=True)
