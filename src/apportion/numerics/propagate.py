"""How a relative error of cost estimates widens, or must shrink, the band in which costs count as equal."""

from __future__ import annotations

import math
from typing import NamedTuple


class Sides(NamedTuple):
    """How far below and above the anchor a cost may lie, relative to the anchor."""

    below: float
    above: float

    @property
    def widest(self) -> float:
        return max(self.below, self.above)


def true_band(tau: float, eta: float, *, anchor_eta: float | None = None) -> Sides:
    r"""Where the true cost can lie when the estimate lies within ``tau`` of the anchor's estimate (eq. I8), exactly.

    .. math:: \frac{g'}{g} \in \Big[(1 - \tau)\frac{1 - \eta_0}{1 + \eta},\; (1 + \tau)\frac{1 + \eta_0}{1 - \eta}\Big]

    ``eta`` bounds the relative error :math:`|\hat g - g| \le \eta g` of the candidate's estimate; ``anchor_eta``
    (:math:`\eta_0`) that of the anchor, the same where not given, and 0 where the anchor's cost was measured. Both
    ends are attained.

    Example:
        >>> [round(side, 4) for side in true_band(0.03, 0.02)]
        [0.068, 0.072]
    """
    _check(tau, eta)
    anchor_eta = eta if anchor_eta is None else anchor_eta
    below = 1.0 - (1.0 - tau) * (1.0 - anchor_eta) / (1.0 + eta)
    above = (1.0 + tau) * (1.0 + anchor_eta) / (1.0 - eta) - 1.0
    return Sides(below, above)


def first_order_band(tau: float, eta: float) -> float:
    r"""The paper's :math:`\tau' = \tau + 3\eta + 2\eta\tau` (eq. I9); covers :func:`true_band` while I10 holds."""
    _check(tau, eta)
    return tau + 3.0 * eta + 2.0 * eta * tau


def first_order_valid(tau: float, eta: float) -> bool:
    r"""Whether the first-order form covers the exact band (eq. I10).

    .. math:: \eta \le \frac{1}{3 + 2\tau}

    It follows from :math:`(\tau + 2\eta + \tau\eta)/(1 - \eta) \le \tau + 3\eta + 2\eta\tau`; the lower side never
    binds. Inside the region the form is loose by up to :math:`\eta` (1 + :math:`\tau`).
    """
    _check(tau, eta)
    return eta <= 1.0 / (3.0 + 2.0 * tau)


def safe_band(tau: float, eta: float) -> Sides | None:
    r"""The band for estimates that keeps the true cost within ``tau`` of a measured anchor (eq. I11).

    .. math:: \frac{\hat g'}{g} \in \big[(1 - \tau)(1 + \eta),\; (1 + \tau)(1 - \eta)\big]

    None where it is empty, which is when :math:`\eta > \tau`. The sides may be negative: with a large error only
    estimates on one side of the anchor, or none, are safe.
    """
    _check(tau, eta)
    if eta > tau:
        return None
    return Sides(1.0 - (1.0 - tau) * (1.0 + eta), (1.0 + tau) * (1.0 - eta) - 1.0)


def drift(tau: float, num_steps: int) -> Sides:
    r"""How far costs can wander when every step has a band of its own around the last (eq. I12).

    .. math:: (1 - \tau)^k \le g_k / g_0 \le (1 + \tau)^k

    Example:
        >>> round(drift(0.03, 24).above, 3)
        1.033
    """
    return Sides(1.0 - (1.0 - tau) ** num_steps, (1.0 + tau) ** num_steps - 1.0)


def _check(tau: float, eta: float) -> None:
    if not (0.0 <= tau < 1.0 and 0.0 <= eta < 1.0 and math.isfinite(tau + eta)):
        raise ValueError(f"tolerance {tau!r} and relative error {eta!r} must lie in [0, 1)")
