"""Recalibration: correct a cost model's predictions from a handful of runs, by a line, a staircase or a margin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from apportion.cost.sample import CostError, check_pairs, number, numbers
from apportion.numerics.conformal import conformal_quantile

if TYPE_CHECKING:
    from torch import Tensor

How = Literal["affine", "isotonic", "margin"]
HOWS: tuple[str, ...] = ("affine", "isotonic", "margin")
_LEAST = 0.1  # an affine correction never falls below this share of slope * prediction


class Recalibration(Protocol):
    """A non-decreasing map from predictions to corrected predictions."""

    def __call__(self, prediction: float) -> float: ...

    def tensor(self, prediction: Tensor) -> Tensor: ...

    @property
    def scale(self) -> float:
        """By what a price is multiplied."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Affine:
    r"""Offset and slope (eq. K17): :math:`\max(a + b \hat c,\; b \hat c / 10)`, with :math:`b \ge 0`.

    ``offset_ms`` is :math:`a`, ``slope`` is :math:`b`; the floor keeps small predictions above zero when ``a < 0``.
    """

    offset_ms: float = 0.0
    slope: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.offset_ms) and math.isfinite(self.slope) and self.slope >= 0.0):
            raise CostError(f"an affine correction is {self.offset_ms!r} + {self.slope!r} x; finite and slope >= 0")

    def __call__(self, prediction: float) -> float:
        return max(self.offset_ms + self.slope * prediction, _LEAST * self.slope * prediction)

    def tensor(self, prediction: Tensor) -> Tensor:
        import torch

        return torch.maximum(self.offset_ms + self.slope * prediction, _LEAST * self.slope * prediction)

    @property
    def scale(self) -> float:
        return self.slope

    @classmethod
    def fit(
        cls,
        predictions: Sequence[float],
        latencies_ms: Sequence[float],
        *,
        noise: float = 0.02,
        slope_spread: float = 0.3,
        offset_spread: float = 0.1,
    ) -> Affine:
        r"""Least squares on relative errors, shrunk to the identity when points are few (eq. K17).

        .. math:: \min_{b \ge 0} \sum_i \Big(\frac{a + b \hat c_i - c_i}{c_i}\Big)^2
            + \Big(\frac{\nu}{\sigma_b}\Big)^2 (b - 1)^2 + \Big(\frac{\nu}{\sigma_a}\Big)^2 \Big(\frac a {\bar c}\Big)^2

        ``noise`` is :math:`\nu`, the relative error of one run; ``slope_spread`` and ``offset_spread`` are
        :math:`\sigma_b, \sigma_a`, how far slope and offset (as a share of the median latency) are expected to stray.
        """
        check_pairs(predictions, latencies_ms)
        latency_N = np.asarray(latencies_ms, dtype=np.float64)
        middle = float(np.median(latency_N))
        rows = np.column_stack([middle / latency_N, np.asarray(predictions) / latency_N])
        rows = np.vstack([rows, [noise / offset_spread, 0.0], [0.0, noise / slope_spread]])
        goal = np.array([*np.ones(len(latency_N)), 0.0, noise / slope_spread])
        (offset, slope), *_ = np.linalg.lstsq(rows, goal, rcond=None)
        if slope < 0.0:
            slope, offset = 0.0, float(rows[:, 0] @ goal / (rows[:, 0] @ rows[:, 0]))
        return cls(float(offset) * middle, float(slope))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "affine", "offset_ms": self.offset_ms, "slope": self.slope}


@dataclass(frozen=True)
class Isotonic:
    """The best non-decreasing step-and-line map, kept as knots; beyond them proportional to the last knot (eq. K18)."""

    inputs_ms: tuple[float, ...]
    outputs_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise((0.0, *self.inputs_ms)))
        kept = all(a <= b for a, b in pairwise(self.outputs_ms)) and all(0.0 < y < math.inf for y in self.outputs_ms)
        if not self.inputs_ms or len(self.inputs_ms) != len(self.outputs_ms) or not rising or not kept:
            raise CostError(
                f"an isotonic correction has {len(self.inputs_ms)} inputs and {len(self.outputs_ms)} outputs; "
                "both must be positive, inputs rising and outputs not falling"
            )

    def __call__(self, prediction: float) -> float:
        x, y = self.inputs_ms, self.outputs_ms
        if prediction <= x[0] or prediction >= x[-1]:
            end = 0 if prediction <= x[0] else -1
            return prediction * (y[end] / x[end])
        return float(np.interp(prediction, x, y))

    def tensor(self, prediction: Tensor) -> Tensor:
        import torch

        like = {"dtype": prediction.dtype, "device": prediction.device}
        x, y = torch.tensor((0.0, *self.inputs_ms), **like), torch.tensor((0.0, *self.outputs_ms), **like)  # type: ignore[arg-type]
        slope = torch.cat([(y[1:] - y[:-1]) / (x[1:] - x[:-1]), y[-1:] / x[-1:]])
        piece = (torch.searchsorted(x, prediction.detach().contiguous()) - 1).clamp(min=0)
        return y[piece] + slope[piece] * (prediction - x[piece])

    @property
    def scale(self) -> float:
        """The average slope, from nothing to the last knot."""
        return self.outputs_ms[-1] / self.inputs_ms[-1]

    @classmethod
    def fit(cls, predictions: Sequence[float], latencies_ms: Sequence[float]) -> Isotonic:
        r"""Isotonic regression on relative errors, :math:`\min_{f \uparrow} \sum_i ((f(\hat c_i) - c_i)/c_i)^2`."""
        from sklearn.isotonic import IsotonicRegression

        check_pairs(predictions, latencies_ms)
        weight_N = 1.0 / np.asarray(latencies_ms, dtype=np.float64) ** 2
        fitted = IsotonicRegression().fit(predictions, latencies_ms, sample_weight=weight_N)
        knots = dict(zip(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), strict=True))
        return cls(tuple(knots), tuple(np.maximum.accumulate(list(knots.values())).tolist()))

    def to_json(self) -> dict[str, Any]:
        return {"kind": "isotonic", "inputs_ms": list(self.inputs_ms), "outputs_ms": list(self.outputs_ms)}


@dataclass(frozen=True)
class Margin:
    """A factor on every prediction, so that the clock stays below (eq. K19)."""

    factor: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0.0):
            raise CostError(f"a margin is {self.factor!r}; it must be finite and above 0, measure more runs")

    def __call__(self, prediction: float) -> float:
        return self.factor * prediction

    def tensor(self, prediction: Tensor) -> Tensor:
        return self.factor * prediction

    @property
    def scale(self) -> float:
        return self.factor

    @classmethod
    def fit(cls, predictions: Sequence[float], latencies_ms: Sequence[float], alpha: float | None = None) -> Margin:
        r"""The largest ratio seen, :math:`\max_i c_i / \hat c_i`, or its conformal quantile at ``alpha`` (eq. K19)."""
        check_pairs(predictions, latencies_ms)
        ratios = [latency / predicted for predicted, latency in zip(predictions, latencies_ms, strict=True)]
        factor = max(ratios) if alpha is None else conformal_quantile(ratios, alpha)
        if math.isinf(factor):
            raise CostError(
                f"{len(ratios)} runs are too few for a margin at alpha {alpha!r}; measure more or drop alpha"
            )
        return cls(factor)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "margin", "factor": self.factor}


def recalibrate(predictions: Sequence[float], latencies_ms: Sequence[float], how: How = "affine") -> Recalibration:
    """Fits the correction of the given kind."""
    if how not in HOWS:
        raise CostError(f"recalibration by {how!r}; choose affine, isotonic or margin")
    kind: Any = {"affine": Affine, "isotonic": Isotonic, "margin": Margin}[how]
    fitted: Recalibration = kind.fit(predictions, latencies_ms)
    return fitted


def recalibration_from_json(fields: Mapping[str, Any]) -> Recalibration:
    """Reads back any of the three."""
    kind = fields["kind"]
    if kind == "affine":
        return Affine(number(fields["offset_ms"], "offset_ms"), number(fields["slope"], "slope"))
    if kind == "isotonic":
        return Isotonic(numbers(fields["inputs_ms"], "inputs_ms"), numbers(fields["outputs_ms"], "outputs_ms"))
    if kind == "margin":
        return Margin(number(fields["factor"], "factor"))
    raise CostError(f"a saved recalibration is of kind {kind!r}; known are affine, isotonic and margin")
