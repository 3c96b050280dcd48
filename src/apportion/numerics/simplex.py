"""Mixtures: vectors of non-negative weights that sum to one. Shape letter: S sources."""

from __future__ import annotations

import torch
from torch import Tensor


def project_simplex(weight_S: Tensor) -> Tensor:
    r"""Nearest mixture to a weight vector (eq. C2).

    .. math:: \Pi(w) = \arg\min_{p \ge 0,\, 1^\top p = 1} \|p - w\|_2 = \max(w - \tau, 0)

    ``weight_S`` is :math:`w`; ``tau`` is the shift :math:`\tau` that makes the sum one. Works on the last dimension, so
    rows of a matrix are projected one by one.

    Example:
        >>> project_simplex(torch.tensor([0.5, 1.5]))
        tensor([0., 1.])
    """
    sorted_S = weight_S.sort(descending=True, dim=-1).values
    rank_S = torch.arange(1, weight_S.shape[-1] + 1, device=weight_S.device, dtype=weight_S.dtype)
    tau_S = (sorted_S.cumsum(-1) - 1) / rank_S
    last = (sorted_S > tau_S).sum(-1, keepdim=True) - 1  # the last index inside the support
    return (weight_S - tau_S.gather(-1, last)).clamp_min(0)


def project_sparse_simplex(weight_S: Tensor, num_active: int) -> Tensor:
    r"""Nearest mixture with at most k entries that are not zero (eq. C3): the k largest weights, projected.

    Exact (Kyrillidis et al., 2013): the greedy choice of the largest entries is the optimal support.

    Example:
        >>> project_sparse_simplex(torch.tensor([0.9, 0.8, 0.1]), 2)
        tensor([0.5500, 0.4500, 0.0000])
    """
    if num_active < 1:
        raise ValueError(f"a mixture has at least one entry that is not zero, asked for {num_active}")
    top = weight_S.topk(min(num_active, len(weight_S)))
    return torch.zeros_like(weight_S).scatter(0, top.indices, project_simplex(top.values))


def entropy(weight_S: Tensor) -> Tensor:
    r"""Entropy of mixtures in nats, :math:`-\sum_s w_s \log w_s`, along the last dimension.

    Example:
        >>> entropy(torch.tensor([0.5, 0.5, 0.0]))
        tensor(0.6931)
    """
    each_S: Tensor = torch.special.entr(weight_S)
    return each_S.sum(-1)


def effective_number(weight_S: Tensor) -> Tensor:
    """How many sources a mixture is worth: the exponential of its entropy."""
    return entropy(weight_S).exp()
