"""Online updates during a search: a correction that follows the device, and a bound whose misses stay at its rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from apportion.cost.recalibrate import Affine
from apportion.cost.sample import CostError, check_pairs, number, numbers
from apportion.numerics.conformal import adapt_alpha, conformal_quantile
from apportion.numerics.recursive import recursive_least_squares

_IDENTITY = (0.0, 1.0)


@dataclass(frozen=True)
class OnlineAffine:
    r"""An affine correction that learns from each run and forgets old ones (eq. K20).

    Recursive least squares on :math:`1 = a / c + b \hat c / c`, so relative errors count, started at the identity with
    the spreads that :meth:`Affine.fit` shrinks by. ``scale_ms`` is the latency that offsets are counted in,
    ``forgetting`` the weight that a run keeps when the next one arrives.
    """

    scale_ms: float
    forgetting: float = 0.98
    theta: tuple[float, float] = _IDENTITY
    spread: tuple[float, float, float] = field(default=(25.0, 0.0, 225.0))  # (0.1 / 0.02)^2, none, (0.3 / 0.02)^2
    count: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale_ms) and self.scale_ms > 0.0 and 0.0 < self.forgetting <= 1.0):
            raise CostError(
                f"an online correction has scale {self.scale_ms!r} ms and forgetting {self.forgetting!r}; "
                "give a typical latency and a forgetting in (0, 1]"
            )

    def update(self, prediction: float, latency_ms: float) -> OnlineAffine:
        """A new state that has seen one more run."""
        check_pairs([prediction], [latency_ms])
        across, off, along = self.spread
        theta, spread = recursive_least_squares(
            np.array(self.theta),
            np.array([[across, off], [off, along]]),
            np.array([self.scale_ms / latency_ms, prediction / latency_ms]),
            1.0,
            self.forgetting,
        )
        state = (float(spread[0, 0]), float(spread[0, 1]), float(spread[1, 1]))
        return replace(self, theta=(float(theta[0]), float(theta[1])), spread=state, count=self.count + 1)

    def correction(self) -> Affine:
        """The correction as of now, its slope cut at 0."""
        return Affine(self.theta[0] * self.scale_ms, max(0.0, self.theta[1]))

    def to_json(self) -> dict[str, Any]:
        return {
            "scale_ms": self.scale_ms,
            "forgetting": self.forgetting,
            "theta": list(self.theta),
            "spread": list(self.spread),
            "count": self.count,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> OnlineAffine:
        offset, slope = numbers(fields["theta"], "theta")
        across, off, along = numbers(fields["spread"], "spread")
        return cls(
            number(fields["scale_ms"], "scale_ms"),
            number(fields["forgetting"], "forgetting"),
            (offset, slope),
            (across, off, along),
            int(number(fields["count"], "count")),
        )


@dataclass(frozen=True)
class AdaptiveBound:
    r"""A running upper bound whose long-run share of misses is ``alpha`` whatever the device does (eq. K21).

    .. math:: U_t = \hat c_t \cdot Q_{1 - \alpha_t}\big(\{c_i / \hat c_i\}_{i < t}\big), \qquad
        \alpha_{t+1} = \alpha_t + \gamma(\alpha - \mathrm{err}_t)

    ``alpha_now`` is :math:`\alpha_t`: at or below 0 the bound is infinite, at or above 1 it is 0; that is the price of
    a promise without assumptions. Start it with the ``scores`` of the calibration; the last ``window`` are kept.
    """

    alpha: float = 0.05
    gamma: float = 0.02
    scores: tuple[float, ...] = ()
    alpha_now: float | None = None
    window: int = 200
    num_missed: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        if not (0.0 < self.alpha < 1.0 and self.gamma > 0.0 and self.window >= 1):
            raise CostError(
                f"an adaptive bound has alpha {self.alpha!r}, gamma {self.gamma!r}, window {self.window!r}; "
                "give alpha in (0, 1), gamma above 0 and a window of at least 1"
            )

    @property
    def level(self) -> float:
        return self.alpha if self.alpha_now is None else self.alpha_now

    def upper(self, prediction: float) -> float:
        """The bound on the next run."""
        if self.level <= 0.0:
            return math.inf
        if self.level >= 1.0:
            return 0.0
        return prediction * conformal_quantile(self.scores, self.level)

    def update(self, prediction: float, latency_ms: float) -> AdaptiveBound:
        """A new state that has seen one more run."""
        check_pairs([prediction], [latency_ms])
        missed = latency_ms > self.upper(prediction)
        return replace(
            self,
            scores=(*self.scores, latency_ms / prediction)[-self.window :],
            alpha_now=adapt_alpha(self.level, self.alpha, missed, self.gamma),
            num_missed=self.num_missed + missed,
            count=self.count + 1,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "gamma": self.gamma,
            "scores": list(self.scores),
            "alpha_now": self.level,
            "window": self.window,
            "num_missed": self.num_missed,
            "count": self.count,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AdaptiveBound:
        return cls(
            number(fields["alpha"], "alpha"),
            number(fields["gamma"], "gamma"),
            numbers(fields["scores"], "scores"),
            number(fields["alpha_now"], "alpha_now"),
            int(number(fields["window"], "window")),
            int(number(fields["num_missed"], "num_missed")),
            int(number(fields["count"], "count")),
        )
