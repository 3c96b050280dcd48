"""Ranks of conformal prediction: which calibration score bounds the next one, the next few, or a drifting stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

_ROUNDING = 1e-9  # (n + 1)(1 - alpha) is an integer in exact arithmetic for the usual alphas


def conformal_rank(num_scores: int, alpha: float) -> int:
    r"""The rank of the score that bounds one new score with probability ``1 - alpha`` (eq. K13).

    .. math:: k = \lceil (n + 1)(1 - \alpha) \rceil

    ``num_scores`` is :math:`n`. A rank above ``n`` means that no score is large enough.

    Example:
        >>> conformal_rank(19, 0.05), conformal_rank(18, 0.05)
        (19, 19)
    """
    return max(1, math.ceil((num_scores + 1) * (1.0 - alpha) - _ROUNDING))


def conformal_quantile(scores: Sequence[float], alpha: float) -> float:
    """The score at :func:`conformal_rank` (eq. K13); infinite when there are too few of them.

    Example:
        >>> conformal_quantile([3.0, 1.0, 2.0], 0.25), conformal_quantile([3.0, 1.0], 0.25)
        (3.0, inf)
    """
    return score_at(scores, conformal_rank(len(scores), alpha))


def score_at(scores: Sequence[float], rank: int) -> float:
    """The score of the given rank, counted from one in increasing order; infinite above the last."""
    return math.inf if rank > len(scores) else float(sorted(scores)[rank - 1])


def simultaneous_coverage(num_scores: int, num_menu: int, rank: int) -> float:
    r"""Probability that ``num_menu`` new scores all stay at or below the score of a rank (eq. K15).

    .. math:: P = \binom{m + k - 1}{m} \Big/ \binom{n + m}{m}

    ``num_scores`` is :math:`n`, ``num_menu`` :math:`m`, ``rank`` :math:`k`. Exact when all ``n + m`` scores are
    exchangeable and distinct, a lower bound when they tie; for ``m = 1`` it is ``k / (n + 1)``.

    Example:
        >>> simultaneous_coverage(19, 1, 19)
        0.95
    """
    return math.comb(num_menu + rank - 1, num_menu) / math.comb(num_scores + num_menu, num_menu)


def simultaneous_rank(num_scores: int, num_menu: int, alpha: float) -> int:
    """The smallest rank whose :func:`simultaneous_coverage` reaches ``1 - alpha`` (eq. K15); ``n + 1`` when none does.

    Example:
        >>> simultaneous_rank(19, 1, 0.05), simultaneous_rank(19, 2, 0.05)
        (19, 20)
    """
    low, high = 1, num_scores + 1
    while low < high:
        middle = (low + high) // 2
        if simultaneous_coverage(num_scores, num_menu, middle) >= 1.0 - alpha - _ROUNDING:
            high = middle
        else:
            low = middle + 1
    return low


def adapt_alpha(alpha_now: float, alpha: float, missed: bool, gamma: float) -> float:
    r"""One step of adaptive conformal inference, Gibbs and Candès 2021 (eq. K21).

    .. math:: \alpha_{t+1} = \alpha_t + \gamma (\alpha - \mathrm{err}_t)

    ``missed`` is :math:`\mathrm{err}_t`, ``gamma`` the step :math:`\gamma`. Whatever the stream, the share of misses in
    ``T`` steps differs from ``alpha`` by at most ``(max(alpha_1, 1 - alpha_1) + gamma) / (T gamma)``.
    """
    return alpha_now + gamma * (alpha - float(missed))
