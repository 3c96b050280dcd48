"""The basis of monotone convex piecewise-linear functions: non-negative weights on hinges give every one of them.

Shape letters: ``N`` points, ``K`` pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def left_ends(knots: Sequence[float]) -> tuple[float, ...]:
    """Where each piece begins, from where it ends: the pieces are ``(0, k_1], (k_1, k_2], ...``.

    Example:
        >>> left_ends((0.5, 1.0))
        (0.0, 0.5)
    """
    return (0.0, *knots[:-1])


def hinge_basis(share_N: Array, knots: Sequence[float]) -> Array:
    r"""The value of every hinge at every point (eq. K2).

    .. math:: h_j(s) = \max(0, s - k_{j-1}), \qquad k_0 = 0, \quad j = 1, \dots, K

    ``knots`` are :math:`k_1 < \dots < k_K`, the right ends of the pieces. Returns shape ``(N, K)``.
    """
    hinge_NK: Array = np.maximum(np.asarray(share_N, dtype=np.float64)[:, None] - np.asarray(left_ends(knots)), 0.0)
    return hinge_NK


def slopes_of(increments: Sequence[float]) -> tuple[float, ...]:
    r"""Slopes of the pieces from the weights of the hinges, :math:`m_j = \sum_{i \le j} d_i` (eq. K2).

    Example:
        >>> slopes_of((1.0, 0.0, 2.0))
        (1.0, 1.0, 3.0)
    """
    return tuple(float(slope) for slope in np.cumsum(np.asarray(increments, dtype=np.float64)))
