"""Tail risk: the mean of the worst share of the losses."""

from __future__ import annotations

import math
from collections.abc import Sequence


def cvar(losses: Sequence[float], beta: float) -> float:
    r"""Conditional value at risk of equally likely losses (eq. T2).

    .. math:: \mathrm{CVaR}_\beta(\ell) = \min_\tau \; \tau + \frac{1}{(1 - \beta) n} \sum_i \max(\ell_i - \tau, 0)

    The minimum is the mean of the worst ``(1 - beta) n`` losses, the last of them counted by the share that fits; at
    ``beta`` 0 it is the mean, towards 1 the worst loss.

    Example:
        >>> cvar([0.0, 0.1, 0.2, 0.9], 0.5)
        0.55
    """
    if not losses or not 0 <= beta < 1:
        raise ValueError(f"CVaR needs losses and a beta in [0, 1), got {len(losses)} losses and {beta!r}")
    size = (1 - beta) * len(losses)
    if size <= 1:
        return max(losses)
    ordered = sorted(losses, reverse=True)
    whole = min(math.floor(size + 1e-9), len(losses))
    rest = max(size - whole, 0.0) if whole < len(losses) else 0.0
    return (math.fsum(ordered[:whole]) + (rest * ordered[whole] if rest > 1e-9 else 0.0)) / (
        whole + (rest > 1e-9) * rest
    )
