"""Distortion: how far the clock strays from the prediction, as a factor plus milliseconds, or as a relative error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from apportion.cost.sample import CostError, check_pairs, number
from apportion.numerics.multiple import binomial_upper, tolerance_rank


@dataclass(frozen=True)
class Distortion:
    r"""The band that held every latency (eq. K9; eq. 20 of the paper, both sides).

    .. math:: \kappa^{-1} \hat c - \epsilon \;\le\; c \;\le\; \kappa \hat c + \epsilon

    ``kappa`` is :math:`\kappa \ge 1`, ``eps_ms`` is :math:`\epsilon \ge 0`.
    """

    kappa: float
    eps_ms: float

    def proxy_limit(self, budget_ms: float) -> float:
        r"""Largest prediction that keeps the clock within a budget, :math:`(B - \epsilon) / \kappa` (eq. K10).

        Example:
            >>> Distortion(1.25, 2.0).proxy_limit(12.0)
            8.0
        """
        return (budget_ms - self.eps_ms) / self.kappa


def smallest_kappa(
    predictions: Sequence[float], latencies_ms: Sequence[float], eps_ms: float = 0.0, upper_only: bool = False
) -> float:
    r"""The smallest factor for a given slack (eq. K9).

    .. math:: \kappa(\epsilon) = \max\Big(1, \max_i \frac{c_i - \epsilon}{\hat c_i},
        \max_i \frac{\hat c_i}{c_i + \epsilon}\Big)

    ``upper_only`` leaves out the second maximum: the one-sided bound that a budget needs.

    Example:
        >>> smallest_kappa([1.0, 2.0], [1.5, 2.0]), smallest_kappa([1.0, 2.0], [1.5, 2.0], eps_ms=0.25)
        (1.5, 1.25)
    """
    check_pairs(predictions, latencies_ms)
    if not (math.isfinite(eps_ms) and eps_ms >= 0.0):
        raise CostError(f"eps is {eps_ms!r} ms; give a finite slack of at least 0")
    pairs = list(zip(predictions, latencies_ms, strict=True))
    above = max((latency - eps_ms) / predicted for predicted, latency in pairs)
    below = 0.0 if upper_only else max(predicted / (latency + eps_ms) for predicted, latency in pairs)
    return max(1.0, above, below)


def frontier(
    predictions: Sequence[float], latencies_ms: Sequence[float], num_points: int = 9, upper_only: bool = False
) -> tuple[Distortion, ...]:
    """The trade between factor and slack, from ``eps = 0`` to the slack at which the factor is 1."""
    check_pairs(predictions, latencies_ms)
    gaps = [latency - predicted for predicted, latency in zip(predictions, latencies_ms, strict=True)]
    most = max(0.0, max(gaps)) if upper_only else max(abs(gap) for gap in gaps)
    steps = np.linspace(0.0, most, num_points).tolist() if most > 0.0 else [0.0]
    return tuple(Distortion(smallest_kappa(predictions, latencies_ms, eps, upper_only), eps) for eps in steps)


def tightest(points: Sequence[Distortion], budget_ms: float) -> Distortion:
    """The point of a frontier that leaves the solver the most room under a budget (eq. K10)."""
    return max(points, key=lambda point: point.proxy_limit(budget_ms))


@dataclass(frozen=True)
class RelativeError:
    r"""A relative error that held for most configurations (eq. K11).

    .. math:: |\hat c - c| \le \eta\, c \quad \text{for a share } 1 - \delta \text{ of configurations}

    ``eta`` is :math:`\eta`, ``delta`` the share of the ``count`` configurations beyond it, ``delta_upper`` the largest
    share that the law of the configurations can have beyond it, at the stated confidence and free of that law.
    """

    eta: float
    delta: float
    delta_upper: float
    confidence: float
    count: int


def relative_error(
    predictions: Sequence[float], latencies_ms: Sequence[float], delta: float = 0.05, confidence: float = 0.95
) -> RelativeError:
    r"""The smallest ``eta`` that held for a share ``1 - delta`` of these configurations (eq. K11).

    .. math:: \eta = e_{(k)}, \quad k = \lceil n (1 - \delta) \rceil, \quad e_i = |\hat c_i / c_i - 1|
    """
    errors = _errors(predictions, latencies_ms, delta)
    rank = max(1, math.ceil(len(errors) * (1.0 - delta) - 1e-9))
    return _at_rank(errors, rank, confidence)


def guaranteed_error(
    predictions: Sequence[float], latencies_ms: Sequence[float], delta: float = 0.05, confidence: float = 0.95
) -> RelativeError:
    """The smallest ``eta`` whose ``delta_upper`` is at most ``delta`` (eq. K12); infinite with too few configurations.

    At 5 % and 95 % confidence it takes 59 of them.
    """
    errors = _errors(predictions, latencies_ms, delta)
    rank = tolerance_rank(len(errors), delta, confidence)
    if rank > len(errors):
        return RelativeError(math.inf, 0.0, delta, confidence, len(errors))
    return _at_rank(errors, rank, confidence)


@dataclass(frozen=True)
class Fidelity:
    """How far the clock strayed on samples that a fit has not seen: a frontier of factors and slacks, and (η, δ)."""

    frontier: tuple[Distortion, ...]
    error: RelativeError

    @property
    def kappa(self) -> float:
        """The smallest factor that needs no slack."""
        return self.frontier[0].kappa

    @classmethod
    def of(cls, predictions: Sequence[float], latencies_ms: Sequence[float]) -> Fidelity:
        return cls(frontier(predictions, latencies_ms, num_points=5), relative_error(predictions, latencies_ms))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Fidelity:
        points = tuple(
            Distortion(number(one["kappa"], "kappa"), number(one["eps_ms"], "eps_ms")) for one in fields["frontier"]
        )
        saved = fields["error"]
        error = RelativeError(
            number(saved["eta"], "eta"),
            number(saved["delta"], "delta"),
            number(saved["delta_upper"], "delta_upper"),
            number(saved["confidence"], "confidence"),
            int(number(saved["count"], "count")),
        )
        if not points:
            raise CostError("a saved profile has no point of distortion; calibrate again")
        return cls(points, error)


def _errors(predictions: Sequence[float], latencies_ms: Sequence[float], delta: float) -> list[float]:
    check_pairs(predictions, latencies_ms)
    if not 0.0 <= delta < 1.0:
        raise CostError(f"delta is {delta!r}; give the share of configurations that may miss, from 0 to below 1")
    return sorted(abs(p / y - 1.0) for p, y in zip(predictions, latencies_ms, strict=True))


def _at_rank(errors: list[float], rank: int, confidence: float) -> RelativeError:
    beyond = sum(error > errors[rank - 1] for error in errors)
    upper = binomial_upper(len(errors) - rank, len(errors), confidence)
    return RelativeError(errors[rank - 1], beyond / len(errors), upper, confidence, len(errors))
