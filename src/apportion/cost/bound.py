"""Upper bounds on the clock: a split-conformal margin over the prediction, for one configuration or a whole menu."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import nnls

from apportion.cost.sample import CostError, check_pairs, number, numbers
from apportion.numerics.conformal import conformal_rank, score_at, simultaneous_rank
from apportion.numerics.stats import normal_quantile

Method = Literal["single", "union", "exchangeable", "menus"]
METHODS = ("single", "union", "exchangeable", "menus")


@dataclass(frozen=True)
class Spread:
    r"""How wide relative errors are at a prediction: a ratio plus milliseconds (eq. K14).

    .. math:: \sigma(\hat c) = \max(\sigma_{\min},\; r + b / \hat c), \qquad r, b \ge 0

    ``ratio`` is :math:`r`, ``ms`` is :math:`b`, ``floor`` is :math:`\sigma_{\min}`.
    """

    ratio: float
    ms: float
    floor: float = 1e-4

    def __post_init__(self) -> None:
        values = (self.ratio, self.ms, self.floor)
        if not all(math.isfinite(value) and value >= 0.0 for value in values) or self.floor == 0.0:
            raise CostError(f"a spread is {values!r}; give a finite ratio and ms of at least 0 and a floor above 0")

    def __call__(self, prediction: float) -> float:
        return max(self.floor, self.ratio + self.ms / prediction)

    @classmethod
    def fit(cls, predictions: Sequence[float], latencies_ms: Sequence[float]) -> Spread:
        """Non-negative least squares of ``|latency/prediction - 1|``; use samples that the bound is not fitted to."""
        check_pairs(predictions, latencies_ms, at_least=2)
        predicted_N = np.asarray(predictions, dtype=np.float64)
        error_N = np.abs(np.asarray(latencies_ms, dtype=np.float64) / predicted_N - 1.0)
        (ratio, ms), _ = nnls(np.column_stack([np.ones_like(predicted_N), 1.0 / predicted_N]), error_N)
        return cls(float(ratio), float(ms))


@dataclass(frozen=True)
class UpperBound:
    r"""A bound that holds for a share ``1 - alpha`` of configurations like those it was calibrated on (eq. K13, K14).

    .. math:: U(\hat c) = \hat c\,(1 + q\,\sigma(\hat c))\,(1 + z_{1-\alpha} \sqrt{2}\,\delta), \quad q = v_{(k)}, \quad
        v_i = \frac{c_i / \hat c_i - 1}{\sigma(\hat c_i)}

    ``quantiles`` holds :math:`q`, one per regime; a regime is a range of predictions between ``edges_ms`` (Mondrian).
    ``spread`` is :math:`\sigma`, 1 when None. ``counts`` says how many scores stand behind each quantile: a quantile is
    infinite when they are too few, and :meth:`explain` says how many it takes. For ``num_menu`` above 1 the bound holds
    for all configurations of a menu at once. Coverage is over both draws, the calibration's and the new one's.
    ``drift`` is :math:`\delta` (eq. K27), the relative standard error that all latencies of one session share and that
    no draw of configurations shows: the calibration's session has one, and the session to come another.
    """

    alpha: float
    quantiles: tuple[float, ...]
    counts: tuple[int, ...]
    edges_ms: tuple[float, ...] = ()
    spread: Spread | None = None
    num_menu: int = 1
    method: Method = "single"
    drift: float = 0.0

    def __post_init__(self) -> None:
        _check(self.alpha, self.num_menu, self.method)
        if not (math.isfinite(self.drift) and self.drift >= 0.0):
            raise CostError(f"the drift of a bound is {self.drift!r}; give a relative error of at least 0")
        sizes = (len(self.quantiles), len(self.counts), len(self.edges_ms) + 1)
        if len(set(sizes)) != 1 or any(math.isnan(q) or q == -math.inf for q in self.quantiles):
            raise CostError(f"a bound has {sizes[0]} quantiles, {sizes[1]} counts, {sizes[2]} regimes; one per regime")
        if list(self.edges_ms) != sorted(set(self.edges_ms)):
            raise CostError(f"regime edges are {list(self.edges_ms)!r} ms; give rising edges")

    @property
    def finite(self) -> bool:
        """Whether every regime has a finite bound."""
        return all(math.isfinite(quantile) for quantile in self.quantiles)

    def __call__(self, prediction: float) -> float:
        """The bound in milliseconds; infinite where calibration had too few samples."""
        quantile = self.quantiles[bisect_right(self.edges_ms, prediction)]
        above = max(0.0, 1.0 + quantile * (1.0 if self.spread is None else self.spread(prediction)))
        return prediction * above * (1.0 + normal_quantile(1.0 - self.alpha) * math.sqrt(2.0) * self.drift)

    def explain(self) -> str:
        """One line: what the bound promises, or what it lacks."""
        scope = "one configuration" if self.num_menu == 1 else f"all {self.num_menu} configurations of a menu"
        promise = f"holds for {scope} with probability {1.0 - self.alpha:g}"
        if self.finite:
            return f"{promise}, from {sum(self.counts)} calibration scores"
        needed = num_needed(self.alpha, self.num_menu, self.method)
        return f"no finite bound that {promise}: {min(self.counts)} calibration scores, it takes {needed}; measure more"

    @classmethod
    def fit(
        cls,
        predictions: Sequence[float],
        latencies_ms: Sequence[float],
        alpha: float = 0.05,
        *,
        spread: Spread | None = None,
        edges_ms: Sequence[float] = (),
        num_menu: int = 1,
        method: Method | None = None,
        drift: float = 0.0,
    ) -> UpperBound:
        """Split conformal from samples that the prediction was not fitted to.

        For a menu, ``exchangeable`` (the default) uses the exact rank of eq. K15, which asks that calibration and menu
        configurations be drawn alike; ``union`` gives each of the menu ``alpha / m`` (eq. K16).
        """
        check_pairs(predictions, latencies_ms)
        method = method or ("single" if num_menu == 1 else "exchangeable")
        _check(alpha, num_menu, method)
        edges = tuple(float(edge) for edge in edges_ms)
        groups: list[list[float]] = [[] for _ in range(len(edges) + 1)]
        for predicted, latency in zip(predictions, latencies_ms, strict=True):
            groups[bisect_right(edges, predicted)].append(_score(predicted, latency, spread))
        quantiles = tuple(score_at(group, _rank(len(group), alpha, num_menu, method)) for group in groups)
        return cls(alpha, quantiles, tuple(len(group) for group in groups), edges, spread, num_menu, method, drift)

    @classmethod
    def fit_menus(
        cls, menus: Sequence[Sequence[tuple[float, float]]], alpha: float = 0.05, *, spread: Spread | None = None
    ) -> UpperBound:
        """Max-score conformal: each calibration menu of (prediction, latency) pairs scores its worst member (eq. K16).

        Asks only that whole menus be drawn alike, however dependent their members; needs ``1/alpha - 1`` menus.
        """
        if not menus or len({len(menu) for menu in menus}) != 1 or not menus[0]:
            raise CostError(f"{len(menus)} calibration menus of different or no sizes; give menus of one size")
        for menu in menus:
            check_pairs([pair[0] for pair in menu], [pair[1] for pair in menu])
        scores = [max(_score(predicted, latency, spread) for predicted, latency in menu) for menu in menus]
        quantile = score_at(scores, conformal_rank(len(scores), alpha))
        return cls(alpha, (quantile,), (len(scores),), (), spread, len(menus[0]), "menus")

    def to_json(self) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "quantiles": [quantile if math.isfinite(quantile) else None for quantile in self.quantiles],
            "counts": list(self.counts),
            "edges_ms": list(self.edges_ms),
            "spread": None if self.spread is None else [self.spread.ratio, self.spread.ms, self.spread.floor],
            "num_menu": self.num_menu,
            "method": self.method,
            "drift": self.drift,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> UpperBound:
        spread = fields["spread"]
        return cls(
            number(fields["alpha"], "alpha"),
            tuple(math.inf if q is None else number(q, "quantiles") for q in fields["quantiles"]),
            tuple(int(number(count, "counts")) for count in fields["counts"]),
            numbers(fields["edges_ms"], "edges_ms"),
            None if spread is None else Spread(*numbers(spread, "spread")),
            int(number(fields["num_menu"], "num_menu")),
            fields["method"],
            number(fields.get("drift", 0.0), "drift"),
        )


def num_needed(alpha: float, num_menu: int = 1, method: Method = "single") -> int:
    """How many calibration scores a finite bound takes.

    Example:
        >>> num_needed(0.05), num_needed(0.05, 10, "union"), num_needed(0.05, 10, "exchangeable")
        (19, 199, 190)
    """
    if method == "exchangeable":
        return math.ceil(num_menu * (1.0 - alpha) / alpha - 1e-9)
    return math.ceil((num_menu if method == "union" else 1) / alpha - 1.0 - 1e-9)


def _score(predicted: float, latency: float, spread: Spread | None) -> float:
    return (latency / predicted - 1.0) / (1.0 if spread is None else spread(predicted))


def _rank(count: int, alpha: float, num_menu: int, method: Method) -> int:
    if method == "exchangeable":
        return simultaneous_rank(count, num_menu, alpha)
    return conformal_rank(count, alpha / num_menu if method == "union" else alpha)


def _check(alpha: float, num_menu: int, method: str) -> None:
    if not 0.0 < alpha < 1.0:
        raise CostError(f"alpha is {alpha!r}; give the share of misses allowed, strictly between 0 and 1")
    if num_menu < 1 or method not in METHODS or (method == "single" and num_menu > 1):
        raise CostError(
            f"a bound by method {method!r} for a menu of {num_menu}; choose single for one configuration, "
            "union, exchangeable or menus for several"
        )
