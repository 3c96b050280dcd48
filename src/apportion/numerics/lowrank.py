"""The best approximation of a linear map by one of low rank, judged on what it computes.

Shape letters: O outputs, I inputs, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_rank(weight_OI: Tensor, moment_OO: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    r"""Factors of rank ``r`` whose outputs are nearest to those of a matrix, in the mean square (eq. P7).

    .. math:: \min_{\mathrm{rank}\,\hat W \le r} \mathrm{E}\,\|W x - \hat W x\|_2^2
        \quad\text{at}\quad \hat W = U_r U_r^\top W,

    with :math:`U_r` the first eigenvectors of :math:`\mathrm{E}\,(W x)(W x)^\top = W C W^\top`, which are the first
    left singular vectors of the whitened matrix :math:`W C^{1/2}`, :math:`C = \mathrm{E}\,x x^\top`. Nothing is
    inverted, so :math:`C` may be singular. With :math:`C = I` it is the truncated singular value decomposition. Given
    the covariance instead of the second moment, it is the best together with a free bias.

    Args:
        weight_OI: :math:`W`.
        moment_OO: second moment :math:`W C W^\top` of the outputs, symmetric.
        rank: :math:`r`, at most the number of outputs and of inputs.

    Returns:
        ``up`` of shape ``(O, R)`` with orthonormal columns, and ``down`` of shape ``(R, I)``, the most telling
        direction first; the first ones alone are the best of a smaller rank.

    Example:
        >>> weight = torch.diag(torch.tensor([1.0, 3.0]))
        >>> up, down = best_rank(weight, weight @ weight.T, 1)
        >>> (up @ down).tolist()
        [[0.0, 0.0], [0.0, 3.0]]
    """
    if len(weight_OI) > weight_OI.shape[1]:  # outputs fill only as many dimensions as there are inputs
        basis_OI, core_II = torch.linalg.qr(weight_OI)
        up_IR, down_RI = best_rank(core_II, basis_OI.T @ moment_OO @ basis_OI, rank)
        return basis_OI @ up_IR, down_RI
    _, vector_OO = torch.linalg.eigh(moment_OO)  # by ascending eigenvalue
    up_OR = vector_OO.flip(-1)[:, :rank]
    return up_OR, up_OR.T @ weight_OI
