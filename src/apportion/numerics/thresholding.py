"""Sparse residuals: hard thresholds, iterative hard thresholding and the group lasso.

Shape letters: D coordinates, L blocks. A partition of the coordinates is one block number per coordinate, ``block_D``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Objective: TypeAlias = Callable[[Tensor], tuple[float, Tensor]]
_GROW, _SHRINK, _MAX_TRIES = 2.0, 0.8, 60


def hard_threshold(value_D: Tensor, k: int, block_D: Tensor | None = None) -> Tensor:
    r"""Keeps the k coordinates, or the k blocks, of largest norm and zeroes the rest (eq. C8), :math:`\mathcal{H}_k`.

    Of equal norms the first is kept, so that never more than k remain.

    Example:
        >>> hard_threshold(torch.tensor([1.0, -3.0, 2.0]), 2)
        tensor([ 0., -3.,  2.])
    """
    return value_D * support(value_D, k, block_D)


def support(value_D: Tensor, k: int, block_D: Tensor | None = None) -> Tensor:
    """The coordinates that ``hard_threshold`` keeps, as a mask; coordinates that are zero already are not counted."""
    norm_L = value_D.abs() if block_D is None else block_norms(value_D, block_D)
    order_L = norm_L.argsort(descending=True, stable=True)
    keep_L = torch.zeros_like(norm_L, dtype=torch.bool)
    keep_L[order_L[: max(k, 0)]] = True
    keep_L &= norm_L > 0
    return keep_L if block_D is None else keep_L[block_D]


def block_norms(value_D: Tensor, block_D: Tensor) -> Tensor:
    """Euclidean norm of every block."""
    num_blocks = int(block_D.max()) + 1 if len(block_D) else 0
    return value_D.new_zeros(num_blocks).index_add_(0, block_D, value_D.square()).sqrt()


def iterative_hard_thresholding(
    objective: Objective,
    start_D: Tensor,
    k: int,
    *,
    block_D: Tensor | None = None,
    max_steps: int = 500,
    tolerance: float = 1e-9,
) -> tuple[Tensor, float]:
    r"""Minimises a smooth function over vectors with at most k coordinates or blocks that are not zero (eq. C9).

    .. math:: \Delta^{(t+1)} = \mathcal{H}_k\big(\Delta^{(t)} - \eta_t \nabla g(\Delta^{(t)})\big)

    The step :math:`\eta_t` is found by backtracking until the decrease is at least what a quadratic with curvature
    :math:`1/\eta_t` promises, so the objective never rises. Returns the vector and its objective.
    """
    point_D = hard_threshold(start_D, k, block_D)
    value, gradient_D = objective(point_D)
    bend = 1.0
    for _ in range(max_steps):
        bend *= _SHRINK
        for _ in range(_MAX_TRIES):
            new_D = hard_threshold(point_D - gradient_D / bend, k, block_D)
            new_value, new_gradient_D = objective(new_D)
            moved_D = new_D - point_D
            promised = float(gradient_D @ moved_D) + 0.5 * bend * float(moved_D @ moved_D)
            if new_value <= value + promised + 1e-13 * abs(value):
                break
            bend *= _GROW
        else:
            return point_D, value
        decrease = value - new_value
        if decrease > 0:
            point_D, value, gradient_D = new_D, new_value, new_gradient_D
        if decrease <= tolerance * max(1.0, abs(value)):
            break
    return point_D, value


def shrink_blocks(value_D: Tensor, block_D: Tensor, amount: float) -> Tensor:
    r"""Proximal step of the group lasso (eq. C10): every block loses ``amount`` of its norm, small ones vanish.

    .. math:: \mathrm{prox}(v)_\ell = \max\Big(0, 1 - \frac{\lambda}{\|v_\ell\|_2}\Big) v_\ell
    """
    norm_L = block_norms(value_D, block_D)
    share_L = (1 - amount / norm_L.clamp_min(torch.finfo(value_D.dtype).tiny)).clamp_min(0)
    return value_D * share_L[block_D]


def group_lasso(
    objective: Objective,
    start_D: Tensor,
    block_D: Tensor,
    penalty: float,
    *,
    max_steps: int = 2000,
    tolerance: float = 1e-10,
) -> tuple[Tensor, float]:
    r"""Minimises a smooth convex function plus a penalty on the norms of blocks (eq. C11; the paper's eq. 8).

    .. math:: \min_\Delta g(\Delta) + \lambda \sum_\ell \|\Delta_\ell\|_2

    Accelerated proximal gradient with backtracking, restarted when the objective rises (O'Donoghue and Candès, 2015).
    Returns the vector and its penalised objective.
    """

    def total(value: float, point_D: Tensor) -> float:
        return value + penalty * float(block_norms(point_D, block_D).sum())

    point_D, ahead_D, momentum, bend = start_D.clone(), start_D.clone(), 1.0, 1.0
    best = total(objective(point_D)[0], point_D)
    for _ in range(max_steps):
        value, gradient_D = objective(ahead_D)
        bend *= _SHRINK
        for _ in range(_MAX_TRIES):
            new_D = shrink_blocks(ahead_D - gradient_D / bend, block_D, penalty / bend)
            moved_D = new_D - ahead_D
            new_value, _ = objective(new_D)
            if new_value <= value + float(gradient_D @ moved_D) + 0.5 * bend * float(moved_D @ moved_D) + 1e-13 * abs(
                value
            ):
                break
            bend *= _GROW
        new_total = total(new_value, new_D)
        if new_total > best:
            if momentum == 1.0:
                break
            ahead_D, momentum = point_D.clone(), 1.0
            continue
        decrease = best - new_total
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead_D = new_D + (momentum - 1) / next_momentum * (new_D - point_D)
        point_D, best, momentum = new_D, new_total, next_momentum
        if decrease <= tolerance * max(1.0, abs(best)):
            break
    return point_D, best


def largest_penalty(gradient_D: Tensor, block_D: Tensor) -> float:
    """The least group-lasso penalty at which nothing is active, from the gradient at zero."""
    return float(block_norms(gradient_D, block_D).max())
